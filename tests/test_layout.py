"""The connector asks for contiguous blocks where possible, and tells how pages are laid out."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import MultipleOf

from simple_offload import layout
from simple_offload.config import ConfigError
from simple_offload.connector import SimpleCPUOffloadConnector
from tests.conftest import MakeVllmConfig

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA (``cuda``), with an attention backend whose kernels take blocks of ``sizes`` tokens."""
    platform = SimpleNamespace(cuda=True, sizes=[MultipleOf(16)], error=None)

    def get_attn_backend(head_size: int, *_: object, **__: object) -> Any:
        assert head_size > 0
        if platform.error is not None:
            raise platform.error
        return SimpleNamespace(
            get_supported_kernel_block_sizes=lambda: platform.sizes, get_name=lambda: "SOME_ATTN"
        )

    current = SimpleNamespace(is_cuda=lambda: platform.cuda)
    monkeypatch.setattr(layout, "current_platform", current)
    monkeypatch.setattr(layout, "get_attn_backend", get_attn_backend)
    return platform


def asked(make_vllm_config: MakeVllmConfig, block_size: int = 16, **extra: object) -> str | None:
    """The answer to vLLM's question."""
    config = make_vllm_config({"num_cpu_blocks": 8, **extra})
    config.cache_config.block_size = block_size
    return SimpleCPUOffloadConnector.get_required_kvcache_layout(config)


def test_blocks_of_all_layers_together_where_possible(
    platform: SimpleNamespace, make_vllm_config: MakeVllmConfig
) -> None:
    assert asked(make_vllm_config) == "BLHNC"
    assert asked(make_vllm_config, kv_layout="keep") is None
    without_prefix_caching = make_vllm_config(prefix_caching=False)
    assert SimpleCPUOffloadConnector.get_required_kvcache_layout(without_prefix_caching) is None
    platform.error = ValueError("no valid attention backend")  # does not stop the start
    assert asked(make_vllm_config) is None
    platform.error, platform.cuda = None, False
    assert asked(make_vllm_config) is None


@pytest.mark.parametrize(
    ("sizes", "block_size", "whole"),
    [
        ([16, 32, 64], 64, True),
        ([16, 32, 64], 128, False),
        ([MultipleOf(16)], 544, True),
        ([MultipleOf(32)], 48, False),
    ],
)
def test_blocks_that_kernels_split_stay_as_they_are(
    platform: SimpleNamespace,
    make_vllm_config: MakeVllmConfig,
    sizes: list[int | MultipleOf],
    block_size: int,
    whole: bool,
) -> None:
    platform.sizes = sizes
    assert asked(make_vllm_config, block_size) == ("BLHNC" if whole else None)


@pytest.mark.usefixtures("platform")
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
    make_vllm_config: MakeVllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    own: bool,
    drafter: bool,
) -> None:
    """MiniMax-M3's kernels read wrong pages in another layout. The drafter may have such kernels
    too, not only the model."""
    config = make_vllm_config({"num_cpu_blocks": 8})
    if drafter:
        draft = SimpleNamespace(draft_model_config=SimpleNamespace(architecture=architecture))
        monkeypatch.setattr(config, "speculative_config", draft)
    else:
        monkeypatch.setattr(config.model_config, "_architecture", architecture)
    wanted = SimpleCPUOffloadConnector.get_required_kvcache_layout(config)
    assert wanted == (None if own else "BLHNC")


class Layer(AttentionLayerBase):
    """A layer with this attention backend."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._name)

    def get_kv_cache_spec(self, vllm_config: object) -> None:
        """It has none."""


def test_what_decides_how_pages_are_laid_out(
    make_vllm_config: MakeVllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can become JSON, and differs with each of its parts."""
    config = make_vllm_config()
    layers = {"a": Layer("FLASH_ATTN"), "b": Layer("MAMBA2_ATTN"), "moe": object()}
    monkeypatch.setattr(config.compilation_config, "static_forward_context", layers)
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", "BLHNC")
    capability = torch.backends.cpu.get_cpu_capability()
    backends = {"a": "FLASH_ATTN", "b": "MAMBA2_ATTN"}
    for on_cpu, instructions in ((True, capability), (False, "device")):
        platform = SimpleNamespace(is_cpu=lambda on_cpu=on_cpu: on_cpu)
        monkeypatch.setattr(layout, "current_platform", platform)
        found = layout.page_layout(config)
        assert found == (backends, "BLHNC", instructions)
        assert json.loads(json.dumps(found)) == list(found)


def test_graphs_need_not_be_piecewise() -> None:
    """vLLM asks before it loads the model; then a wrong configuration is refused."""
    ask = SimpleCPUOffloadConnector.requires_piecewise_for_cudagraph
    assert not ask({"num_cpu_blocks": 8})
    with pytest.raises(ConfigError, match=r"kv_layout='keeep'.*did you mean 'keep'"):
        ask({"kv_layout": "keeep"})
    with pytest.raises(ConfigError, match=r"second_tier\.byte='1TiB'.*did you mean 'bytes'"):
        ask({"second_tier": {"type": "fs", "root_dir": "/kv", "byte": "1TiB"}})
