"""Each layer of a step waits for its part of the loads, and no compute runs without waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.kv_cache_interface import KVCacheConfig

from simple_offload import metrics
from simple_offload.backends.base import Measurement
from simple_offload.metadata import StepMetadata
from simple_offload.worker import overlap
from simple_offload.worker.layer_groups import NUM_GROUPS
from tests.worker.conftest import MakeRank
from tests.worker.rank import NOTHING, Rank, load, store
from tests.worker.scripted import ScriptedPending

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

LAYERS = "abcdefgh"


def groups_for(name: str) -> int:
    """Layer groups that a layer needs: all groups are of equal size."""
    return -(-(LAYERS.index(name) + 1) * NUM_GROUPS // len(LAYERS))


@contextmanager
def forward(mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE, **changes: Any) -> Iterator[None]:
    """As vLLM's model runner sets it."""
    context = ForwardContext({}, {"a": cast(Any, None)}, {}, cudagraph_runtime_mode=mode)
    for name, value in changes.items():
        setattr(context, name, value)
    with override_forward_context(context):
        yield


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank(layers=LAYERS, waiting_layers=LAYERS)


def announce(rank: Rank, number: int = 0, num_new_tokens: int = 512) -> ScriptedPending:
    """Announce a load that has not ended."""
    pending = rank.announce(number, num_new_tokens)
    rank.backend.log.clear()
    return pending


def compute(
    rank: Rank, names: str = LAYERS, number: int = 0, num_tokens: int = 512, seconds: float = 0.0
) -> None:
    """A forward of these layers that reads the load, with ``seconds`` between layer groups. Its
    step has a store."""
    with forward():
        stores = [store(100 + number)]
        rank.worker.bind(StepMetadata(stores=stores, admitted=[number], num_tokens=num_tokens))
    for name in names:
        rank.worker.wait_for_layer(name)
        rank.backend.computed_until += seconds / 2


def holds(rank: Rank) -> list[int]:
    """Layer groups that compute was made to wait for, in order, since the last call."""
    found = [cast(int, entry[1]) for entry in rank.backend.log if entry[0] == "hold"]
    rank.backend.log.clear()
    return found


@pytest.mark.proves("I3")
def test_each_layer_waits_for_its_group(rank: Rank) -> None:
    announce(rank)
    compute(rank, "")
    assert holds(rank) == []
    num_held = 0
    for name in LAYERS:
        rank.worker.wait_for_layer(name)
        assert holds(rank) == ([groups_for(name)] if groups_for(name) > num_held else [])
        num_held = groups_for(name)
    assert num_held == NUM_GROUPS
    rank.worker.submit_stores()
    assert holds(rank) == []


@pytest.mark.proves("I3")
def test_unknown_and_late_layers_wait_for_all_that_they_may_need(rank: Rank) -> None:
    announce(rank)
    early, late = ([groups_for(name), NUM_GROUPS] for name in "ce")
    for names, expected in (("e", late), ("?", [NUM_GROUPS]), ("ca", early), ("ha", [NUM_GROUPS])):
        compute(rank, names)
        rank.worker.submit_stores()
        assert holds(rank) == expected


@pytest.mark.proves("I3")
@pytest.mark.parametrize("hook", ["submit_stores", "poll"])
def test_what_comes_after_the_forward_waits_for_the_rest(rank: Rank, hook: str) -> None:
    """A store, a drafter, and the next step."""
    announce(rank)
    compute(rank, "a")
    getattr(rank.worker, hook)()
    kinds = [entry[0] for entry in rank.backend.log if entry[0] in ("hold", "barrier")]
    assert kinds[:2] == ["hold", "hold"]
    assert holds(rank) == [1, NUM_GROUPS]


@pytest.mark.proves("I3")
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        (CUDAGraphMode.FULL, {}),
        (CUDAGraphMode.PIECEWISE, {"attn_metadata": None}),  # a step without tokens
        (CUDAGraphMode.NONE, {"ubatch_slices": [None, None]}),  # two streams
        (None, {}),  # vLLM's V2 runner, before a full CUDA graph
    ],
    ids=str,
)
def test_where_layers_do_not_call_a_step_waits_at_its_start(
    rank: Rank, mode: CUDAGraphMode | None, changes: dict[str, Any]
) -> None:
    announce(rank)
    with forward(mode, **changes) if mode is not None else override_forward_context(None):
        rank.worker.bind(StepMetadata(admitted=[0], num_tokens=1))
    assert holds(rank) == [NUM_GROUPS]
    rank.worker.wait_for_layer("a")
    rank.worker.submit_stores()
    assert holds(rank) == []


def test_a_forward_that_has_not_waited_stops_the_engine(rank: Rank) -> None:
    announce(rank)
    compute(rank, "")
    with pytest.raises(RuntimeError, match=r"no layer has called .*overlap_loads=False"):
        rank.worker.submit_stores()
    for name in LAYERS:
        rank.worker.wait_for_layer(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_loads": False},
        {"sync_load_ms": 0},
        # One that reads its KV too soon is enough: a DSA indexer, or one with own kernels.
        {"waiting_layers": LAYERS[:-1]},
        {"states": True},  # vLLM moves a state before the step's hooks run
    ],
    ids=str,
)
def test_where_loads_are_not_divided(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(KVCacheConfig, "has_mamba_layers", changes.pop("states", False))
    rank = make_rank(**{"layers": LAYERS, "waiting_layers": LAYERS} | changes)
    assert "divide" not in {entry[0] for entry in rank.backend.log}
    rank.pend(0, 1.0)
    assert rank.step(StepMetadata([load(0, "r0", num_new_tokens=9)])) == NOTHING
    rank.backend.log.clear()
    compute(rank, "")
    assert [entry for entry in rank.backend.log if entry[0] == "hold"] == [("hold",)]


class OwnForward(Attention):
    """A layer that may read its KV without a call."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("changes", "own_kernels", "expected"),
    [
        ({}, False, {"attention", "latent", "local"}),
        ({"speculative_config": object()}, False, set()),
        ({}, True, set()),
    ],
    ids=["usual", "drafter", "own kernels"],
)
def test_layers_that_wait(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], own_kernels: bool, expected: set[str]
) -> None:
    """vLLM's attention, and subclasses that run it. No other layer with KV."""
    kinds: dict[str, Any] = {"attention": Attention, "latent": MLAAttention}
    kinds |= {
        "local": ChunkedLocalAttention,
        "own": OwnForward,
        "state": ShortConv,
        "other": object,
    }
    context: dict[str, Any] = {name: object.__new__(kind) for name, kind in kinds.items()}
    monkeypatch.setattr(overlap, "has_own_kernels", lambda config: own_kernels)
    compilation = SimpleNamespace(static_forward_context=context)
    config = SimpleNamespace(speculative_config=None, compilation_config=compilation)
    vars(config).update(changes)
    assert overlap.waiting_layers(cast(Any, config)) == expected


@pytest.mark.parametrize("divided", [True, False])
def test_steps_that_overlap_are_counted(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    """A load that comes as a whole is held as a whole, so its step does not count."""
    announce(rank, num_new_tokens=512 if divided else 1)
    rank.worker.drain_stats()
    compute(rank)
    rank.worker.submit_stores()
    stats = rank.worker.drain_stats()
    assert (stats is not None and metrics.OVERLAPPED in str(stats.data)) is divided


# When a load is announced


def compute_first(rank: Rank) -> None:
    """A request of 400 tokens is computed, 0.3 s of it before the last layers."""
    announce(rank)
    compute(rank, num_tokens=400, seconds=0.1)
    rank.worker.submit_stores()
    rank.backend.pendings[0].ended.set()
    rank.step()


@pytest.mark.parametrize(
    ("num_new_tokens", "hidden"),
    [(400, 0.3), (4000, 0.3), (100, 0.075), (1, 0.0)],
)
def test_the_last_bytes_may_come_while_the_first_layers_compute(
    rank: Rank, num_new_tokens: int, hidden: float
) -> None:
    """Fewer tokens take their share."""
    compute_first(rank)
    pending = rank.pend(1, 0.02 + hidden + 1e-4)
    pending.remaining_first = 0.02
    step = StepMetadata([load(1, "r1", num_new_tokens=num_new_tokens)])
    assert rank.step(step) == NOTHING
    pending.remaining -= 2e-4
    announced = {"r1"} if not hidden else set()
    assert rank.worker.poll() == (announced, set())  # the device has not passed the marks
    rank.backend.has_computed.set()
    assert rank.worker.poll() == ({"r1"} - announced, set())


def test_short_loads_come_as_a_whole(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute could begin just before their end."""

    def end(number: int, lag: float, seconds: float) -> None:
        """A load that takes ``seconds``, and whose request is computed ``lag`` after the news."""
        pending = announce(rank, number)
        rank.now += lag
        compute(rank, number=number)
        monkeypatch.setattr(pending, "measure", lambda: Measurement(seconds, {}), raising=False)
        pending.ended.set()
        rank.step()

    end(0, lag=0.010, seconds=0.016)  # the mean of 0 and 10 ms: 5
    end(1, lag=0.005, seconds=0.014)
    announce(rank, 2)
    assert rank.backend.divided == [0, 1]


def test_the_first_bytes_must_come_in_time(rank: Rank) -> None:
    compute_first(rank)
    rank.backend.has_computed.set()
    pending = rank.pend(1, 0.2)
    pending.remaining_first = 0.021
    assert rank.step(StepMetadata([load(1, "r1", num_new_tokens=400)])) == NOTHING
    pending.remaining_first = 0.019
    assert rank.worker.poll() == ({"r1"}, set())
