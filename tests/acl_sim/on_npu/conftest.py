"""Fixtures of tests on torch_npu: its loaded runtime, and a backend with memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch_npu

from simple_offload.backends.base import Direction
from simple_offload.backends.npu.backend import NpuBackend
from tests.acl_sim.on_npu.sides import MakeSides, NpuSides
from tests.acl_sim.sim import Sim


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = Sim("libascendcl.so")
    sim.reset()
    torch_npu.npu.set_device(0)
    yield sim
    sim.reset()
    torch_npu.npu.synchronize()
    torch_npu.npu.set_device(0)


@pytest.fixture
def make_sides(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSides]:
    """A function that makes a backend, and memory for it to copy between. The backend's streams are
    what ``wrap`` makes of torch_npu's."""
    made: list[NpuBackend] = []

    def make(
        pages: Sequence[int] = (64,),
        num_blocks: int = 16,
        chunk_blocks: int | None = None,
        copy_path: str = "auto",
        gap: int | None = None,
        wrap: Callable[[Any], Any] = lambda stream: stream,
    ) -> NpuSides:
        streams: list[Any] = []
        make_stream = torch_npu.npu.Stream

        def make_wrapped(*device: int, **existing: int) -> Any:
            if existing:  # torch_npu's own call, for one that is there
                return make_stream(**existing)
            streams.append(wrap(make_stream(*device)))
            return streams[-1]

        with monkeypatch.context() as patched:
            patched.setattr(torch_npu.npu, "Stream", make_wrapped)
            backend = NpuBackend(copy_path)
        made.append(backend)
        sim.take_counts()  # less what the backend did to try itself out
        sides = NpuSides(
            backend, pages, num_blocks, chunk_blocks=chunk_blocks, gap=gap, device="npu"
        )
        sides.sim = sim
        sides.streams = dict(zip(Direction, streams, strict=True))
        return sides

    yield make
    torch.npu.synchronize()  # type: ignore[attr-defined]
    for backend in made:
        backend.close()
