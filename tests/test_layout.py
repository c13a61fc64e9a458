"""wanted_layout: the connector requests contiguous blocks where vLLM can provide them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backend import MultipleOf

from simple_offload import layout
from simple_offload.config import ConfigError, OffloadConfig
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.layout import wanted_layout
from tests.conftest import MakeVllmConfig

pytestmark = pytest.mark.usefixtures("machine")


class Platform:
    """On CUDA, with an attention backend whose kernels take blocks of ``sizes`` tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = True
        self.sizes: list[int | MultipleOf] = [MultipleOf(16)]
        self.error: Exception | None = None
        platform = SimpleNamespace(is_cuda=lambda: self.cuda)
        monkeypatch.setattr(layout, "current_platform", platform)
        monkeypatch.setattr(layout, "get_attn_backend", self.get_attn_backend)

    def get_attn_backend(self, head_size: int, *_: object, **__: object) -> Any:
        assert head_size > 0
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            get_supported_kernel_block_sizes=lambda: self.sizes, get_name=lambda: "SOME_ATTN"
        )


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    return Platform(monkeypatch)


def wish(make_vllm_config: MakeVllmConfig, block_size: int = 16, **extra: object) -> str | None:
    config = make_vllm_config({"num_cpu_blocks": 8})
    config.cache_config.block_size = block_size
    return wanted_layout(config, OffloadConfig.parse({"num_cpu_blocks": 8, **extra}, 1))


def test_blocks_of_all_layers_together_where_possible(
    platform: Platform, make_vllm_config: MakeVllmConfig
) -> None:
    assert wish(make_vllm_config) == "BLHNC"
    assert wish(make_vllm_config, kv_layout="keep") is None
    platform.error = ValueError("no valid attention backend")  # does not stop the start
    assert wish(make_vllm_config) is None
    platform.error, platform.cuda = None, False
    assert wish(make_vllm_config) is None


def test_nothing_is_asked_for_without_prefix_caching(
    platform: Platform, make_vllm_config: MakeVllmConfig
) -> None:
    config = make_vllm_config({})
    config.cache_config.enable_prefix_caching = False
    assert wanted_layout(config, OffloadConfig()) is None


@pytest.mark.parametrize(
    ("sizes", "block_size", "whole"),
    [
        ([16, 32, 64], 64, True),
        ([16, 32, 64], 128, False),
        ([MultipleOf(16)], 544, True),
        ([MultipleOf(32)], 48, False),
        ([64], 16, False),
    ],
)
def test_blocks_that_kernels_split_stay_as_they_are(
    platform: Platform,
    make_vllm_config: MakeVllmConfig,
    sizes: list[int | MultipleOf],
    block_size: int,
    whole: bool,
) -> None:
    platform.sizes = sizes
    assert wish(make_vllm_config, block_size) == ("BLHNC" if whole else None)


@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        ("MiniMaxM3SparseForCausalLM", True),
        ("DeepseekV4ForCausalLM", True),
        ("KimiLinearForCausalLM", False),
        ("Step3p5ForCausalLM", False),
        ("NotOfVllmForCausalLM", True),
    ],
)
@pytest.mark.parametrize("drafter", [False, True])
def test_models_with_kernels_of_their_own_keep_vllm_s_layout(
    platform: Platform,
    make_vllm_config: MakeVllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    own: bool,
    drafter: bool,
) -> None:
    """MiniMax-M3's kernels read wrong pages in another layout. The drafter may have such kernels
    too, not only the model."""
    config = make_vllm_config({"num_cpu_blocks": 8})
    model = SimpleNamespace(architecture=architecture)
    if drafter:
        draft = SimpleNamespace(draft_model_config=model)
        monkeypatch.setattr(config, "speculative_config", draft)
    else:
        monkeypatch.setattr(config.model_config, "_architecture", architecture)
    asked = wanted_layout(config, OffloadConfig.parse({"num_cpu_blocks": 8}, 1))
    assert asked == (None if own else "BLHNC")


# The class methods that vLLM calls


def test_the_connector_passes_the_wish_on(
    platform: Platform, make_vllm_config: MakeVllmConfig
) -> None:
    ask = SimpleCPUOffloadConnector.get_required_kvcache_layout
    assert ask(make_vllm_config({"num_cpu_blocks": 8})) == "BLHNC"
    assert ask(make_vllm_config({"num_cpu_blocks": 8, "kv_layout": "keep"})) is None


def test_graphs_need_not_be_piecewise() -> None:
    assert not SimpleCPUOffloadConnector.requires_piecewise_for_cudagraph({"num_cpu_blocks": 8})


def test_a_wrong_configuration_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"kv_layout='keeep'.*did you mean 'keep'"):
        SimpleCPUOffloadConnector.requires_piecewise_for_cudagraph({"kv_layout": "keeep"})
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=.*must be"):
        SimpleCPUOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": "lots"})
