"""Transfer: one copy job, as every rank gets it. Knows nothing of vLLM."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One copy job: pairs of device and host blocks, copied by every rank.

    A host block is as large as a device block here: a slot, in the scheduler side's terms, if its
    host blocks are larger.

    ``id`` only grows over the life of the engine. Loads have a ``request_id``: each rank tells
    vLLM which request's blocks have arrived. Stores have none.
    """

    id: int
    device_blocks: BlockIds  # [n]
    host_blocks: BlockIds  # [n]
    request_id: str | None = None
    after_compute: bool = True
    """Whether it must come after compute that was queued before it. False only if none of that
    touches its device blocks."""
    by_place: BlockIds | None = None  # [places, n]
    """If ranks share host memory, but not in all KV cache groups: the host blocks for the rank at
    each place of its pool. Ranks share those that are equal for all places."""

    num_new_tokens: int = 0
    """Of a load: tokens of its request that are left to compute."""

    @property
    def overlaps(self) -> bool:
        """Whether its request's compute may begin before the last bytes have arrived. With one new
        token, the request joins those that decode, whose step vLLM launches as a whole."""
        return self.num_new_tokens > 1

    @classmethod
    def pairing(
        cls,
        transfer_id: int,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        request_id: str | None = None,
        after_compute: bool = True,
        by_place: Callable[[BlockIds], BlockIds | None] = lambda _: None,
        num_new_tokens: int = 0,
    ) -> "Transfer":
        """A transfer of ``device_blocks[i]`` with ``host_blocks[i]``; ValueError if their lengths
        differ. ``by_place``: from host blocks to those at each place."""
        count = len(device_blocks)
        if count != len(host_blocks):
            raise ValueError(f"{count} device blocks paired with {len(host_blocks)} host blocks")
        device, host = as_array(device_blocks), as_array(host_blocks)
        places = by_place(host)
        return cls(transfer_id, device, host, request_id, after_compute, places, num_new_tokens)


def as_array(ids: Sequence[int]) -> BlockIds:
    """As ``np.array``, writable too, in a third of the time for thousands of ids."""
    return np.frombuffer(bytearray(struct.pack(f"{len(ids)}q", *ids)), np.int64)
