"""Drivers whose worlds are closed after the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from simple_offload.vllm_compat import vllm_version
from tests.scheduler.driver import Driver

MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="session", autouse=True)
def first_hash() -> None:
    """The parent hash of a prompt's first block. An engine sets it when it starts."""
    init_none_hash(sha256)


@pytest.fixture
def drive(no_thread_left: None) -> Iterator[MakeDriver]:
    """A function that makes a Driver of a world. Its keywords are those of the Shape. Skips the
    test if this vLLM is refused for the shape."""
    drivers: list[Driver] = []

    def make(**shape: Any) -> Driver:
        if vllm_version() < (0, 31) and shape.get("num_states") and shape.get("match_unit"):
            pytest.skip("no hits inside the blocks of state layers on vLLM 0.30")
        drivers.append(Driver(**shape))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.world.close()


@pytest.fixture
def roomy(drive: MakeDriver) -> MakeDriver:
    """Drivers with a tier for all blocks, whose device has 40 blocks of each group."""

    def make(windows: tuple[int, ...] = (0,), **shape: Any) -> Driver:
        sizes = {"num_device_blocks": 40 * len(windows), "num_host_blocks": 400}
        return drive(windows=windows, **sizes | shape)

    return make
