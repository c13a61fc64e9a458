"""Models that are served with this connector, as vLLM plans their KV caches."""

from dataclasses import replace

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from simple_offload.vllm_compat import vllm_version
from tests.conftest import daily
from tests.simulation.device import layer_spec
from tests.simulation.mutations.situations import TOKENS_ALONE
from tests.simulation.real_models import REAL_MODELS, describe, plan_groups
from tests.simulation.real_shape import RealShape, draw, has_intervals, real_config, shrunk_groups
from tests.simulation.runner import Violation
from tests.simulation.script import Faults, Play

_WINDOWS_OF_DEEPSEEK = "(SlidingWindowMLA, window 128) in blocks of 64"
_LATENTS_OF_DEEPSEEK = "(MLAAttention, tokens a state"
_WINDOWS_OF_GEMMA = "1 (SlidingWindow, window 1024) in blocks of 64"
_WINDOWS_OF_STEP = "(SlidingWindow, window 512, retained 2) in blocks of 64"
_KIMI = [*["3 (Mamba) in blocks of 1024"] * 2, "3 (MLAAttention) in blocks of 1024"]

GROUPS = {
    "DeepSeek-V4": [
        f"3 {_WINDOWS_OF_DEEPSEEK}",
        f"3 {_WINDOWS_OF_DEEPSEEK}",
        f"2 {_WINDOWS_OF_DEEPSEEK}",
        f"6 {_LATENTS_OF_DEEPSEEK} 4) + 2 {_LATENTS_OF_DEEPSEEK} 128) in blocks of 256",
        "6 (SlidingWindowMLA, window 8) in blocks of 4",
        "2 (SlidingWindowMLA, window 128) in blocks of 8",
    ],
    "Kimi-K3, MTP": _KIMI,
    "Kimi-K3, DSpark": _KIMI,
    "MiniMax-M3": ["7 (FullAttention) + 4 (MLAAttention) in blocks of 128"],
    "GLM-5.3, MTP": [
        "5 (MLAAttention) + 5 (MLAAttention, tokens a state 4) in blocks of 64",
        "5 (CircularBuffer) in blocks of 8",
    ],
    "gpt-oss, EAGLE3": [
        "3 (SlidingWindow, window 128) in blocks of 16",
        "4 (FullAttention) in blocks of 16",
    ],
    "Gemma 3, EAGLE3": [*[_WINDOWS_OF_GEMMA] * 5, "2 (FullAttention) in blocks of 64"],
    "Gemma 3, EAGLE3, layers outermost": [
        *[_WINDOWS_OF_GEMMA] * 5,
        "1 (FullAttention) in blocks of 64",
        "1 (FullAttention) in blocks of 128",
    ],
    "Step-3.5, chained MTP": [
        "2 (FullAttention) in blocks of 64",
        *[f"2 {_WINDOWS_OF_STEP}"] * 4,
        f"1 {_WINDOWS_OF_STEP}",
    ],
    "Llama 4": [
        *["2 (ChunkedLocalAttention, chunk 8192) in blocks of 256"] * 3,
        "2 (FullAttention) in blocks of 256",
    ],
    "Llama 4, EAGLE3": ["9 (FullAttention, chunk 8192) in blocks of 256"],
}
"""vLLM's groups of each model. If a new vLLM makes others, examine the consequences."""

DRAFT_GROUPS = {
    "DeepSeek-V4": ([1], [1]),
    "Kimi-K3, MTP": ([2], [2]),
    "Kimi-K3, DSpark": ([2], [2]),
    "Step-3.5, chained MTP": ([4], [2, 3, 4]),
    # vLLM 0.32 marks no group of these drafters, and treats every group as theirs.
    "MiniMax-M3": ([], [0]),
    "GLM-5.3, MTP": ([1], [0, 1]),
    "gpt-oss, EAGLE3": ([], [1]),
    "Gemma 3, EAGLE3": ([], [5]),
    "Gemma 3, EAGLE3, layers outermost": ([], [6]),
    "Llama 4": ([], []),
    "Llama 4, EAGLE3": ([], [0]),
}
"""The groups that vLLM marks as a drafter's: in 0.32, and in 0.33."""


@pytest.mark.parametrize("name", REAL_MODELS)
def test_groups(name: str) -> None:
    model = REAL_MODELS[name]
    groups = plan_groups(model, real_config(model))
    assert [describe(group) for group in groups] == GROUPS[name]
    marked = [index for index, group in enumerate(groups) if group.is_eagle_group]
    assert marked == DRAFT_GROUPS[name][vllm_version() >= (0, 33)]


@pytest.mark.parametrize("name", REAL_MODELS)
def test_the_simulator_plays_these_groups(name: str) -> None:
    model = REAL_MODELS[name]
    pages = {}
    for group, played in zip(
        plan_groups(model, real_config(model)), shrunk_groups(name), strict=True
    ):
        assert played.layer_names == group.layer_names
        assert played.is_eagle_group == group.is_eagle_group
        for layer in group.layer_names:
            spec, small = layer_spec(group, layer), layer_spec(played, layer)
            assert type(small) is type(spec)
            for size in ("block_size", "sliding_window", "attention_chunk_size"):
                assert (getattr(spec, size, 0) or 0) == (
                    getattr(small, size, 0) or 0
                ) * model.shrink
            for same in ("extra_retained_tokens", "num_speculative_blocks"):
                assert getattr(spec, same, 0) == getattr(small, same, 0)
            if spec.tokens_per_state not in (1, -1):
                assert spec.tokens_per_state == small.tokens_per_state * model.shrink
            pages[spec.page_size_bytes] = small.page_size_bytes
    # The order of the page sizes is unchanged.
    assert sorted(pages.values()) == [pages[size] for size in sorted(pages)]
    assert len(set(pages.values())) == len(pages)


_HITS = [
    (name, retention, asynchronous)
    for number, name in enumerate(REAL_MODELS)
    for retention in ((0, None, 2) if has_intervals(name) else (0, None))
    for asynchronous in ((False, True) if number % 2 else (True, False))
]
"""Each retention interval, with and without async scheduling. Half of them a day: each model and
interval, and async scheduling of every other model."""


@pytest.mark.parametrize("hit", daily(_HITS, 2), ids=str)
def test_scripts(hit: tuple[str, int | None, bool]) -> None:
    name, retention, asynchronous = hit
    # Each runner with and without async scheduling, over the intervals.
    v2_runner = asynchronous == (retention == 0)
    script = draw(0, name, retention=retention, async_scheduling=asynchronous, v2_runner=v2_runner)
    outcome = Play(script.without_faults()).run()
    assert outcome.num_finished == outcome.num_requests
    assert outcome.num_blocks_loaded > 0


@pytest.mark.parametrize("name", REAL_MODELS)
def test_scripts_with_faults(name: str) -> None:
    script = replace(draw(1, name), faults=Faults(load_error=0.3, store_error=0.3))
    outcome = Play(script).run()
    assert outcome.num_faults > 0
    assert outcome.num_finished == outcome.num_requests


@pytest.mark.parametrize(("name", "seed"), [("DeepSeek-V4", 5), ("Kimi-K3, MTP", 5)])
def test_earlier_boundaries_are_released_beside_a_drafter(name: str, seed: int) -> None:
    """A hit reads one block more of the drafter's window, and no other state."""
    play = Play(draw(seed, name, retention=0).without_faults().varied(**TOKENS_ALONE))
    play.run()
    assert play.world.releases.num_superseded > 0


def test_the_state_inside_a_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM relies on Kimi's kernels to write the state at the last block end of a prompt, where no
    step ends."""
    monkeypatch.setattr(RealShape, "checkpoint", lambda self, group, start, end: None)
    play = Play(draw(0, "Kimi-K3, MTP", retention=0).without_faults())
    with pytest.raises(Violation, match="reads a wrong page"):
        play.run()


@pytest.mark.parametrize("name", REAL_MODELS)
def test_vllm_has_the_architecture(name: str) -> None:
    model = REAL_MODELS[name]
    names = {model.architecture, *([model.drafter.architecture] if model.drafter else [])}
    assert names <= ModelRegistry.get_supported_archs()
