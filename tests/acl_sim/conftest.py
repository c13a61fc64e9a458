"""The simulated runtime in this process, on device 0, with every switch reset."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.acl_sim import build
from tests.acl_sim.sim import Sim

collect_ignore = [] if find_spec("torch_npu") else ["on_npu"]


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = Sim(build.library())
    sim.reset()
    sim.call("aclrtSetDevice", 0)
    yield sim
    sim.reset()
