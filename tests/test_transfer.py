"""Copy jobs."""

from collections.abc import Sequence

import numpy as np
import pytest

from simple_offload.transfer import Transfer


@pytest.mark.parametrize(("device", "host"), [([3, 1, 2], (9, 8, 7)), ([], [])])
def test_pairing(device: list[int], host: Sequence[int]) -> None:
    transfer = Transfer.pairing(7, device, host, "a")
    assert (transfer.id, transfer.request_id) == (7, "a")
    for paired, wanted in ((transfer.device_blocks, device), (transfer.host_blocks, host)):
        assert paired.tolist() == list(wanted)
        assert paired.dtype == np.int64
        assert paired.flags.writeable  # torch warns of memory that it may not write to


@pytest.mark.parametrize(("device", "host"), [([1, 2], [1]), ([], [1]), ([1], [])])
def test_unequal_lists_do_not_pair(device: list[int], host: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(device)} device blocks .* {len(host)} host"):
        Transfer.pairing(1, device, host)
