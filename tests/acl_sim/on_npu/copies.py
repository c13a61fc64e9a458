"""NpuBackend on the real torch_npu: every byte of every requested block, no other byte; and its
errors."""

import ctypes
import logging
import os
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu

from simple_offload.backends.base import Direction, Measurement
from simple_offload.backends.descriptors import Descriptors
from simple_offload.backends.npu.acl import MAX_BATCH, Acl, AclError
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.memory import GIB
from tests.acl_sim.on_npu.sides import MakeSides
from tests.acl_sim.sim import Sim
from tests.backends.sides import Blocks
from tests.conftest import Machine

both_paths = pytest.mark.parametrize("path", ["batch", "single"])
HELD_BLOCKS = np.arange(0, 2 * 5000, 2)  # no two are neighbours


def scattered(count: int) -> Blocks:
    """Blocks without neighbours, so that no descriptors merge."""
    return 2 * np.random.default_rng(count).permutation(count)


# Bytes


@pytest.mark.parametrize("direction", list(Direction))
@both_paths
@pytest.mark.parametrize("gap", [None, 5])
@pytest.mark.parametrize(
    ("pages", "num_blocks", "chunk_blocks", "count"),
    [
        ((), 16, 16, 16),  # a rank without layers
        ((64,), 16, 16, 0),
        ((64,), 16, 16, 16),
        ((512, 1000, 24), 100, 100, 33),
        ((4097, 16), 64, 10, 50),  # host blocks in seven chunks, the last of 4
        ((1 << 16,), 40, 1, 40),
    ],
)
def test_blocks_and_nothing_else(
    make_sides: MakeSides,
    direction: Direction,
    path: str,
    gap: int | None,
    pages: tuple[int, ...],
    num_blocks: int,
    chunk_blocks: int,
    count: int,
) -> None:
    sides = make_sides(pages, num_blocks, chunk_blocks, path, gap)
    device_blocks = np.random.default_rng(1).permutation(num_blocks)[:count]
    host_blocks = np.random.default_rng(2).permutation(num_blocks)[:count]
    pending = sides.copy_and_check(direction, device_blocks, host_blocks)
    assert pending.done()
    assert pending.measure() == Measurement(None, {path: count * sum(pages)})
    assert sides.sim.take_counts().blocking == 0


def test_memory_that_is_not_pinned_blocks_the_caller(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the zeros of ``blocking`` in other tests say something."""
    monkeypatch.setattr(
        NpuBackend, "allocate_host", lambda _, size: torch.empty(size, dtype=torch.int8)
    )
    sides = make_sides(copy_path="single")
    sides.copy(Direction.LOAD, [1, 3], [2, 9]).wait()
    assert sides.sim.take_counts().blocking == 2


@pytest.mark.parametrize(("first_device", "device"), [(0, 1), (4, 0)])
def test_another_device(make_sides: MakeSides, sim: Sim, first_device: int, device: int) -> None:
    """Copy threads begin on device 0. The runtime may know a device by another number."""
    sim.library.acl_sim_set_first_device(first_device)
    torch_npu.npu.set_device(device)
    sides = make_sides(pages=(512,))
    for direction in Direction:
        sides.copy_and_check(direction, [1, 3], [2, 9])
    assert sides.sim.take_counts().batch_calls == 2


# Descriptors and calls


@both_paths
@pytest.mark.parametrize("count", [4095, 4096, 4097, 20_000])
def test_chunks_of_at_most_4096(make_sides: MakeSides, path: str, count: int) -> None:
    sides = make_sides((8,), 2 * count, copy_path=path)
    for direction in Direction:
        sides.copy_and_check(direction, scattered(count), scattered(count)[::-1])
        counts = sides.sim.take_counts()
        assert counts.descriptors == count
        if path == "batch":
            assert (counts.batch_calls, counts.single_calls) == (-(-count // 4096), 0)
            assert counts.largest_batch == min(count, 4096)
        else:
            assert (counts.batch_calls, counts.single_calls) == (0, count)


@both_paths
@pytest.mark.parametrize(("gap", "descriptors"), [(None, 4), (0, 40)])
def test_neighbours_are_one_descriptor(
    make_sides: MakeSides, path: str, gap: int | None, descriptors: int
) -> None:
    """This holds for each dense region, within one host chunk."""
    sides = make_sides((64, 128), 100, chunk_blocks=50, copy_path=path, gap=gap)
    sides.copy_and_check(Direction.STORE, np.arange(40, 60), np.arange(40, 60))
    assert sides.sim.take_counts().descriptors == descriptors


# Which path


@pytest.mark.parametrize(
    ("version", "text", "fault", "found"),
    [
        (80501000, "8.5.1", None, "they work here"),
        (90203000, "9.2.3", None, "they work here"),
        (90110000, "9.1.10", "no batches", "207000"),
        # The probe fails for another reason, on the way there or back.
        (90200000, "9.2.0", 0, "107000"),
        (90200000, "9.2.0", 1, "107000"),
        (90200000, "9.2.0", "other bytes", "came back with other bytes"),
    ],
)
def test_the_choice_and_the_version_are_logged(
    make_sides: MakeSides,
    sim: Sim,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: int,
    text: str,
    fault: int | str | None,
    found: str,
) -> None:
    sim.library.acl_sim_set_version(version)
    if fault == "no batches":
        sim.take_batches(False)
    elif fault == "other bytes":
        monkeypatch.setattr(Acl, "copy_batch", lambda *arguments: None)
    elif isinstance(fault, int):
        sim.fail_after(fault, 107000)
    with caplog.at_level(logging.INFO):
        sides = make_sides()
    (line,) = [r.getMessage() for r in caplog.records if "CANN" in r.getMessage()]
    assert f"CANN {text}, " in line
    assert ("one descriptor a call" if fault is not None else "in batches") in line
    assert found in line
    assert sides.backend.batches is (fault is None)
    sides.copy(Direction.LOAD, [1], [2]).wait()
    assert sides.sim.take_counts().single_calls == (fault is not None)


def test_batches_that_are_refused_later_are_never_tried_again(make_sides: MakeSides) -> None:
    sides = make_sides()
    assert sides.backend.batches
    sides.sim.take_batches(False)
    sides.copy_and_check(Direction.STORE, [1, 5], [3, 2])
    sides.sim.take_batches(True)
    sides.sim.take_counts()
    sides.copy(Direction.LOAD, [1], [3]).wait()
    counts = sides.sim.take_counts()
    assert (counts.batch_calls, counts.single_calls) == (0, 1)


def test_forced_batches_that_are_refused_later_fail(make_sides: MakeSides) -> None:
    sides = make_sides(copy_path="batch")
    sides.sim.take_batches(False)
    with pytest.raises(AclError) as caught:
        sides.copy(Direction.STORE, [1], [3])
    assert str(caught.value) == (
        "aclrtMemcpyBatchAsync: error 207000: this chip has no batched copies"
    )


@pytest.mark.parametrize(
    ("copy_path", "batches"), [("auto", True), ("single", False), ("batch", True)]
)
def test_the_path_can_be_forced(make_sides: MakeSides, copy_path: str, batches: bool) -> None:
    sides = make_sides(copy_path=copy_path)
    sides.copy(Direction.LOAD, [1], [2]).wait()
    counts = sides.sim.take_counts()
    assert (counts.batch_calls, counts.single_calls) == ((1, 0) if batches else (0, 1))


def test_this_is_the_torch_npu_that_was_asked_for() -> None:
    assert torch_npu.__version__ == os.environ["TORCH_NPU_VERSION"]


# Faults


@both_paths
@pytest.mark.parametrize("index", [0, 1, 4095, 4096, 4999])
def test_a_refusal_says_where_and_why(make_sides: MakeSides, path: str, index: int) -> None:
    """Descriptors before the refused one are copied, later ones are not."""
    sides = make_sides((8,), 10_000, copy_path=path)
    blocks = HELD_BLOCKS
    expected = sides.expected(Direction.STORE, blocks[:index], blocks[:index])
    sides.sim.fail_after(index, 507018)
    with pytest.raises(AclError) as caught:
        sides.copy(Direction.STORE, blocks, blocks)
    function = "aclrtMemcpyBatchAsync" if path == "batch" else "aclrtMemcpyAsync"
    message = f"{function}: error 507018 at descriptor {index}: requested failure"
    assert str(caught.value) == message
    sides.check(expected)
    sides.sim.fail_after(-1, 0)
    sides.copy(Direction.STORE, blocks, blocks).wait()  # the next copy succeeds


class StreamWithoutEvents:
    """A stream of a device that has no events left."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def record_event(self) -> Any:
        raise RuntimeError("no event")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.mark.parametrize("error", [AclError, MemoryError, RuntimeError])
def test_a_refused_copy_fails_when_what_was_queued_has_ended(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Until then no other request may get its blocks."""
    wrap = StreamWithoutEvents if error is RuntimeError else (lambda stream: stream)
    sides = make_sides((8,), 10_000, wrap=wrap)
    if error is AclError:
        sides.sim.fail_after(4500, 107000)
    elif error is MemoryError:
        copy_batch = Acl.copy_batch

        def copy_full_batch(acl: Acl, plan: Descriptors, *others: Any) -> None:
            if len(plan.sizes) < MAX_BATCH:
                raise MemoryError
            copy_batch(acl, plan, *others)

        monkeypatch.setattr(Acl, "copy_batch", copy_full_batch)
    stream = sides.stream(Direction.STORE)
    with sides.sim.delayed(stream), pytest.raises(error):
        sides.copy(Direction.STORE, HELD_BLOCKS, HELD_BLOCKS)
    assert sides.sim.num_tasks(stream) == 0


@both_paths
def test_a_copy_that_the_device_fails(make_sides: MakeSides, path: str) -> None:
    sides = make_sides(copy_path=path)
    stream = sides.stream(Direction.LOAD)
    sides.sim.library.acl_sim_fail_stream(stream, 507011)
    pending = sides.copy(Direction.LOAD, [1], [2])
    for call in (pending.wait, pending.done):
        with pytest.raises(RuntimeError, match="507011"):
            call()
    sides.sim.library.acl_sim_fail_stream(stream, 0)


def test_a_block_that_is_not_there(make_sides: MakeSides) -> None:
    sides = make_sides(num_blocks=16)
    for device_blocks, host_blocks in (([16], [0]), ([0], [16]), ([-1], [0])):
        with pytest.raises(IndexError):
            sides.copy(Direction.LOAD, device_blocks, host_blocks)
    assert sides.sim.take_counts().descriptors == 0


# Host memory


def test_no_memory_is_given_back_while_it_is_copied(make_sides: MakeSides, sim: Sim) -> None:
    """Nobody may have noted the last copies: a signal can end the rank at any line. And a copy back
    may be refused as the backend tries itself out."""
    sides = make_sides()
    stream = sides.stream(Direction.STORE)
    with sim.delayed(stream):
        sides.copy(Direction.STORE, [1], [2])
        sides.backend.close()
        assert sim.num_tasks(stream) == 0
    stream = sides.compute_stream()
    with sim.delayed(stream):
        sim.fail_after(1, 107000)
        NpuBackend().close()
        assert sim.num_tasks(stream) == 0


def test_a_machine_with_little_memory_left(sim: Sim, machine: Machine) -> None:
    """Whether batches work is tried out all the same."""
    machine.available = GIB
    NpuBackend().close()


def test_host_memory_is_given_back(sim: Sim) -> None:
    before = sim.library.acl_sim_num_host()
    backend = NpuBackend()
    assert sim.library.acl_sim_num_host() == before
    sizes = [1, 4096, 100_001]
    for size in sizes:
        with ThreadPoolExecutor(1) as pool:  # its thread has no context of its own
            assert pool.submit(backend.allocate_host, size).result().nbytes == size
    assert sim.library.acl_sim_num_host() == before + len(sizes)
    backend.close()
    assert sim.library.acl_sim_num_host() == before


def test_host_memory_that_cannot_be_had(sim: Sim) -> None:
    backend = NpuBackend()
    sim.library.acl_sim_limit_host(1 << 16)
    with pytest.raises(AclError, match=r"aclrtMallocHost: error 207001: .*100000 bytes"):
        backend.allocate_host(100_000)
    backend.close()


def test_host_memory_while_a_graph_is_captured(sim: Sim) -> None:
    backend = NpuBackend()
    sim.library.acl_sim_set_capturing(1)
    address = ctypes.byref(ctypes.c_void_p())
    assert sim.code("aclrtMallocHost", address, 8) == 107030
    assert backend.allocate_host(8).nbytes == 8
    assert sim.code("aclrtMallocHost", address, 8) == 107030  # the mode is as it was
    backend.close()


def test_a_kv_cache_that_is_not_the_npus(sim: Sim) -> None:
    backend = NpuBackend()
    with pytest.raises(ValueError, match="not the NPU's"):
        backend.open([torch.zeros((4, 8), dtype=torch.int8)])
    backend.close()


# The program for the first run on hardware


def test_the_hardware_check(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program runs to its end. On hardware it is the test."""
    monkeypatch.setattr(sys, "argv", ["", "check", "bench", "--mib", "4", "--rounds", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tests.backends.npu_hardware", run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "all right" in printed
    assert len(re.findall(r"(?:batch|single) +(?:load|store) .* GB/s", printed)) == 24
