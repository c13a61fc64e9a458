"""The scheduler side over vllm-ascend's coordinator, block pool, managers and scheduler patches."""

from collections import Counter
from types import SimpleNamespace

import pytest
from vllm_ascend.patch.platform.patch_kv_cache_coordinator import AscendHybridKVCacheCoordinator

from simple_offload.config import ConfigError
from simple_offload.scheduler import supported
from tests.simulation.runner import Violation
from tests.simulation.script import Play, Script
from tests.simulation.shape import Shape


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused on an NPU is refused. Hashes are those of vllm-ascend's engine core: where
    ranks share the tokens of blocks of several groups, of the tokens that one rank has
    (patch_kv_cache_utils.py)."""
    monkeypatch.setattr(supported, "current_platform", SimpleNamespace(device_type="npu"))
    hash_size = vars(Shape)["hash_size"].fget

    def ascend_hash_size(shape: Shape) -> int:
        return int(hash_size(shape)) // (shape.num_shards if len(shape.groups) > 1 else 1)

    monkeypatch.setattr(Shape, "hash_size", property(ascend_hash_size))


def play(seeds: range) -> Counter[str]:
    """Play the scripts of these seeds, and count what was there."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        script = Script.draw(seed)
        if script.shape.num_states:
            with pytest.raises(ConfigError, match=r"state \(Mamba\) layers"):
                Play(script)
            seen["refused"] += 1
            continue
        played = Play(script)
        coordinator = played.world.scheduler.kv_cache_manager.coordinator
        seen["hybrid"] += isinstance(coordinator, AscendHybridKVCacheCoordinator)
        outcome = played.run()
        seen["played"] += 1
        seen["loaded"] += outcome.num_blocks_loaded
    return seen


def test_scripts() -> None:
    seen = play(range(17))
    assert seen["refused"] > 0
    assert seen["hybrid"] >= 5
    assert seen["loaded"] > 50


def test_states_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why they are refused. 9 of the 32 scripts with states among seeds 0 to 159 read a wrong one,
    none without vllm-ascend's patches."""
    monkeypatch.setattr(supported, "current_platform", SimpleNamespace(device_type="cpu"))
    with pytest.raises(Violation, match="r25 reads a wrong page"):
        Play(Script.draw(109)).run()


@pytest.mark.slow
def test_many_scripts() -> None:
    """Some distribute the tokens of blocks of two sizes over two ranks (seeds 33 and 86)."""
    seen = play(range(8, 108))
    assert seen["hybrid"] > 40
    assert seen["loaded"] > 1000
