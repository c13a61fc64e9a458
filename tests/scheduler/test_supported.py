"""Unsupported models and settings are refused, with the reason and the allowed values."""

from dataclasses import replace
from typing import Any

import pytest

from simple_offload.config import ConfigError
from tests.scheduler.test_manager import MAMBA, make_config, make_scheduler

ONE_STATE = {"kv_cache_spec": MAMBA}
STATES = {"kv_cache_spec": replace(MAMBA, mamba_cache_mode="align")}


@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
@pytest.mark.parametrize(
    ("last_group", "extra_config", "complaint"),
    [
        (ONE_STATE, {}, r"mamba_cache_mode='none': .*; allowed: 'align'"),
        ({"host_resident": True}, {}, "in host memory already"),
        (STATES, {"cpu_block_size": 8}, r"cpu_block_size=8: .* state .*; allowed: 4, or no"),
    ],
    ids=["one state", "host memory", "sub-blocks of states"],
)
def test_unsupported_models_and_settings_are_refused(
    windows: tuple[int, ...],
    last_group: dict[str, Any],
    extra_config: dict[str, Any],
    complaint: str,
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_scheduler(make_config(windows, **last_group), **extra_config)


def test_models_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache group that prefix caching covers"):
        make_scheduler(make_config(enable_kv_transfer=False))


def test_states_at_block_boundaries_are_supported() -> None:
    make_scheduler(make_config((0, 8), **STATES), cpu_block_size=4)
