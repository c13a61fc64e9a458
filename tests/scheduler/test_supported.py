"""Unsupported models and settings are refused, with the reason and the allowed values."""

from dataclasses import replace

import pytest

from simple_offload.config import ConfigError
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.test_manager import MAMBA, make_config, make_scheduler


def test_state_layers_that_keep_one_state_are_refused() -> None:
    for windows in ((0,), (0, 8)):
        config = make_config(windows, kv_cache_spec=MAMBA)
        with pytest.raises(ConfigError, match=r"mamba_cache_mode='none': .*; allowed: 'align'"):
            make_scheduler(config, num_cpu_blocks=8)
        config = make_config(windows, kv_cache_spec=replace(MAMBA, mamba_cache_mode="align"))
        make_scheduler(config, num_cpu_blocks=8)


def test_models_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache group that prefix caching covers"):
        make_scheduler(make_config(enable_kv_transfer=False), num_cpu_blocks=8)


def test_groups_in_host_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="in host memory already"):
        make_scheduler(make_config((0, 8), host_resident=True), num_cpu_blocks=8)


def test_states_have_no_sub_blocks(drive: MakeDriver) -> None:
    states = drive(num_states=1).world.kv_cache_configs[0]
    with pytest.raises(ConfigError, match=r"cpu_block_size=8: .* state .*; allowed: 4, or no"):
        make_scheduler(states, num_cpu_blocks=8, cpu_block_size=8)
    make_scheduler(states, num_cpu_blocks=8, cpu_block_size=4)


def test_lazy_stores_have_no_sub_blocks() -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=r"cpu_block_size=8: lazy_offload .* allowed: 4, .*false"):
        make_scheduler(config, num_cpu_blocks=8, cpu_block_size=8, lazy_offload=True)
