"""The probe of overlap: its copies, its forward pass, its verdict. Without a GPU, bytes of a load
move when somebody waits for them."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("rich")

from examples.bench.command import BAD_RESULT, CANNOT_START
from examples.overlap_probe import __main__ as probe
from examples.overlap_probe import measure, model
from examples.overlap_probe.measure import Rig, plan_load
from examples.overlap_probe.model import Model, Step
from examples.overlap_probe.plan import EAGER, GRAPHS, Plan, Shape
from examples.overlap_probe.results import Kind, Results
from simple_offload.backends.base import Barrier, Direction
from simple_offload.backends.cuda.queues import CudaPending
from simple_offload.backends.host import HostBackend
from simple_offload.transfer import Transfer

TINY = Shape(8, hidden=64, mlp=128, heads=4, kv_heads=2, head=64, vocab=128)
PLAN = Plan(contexts=(64, 256), new_tokens=(1, 40), shape=TINY, rounds=2, lag_seconds=0.0)
GROUPS = pytest.mark.parametrize("groups", PLAN.groups)
_BUSY = 400_000_000  # cycles: about 0.2 s


class PlainAttention:
    """Attention over gathered pages, by torch, in float32."""

    version = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(
        self, qkv: tuple[torch.Tensor, ...], cache: torch.Tensor, step: Step, out: torch.Tensor
    ) -> None:
        q, k, v = qkv
        size, head = TINY.block_tokens, TINY.head
        cache[step.slots // size, :, step.slots % size] = torch.cat([k, v], dim=2)
        pages = cache[step.block_table[0].long()].transpose(1, 2).flatten(0, 1)  # [tokens, ...]
        total = step.context + step.new_tokens
        repeats = q.shape[1] // pages.shape[1]
        keys, values = pages[:total].float().repeat_interleave(repeats, 1).split(head, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * head**-0.5
        places = torch.arange(total, device=q.device)
        scores.masked_fill_(places > places[step.context :, None], -torch.inf)
        out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(2), values))


# Copies


@GROUPS
def test_groups_of_layers_arrive_in_order_and_each_byte_once(groups: int) -> None:
    """A model's last layers come last, in every block of the load and in no other."""
    host, pool = (torch.zeros(8, *TINY.block_shape, dtype=torch.bfloat16) for _ in range(2))
    host.normal_()
    backend = HostBackend()
    rows = [side.view(torch.int8).view(8 * groups, -1) for side in (pool, host)]
    backend.open(rows[:1])
    backend.add_host_chunk(rows[1:])
    blocks = np.array([5, 0, 6])
    plan = plan_load(blocks, groups)
    copied = np.concatenate([transfer.device_blocks for transfer in plan])
    assert len(set(copied.tolist())) == len(copied) == len(blocks) * groups
    expected = torch.zeros_like(pool)
    assert len(plan) == groups
    for group, transfer in enumerate(plan):
        backend.copy(Direction.LOAD, transfer, None)
        layers = slice(group * TINY.layers // groups, (group + 1) * TINY.layers // groups)
        expected[blocks, layers] = host[blocks, layers]
        assert torch.equal(pool, expected)
    assert torch.equal(pool[blocks], host[blocks])


# The forward pass


@pytest.fixture
def step() -> Step:
    torch.manual_seed(0)
    pool = torch.randn(12, *TINY.block_shape).bfloat16()
    device = torch.device("cpu")
    return Step(Model(TINY, device), PlainAttention(device), pool, new_tokens=20, context=128)


def logits(step: Step) -> torch.Tensor:
    step.run(EAGER)
    return step.logits.clone()


def test_every_loaded_page_of_every_layer_counts(step: Step) -> None:
    """So does no page of a block that the request does not have."""
    before = logits(step)
    assert torch.equal(logits(step), before)
    assert bool(before.isfinite().all())
    for layer in range(TINY.layers):
        for block in (0, 7):
            page = step._pool[block, layer]
            kept = page.clone()
            page.fill_(50)
            assert not torch.equal(logits(step), before), (layer, block)
            page.copy_(kept)
    step._pool[8:10] = 50.0
    assert torch.equal(logits(step), before)


def test_a_part_reads_the_pages_of_its_layers_only(step: Step) -> None:
    """Else its group's bytes would not be enough."""
    before = logits(step)
    for part, launch in enumerate(step.launches[EAGER]):
        kept = step._pool[:8].clone()
        step._pool[:8, :part] = 50.0
        step._pool[:8, part + 1 :] = 50.0
        launch()
        step._pool[:8] = kept
    assert torch.equal(step.logits, before)


def test_sizes_are_those_of_llama_3_8b() -> None:
    """But for the embedding, which a pass does not multiply."""
    shape = Shape()
    model = Model(shape, torch.device("meta"))
    weights = [weight for layer in model.layers for weight in layer]
    embedding = shape.vocab * shape.hidden
    total = sum(weight.numel() for weight in [*weights, model.vocab]) + embedding
    assert total == pytest.approx(8.03e9, rel=1e-3)
    assert shape.block_bytes == 2 << 20
    assert shape.block_bytes == 2 * np.prod(shape.block_shape)


def test_a_request_larger_than_the_pool(step: Step) -> None:
    with pytest.raises(ValueError, match="176 and 20 tokens in 12 blocks of 16"):
        Step(step._model, step._attention, step._pool, 20, 176)


# The verdict


def results(
    both: dict[int, float],
    gb_per_s: dict[int, float],
    *,
    scattered: float = 1.0,
    launch: str = GRAPHS,
    new_tokens: int = 512,
) -> Results:
    """Milliseconds of 512 tokens behind 8,192, and bandwidths of loads, by groups."""
    found = Results(Plan(fixed_seconds=0.010), {})
    for groups, milliseconds in both.items():
        kind = Kind(8192, "both", groups, new_tokens, launch)
        # The median counts.
        found.seconds[kind] += [milliseconds / 1e3, 0.0, 9.0]
    for context in (8192, 100_000):
        for groups, rate in gb_per_s.items():
            found.seconds[Kind(context, "bytes", groups)].append(context / rate)
        found.seconds[Kind(context, "scattered")].append(context / scattered)
    return found


@pytest.mark.parametrize(
    ("both", "gb_per_s", "builds"),
    [
        ({1: 40, 4: 34, 8: 39}, {1: 50, 4: 50, 8: 50}, True),  # 12% of 50 ms
        ({1: 40, 4: 39, 8: 34}, {1: 50, 4: 50, 8: 50}, True),
        ({1: 40, 4: 34.9, 8: 34.9}, {1: 50, 4: 49.1, 8: 40}, True),
        ({1: 40, 4: 35.1, 8: 35.1}, {1: 50, 4: 50, 8: 50}, False),  # 12% without the fixed part
        ({1: 40, 4: 30, 8: 30}, {1: 50, 4: 48.9, 8: 48.9}, False),
        ({1: 40, 4: 34, 8: 39}, {1: 50, 4: 48, 8: 50}, False),  # each number misses one condition
        ({1: 40, 4: 50, 8: 60}, {1: 50, 4: 50, 8: 50}, False),
    ],
)
def test_it_pays_from_a_tenth_of_ttft_with_no_loss_of_bandwidth(
    both: dict[int, float], gb_per_s: dict[int, float], builds: bool
) -> None:
    pays, lines = results(both, gb_per_s).verdict()
    assert pays is builds
    assert lines[0].startswith("BUILD" if builds else "DO NOT BUILD")
    assert [line.split(":")[0] for line in lines[1:]] == ["4 groups", "8 groups"]


def test_today_s_faster_order_of_blocks_counts() -> None:
    fast, slow = {1: 40.0, 4: 30.0, 8: 30.0}, {1: 50.0, 4: 50.0, 8: 50.0}
    assert results(fast, slow, scattered=50.5).verdict()[0] is True
    assert results(fast, slow, scattered=52.0).verdict()[0] is False


def test_the_worst_context_counts() -> None:
    found = results({1: 40, 4: 30, 8: 30}, {1: 50, 4: 50, 8: 50})
    for groups in (4, 8):
        found.seconds[Kind(100_000, "bytes", groups)] = [100_000 / 48]
    assert found.verdict()[0] is False


@pytest.mark.parametrize("other", [{"launch": EAGER}, {"new_tokens": 2048}])
def test_other_measurements_decide_nothing(other: dict[str, Any]) -> None:
    found = results({1: 40, 4: 1, 8: 1}, {1: 50, 4: 50, 8: 50}, **other)
    pays, (line,) = found.verdict()
    assert pays is None
    assert line == "No verdict: 512 new tokens behind 8,192 loaded ones were not measured."


def test_wrong_bytes_decide_nothing() -> None:
    found = results({1: 40, 4: 1, 8: 1}, {1: 50, 4: 50, 8: 50})
    found.num_faults = 2
    pays, lines = found.verdict()
    assert (pays, lines[0]) == (None, "No verdict: 2 forward passes read wrong KV.")


# The program


class Event:
    """A point in time. There is no device to reach it later."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.record()

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


class LazyPending:
    """A copy that moves its bytes, and those of copies before it, when it is waited for."""

    def __init__(self, backend: "LazyBackend", transfer: Transfer) -> None:
        self.start = Event()
        self.marks = [SimpleNamespace(event=self.start)]
        self._backend, self._transfer = backend, transfer

    def done(self) -> bool:
        return self not in self._backend.queue

    def wait(self) -> None:
        while not self.done():
            first = self._backend.queue.pop(0)
            HostBackend.copy(self._backend, Direction.LOAD, first._transfer, None)
            first.marks = [SimpleNamespace(event=Event())]

    def hold_compute(self) -> None:
        self.wait()


class LazyBackend(HostBackend):
    """In place of CudaBackend."""

    def __init__(self, copy_path: str) -> None:
        assert copy_path == "dma"
        super().__init__()
        self.queue: list[LazyPending] = []

    def copy(self, direction: Direction, transfer: Transfer, barrier: Barrier | None) -> Any:
        if direction is Direction.STORE:
            super().copy(direction, transfer, barrier)
            return SimpleNamespace(wait=lambda: None)
        self.queue.append(LazyPending(self, transfer))
        return self.queue[-1]


@pytest.fixture
def cpu_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that the probe accepts as a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Event)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(measure, "CudaBackend", LazyBackend)
    monkeypatch.setattr(measure, "FlashAttention", PlainAttention)
    monkeypatch.setattr(model, "capture", lambda parts: parts)
    monkeypatch.setattr(probe, "Plan", lambda: PLAN)


def run(output: Path, *arguments: str) -> int:
    return probe.main(["--rounds", "2", "--out", str(output), *arguments])


@pytest.mark.usefixtures("cpu_rig")
def test_a_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_thread_left: None
) -> None:
    assert run(tmp_path) == 0
    captured = capsys.readouterr()
    assert "NVIDIA H200, driver " in captured.out
    assert "No verdict: 512 new tokens behind 8,192 loaded ones were not" in captured.out
    assert "256 tokens, 40 new" in captured.err
    numbers = json.loads((tmp_path / "result.json").read_text())
    assert (numbers["builds"], numbers["num_faults"], numbers["attention"]) == (None, 0, "FA0")
    assert numbers["plan"]["shape"]["layers"] == TINY.layers
    found = {
        (row["context"], row["what"], row["groups"], row["new_tokens"], row["launch"]): row
        for row in numbers["seconds"]
    }
    for context in PLAN.contexts:
        for groups in PLAN.groups:
            assert len(found[context, "bytes", groups, 0, ""]["seconds"]) == 2
            for new_tokens in PLAN.new_tokens:
                for launch, rounds in ((GRAPHS, 2), (EAGER, 1)):
                    for what in ("both", "copied", "queued"):
                        row = found[context, what, groups, new_tokens, launch]
                        assert len(row["seconds"]) == rounds, "the first round does not count"
        assert len(found[context, "scattered", 1, 0, ""]["seconds"]) == 2
    assert "…" not in captured.out
    shown = [line.split() for line in captured.out.splitlines()]
    lines = [line[1:] for line in shown if line[:1] == ["256"]]
    assert [line[:3] for line in lines[:4]] == [
        ["1", "neighbours", "64"],
        ["4", "neighbours", "16"],
        ["8", "neighbours", "8"],
        ["1", "scattered", "64"],
    ]
    passes = [[new, launch] for new in ("1", "40") for launch in sorted((GRAPHS, EAGER))]
    assert sorted(line[:2] for line in lines[4:]) == sorted(2 * passes)
    milliseconds = 1e3 * median(found[256, "both", 8, 40, GRAPHS]["seconds"])
    (times, _) = (line for line in lines if line[:2] == ["40", GRAPHS])
    assert times[-2] == f"{milliseconds:.1f}"


def without_hold(monkeypatch: pytest.MonkeyPatch, pending: type, group: int) -> None:
    """Plant a bug: compute does not wait for a load's ``group``."""
    hold, calls = pending.hold_compute, iter(range(1 << 30))  # type: ignore[attr-defined]

    def hold_others(self: Any) -> None:
        if next(calls) != group:
            hold(self)

    monkeypatch.setattr(pending, "hold_compute", hold_others)


@pytest.mark.usefixtures("cpu_rig")
@pytest.mark.parametrize("group", range(4))
def test_compute_that_does_not_wait_for_a_group_is_found(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        rig = Rig(Results(PLAN, {}), stack)
        step = rig.steps[-1]
        assert rig.load_and_compute(step, GRAPHS, 4, 0.0).is_right
        without_hold(monkeypatch, LazyPending, group)
        assert not rig.load_and_compute(step, GRAPHS, 4, 0.0).is_right


@pytest.mark.usefixtures("cpu_rig")
def test_wrong_bytes_exit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_hold(monkeypatch, LazyPending, 7)
    assert run(tmp_path, "--contexts", "64") == BAD_RESULT
    assert "No verdict: 1 forward passes read wrong KV." in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["num_faults"] == 1


@pytest.mark.usefixtures("cpu_rig")
@pytest.mark.parametrize(
    ("error", "code"), [(ImportError("no"), 2), (MemoryError("no"), 3), (RuntimeError("no"), 3)]
)
def test_what_is_missing_is_reported(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_rig(_: Results) -> None:
        raise error

    monkeypatch.setattr(measure, "cuda_rig", no_rig)
    assert run(tmp_path) == code
    assert "no" in capsys.readouterr().err.splitlines()[-1]


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.main([]) == CANNOT_START
    assert capsys.readouterr().err.startswith("No CUDA device (torch")


# On a GPU


@pytest.fixture
def rig() -> Iterator[Rig]:
    with measure.cuda_rig(Results(PLAN, {})) as rig:
        yield rig


def delay(
    monkeypatch: pytest.MonkeyPatch, rig: Rig, groups: int, delayed: int, side: torch.cuda.Stream
) -> None:
    """The copies of one group begin late, and so do all behind them. ``side`` is busy meanwhile."""
    calls = iter(range(1 << 30))

    def barrier() -> torch.cuda.Event:
        event = torch.cuda.Event()
        if next(calls) % groups == delayed:
            with torch.cuda.stream(side):
                torch.cuda._sleep(_BUSY)
                event.record(side)
        return event

    monkeypatch.setattr(rig.loaders[groups].backend, "barrier", barrier)


@pytest.mark.gpu
@GROUPS
@pytest.mark.parametrize("launch", [GRAPHS, EAGER])
def test_each_wait_on_a_gpu_is_needed_and_enough(
    launch: str, groups: int, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of the whole load, bit by bit, however late a group is; and others if
    compute does not wait for that group."""
    for step in rig.steps:
        assert rig.load_and_compute(step, launch, groups, 0.0).is_right
    step = rig.steps[-1]
    # Torch hands out 32 streams in turn: one asked for now is none of the rig's.
    side = torch.cuda.Stream()
    for group in range(groups):
        with monkeypatch.context() as patch:
            delay(patch, rig, groups, group, side)
            assert rig.load_and_compute(step, launch, groups, 0.0).is_right
            without_hold(patch, CudaPending, group)
            assert not rig.load_and_compute(step, launch, groups, 0.0).is_right


@pytest.mark.gpu
def test_flash_attention_reads_the_pages_that_plain_attention_reads(rig: Rig) -> None:
    """Up to rounding."""
    for step in rig.steps:
        expected = step.expected[GRAPHS].float()
        step._attention = PlainAttention(step.logits.device)
        rig.load(1, rig.blocks)
        step.run(EAGER)
        difference = (step.logits.float() - expected).norm() / expected.norm()
        assert float(difference) < 0.05


@pytest.mark.gpu
def test_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "Plan", lambda: PLAN)
    assert run(tmp_path) == 0, capsys.readouterr().err
    numbers = json.loads((tmp_path / "result.json").read_text())
    assert numbers["num_faults"] == 0
    assert numbers["attention"] in ("FA2", "FA3")
    assert all(min(row["seconds"]) > 0 for row in numbers["seconds"])
