"""OffloadConfig: accepted values, and messages about refused ones."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from simple_offload.config import (
    GIB,
    ConfigError,
    OffloadConfig,
    SecondTierConfig,
    ignored_keys,
    parse_size,
)
from simple_offload.ranks import Ranks

pytestmark = pytest.mark.usefixtures("machine")

NO_SIZES: tuple[object, ...] = (
    *(True, False, "yes", "", "GiB", "64 GiB of memory", "64XiB", "5i", "5iB", "5GIIB", "-64GiB"),
    *("1e9", "0x10", "1,5GiB", 0.5, math.inf, math.nan, [64], {"GiB": 64}),
)
A_SIZE = 'a number of bytes or a size such as "64GiB"'
A_SHARE = 'or a share of memory such as "80%"'
REFUSED: list[tuple[str, tuple[object, ...], str]] = [
    ("cpu_bytes_to_use", (*NO_SIZES, None), A_SIZE),
    ("cpu_bytes_to_use", (0, -1, -64 * GIB, "0", "0.4"), "greater than 0"),
    ("cpu_bytes_to_use", (*NO_SIZES, 0, 0.8, "%", "-80%", "80%%", "8e1%", "80 percent"), A_SHARE),
    ("cpu_bytes_to_use", ("0%", "0.0 %", "100.1%", "120%"), "more than 0% and at most 100%"),
    ("cpu_bytes_to_use_per_rank", NO_SIZES, A_SIZE),
    ("cpu_bytes_to_use_per_rank", (0, -1), "greater than 0"),
    ("cpu_bytes_to_use_per_rank", (*NO_SIZES, 0), A_SHARE),
    ("cpu_bytes_to_use_per_rank", ("0%", "120%"), "more than 0% and at most 100%"),
    ("num_cpu_blocks", (1, 0, -5), "greater than or equal to 2"),
    ("num_cpu_blocks", (True, 4.0, "4.0", "1e3", [10], "all"), "must be a whole number"),
    ("store_threshold", (0, -1), "greater than or equal to 1"),
    ("store_threshold", (True, 1.5, "1.5", None), "must be a whole number"),
    ("cpu_block_size", (0, -16), "greater than 0"),
    ("cpu_block_size", ("", "true", 16.5, True), "must be a whole number"),
    ("lazy_offload", (2, -1, "yes", "", "tru", 1.0, []), "must be true or false"),
    ("overlap_loads", (2, "no", None), "must be true or false"),
    ("sync_load_ms", (-1, -0.001, "-1"), "greater than or equal to 0"),
    ("sync_load_ms", (math.inf, math.nan), "finite number"),
    ("sync_load_ms", ("soon", "nan", "2,5", True, None, [8]), "must be a number"),
    ("copy_path", ("kernal", "DMA", 1, True, None), "'auto', 'dma', 'kernel'"),
    ("kv_layout", ("keeps", "BLHNC", ["auto"], None), "'auto' or 'keep'"),
    ("backend", ("CUDA", "cudo", 1, True, ["cuda"], None), "'auto', 'cuda', 'npu' or 'host'"),
    ("kv_offload_backend", ("disk", None), "must be 'cpu': remove the key"),
    ("kv_offload_backend", ("disk",), "second_tier for files"),
    ("second_tier", ("fs", True, ["fs"]), "valid dictionary"),
    ("second_tier.type", (None, 5, ["fs"]), "valid string"),
    ("second_tier.type", ("",), "at least 1 character"),
    ("second_tier.bytes", ("2 TB of disk", True, 0.5, 0, "80%"), A_SIZE),
    ("second_tier.cache_namespace", (5,), "valid string"),
    ("second_tier.cache_namespace", ("",), "at least 1 character"),
    ("second_tier.module_path", (5,), "valid string"),
    ("second_tier.fetch", (None,), "'auto' or 'always'"),
    ("second_tier.fetch", ("allways",), "'auto' or 'always'; did you mean 'always'?"),
]
"""Key, values, and what the message says is allowed."""


def refusal(extra_config: Mapping[str, Any], num_ranks: int = 1) -> str:
    """The message with which ``parse`` refuses ``extra_config``."""
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.parse(extra_config, Ranks(num_ranks, num_ranks))
    return str(caught.value)


def parsed(**extra_config: Any) -> OffloadConfig:
    return OffloadConfig.parse(json.loads(json.dumps(extra_config)), Ranks(1, 1))


# Accepted values


@pytest.mark.parametrize(
    ("key", "value", "meaning"),
    [
        ("num_cpu_blocks", 64, 64),
        ("kv_offload_backend", "cpu", "cpu"),
        ("store_threshold", 3, 3),
        ("copy_path", "kernel", "kernel"),
        ("kv_layout", "keep", "keep"),
        ("sync_load_ms", 0, 0.0),
        ("sync_load_ms", 0.25, 0.25),
        ("num_cpu_blocks", "64", 64),
        ("cpu_block_size", " 128 ", 128),
        ("store_threshold", "3", 3),
        ("sync_load_ms", "2.5", 2.5),
        ("sync_load_ms", "8", 8.0),
        *(("lazy_offload", flag, True) for flag in (True, 1, "True", "1", "true\n")),
        *(("lazy_offload", flag, False) for flag in (False, 0, "false")),
        ("overlap_loads", "False", False),
        ("overlap_loads", 1, True),
        ("lazy_offload", None, None),
        ("cpu_bytes_to_use", 1, 1),
        ("cpu_bytes_to_use", 6.4e9, 6_400_000_000),
        # vLLM makes floats of --kv-offloading-size: 0.3 GiB.
        ("cpu_bytes_to_use", 322122547.2, 322122547),
        ("cpu_bytes_to_use", " 64GiB ", 64 * GIB),
        ("cpu_bytes_to_use", "0.05TiB", 54975581388),
        ("cpu_bytes_to_use_per_rank", "1.5KiB", 1536),
    ],
)
def test_accepted_values(key: str, value: object, meaning: object) -> None:
    found = getattr(parsed(**{key: value}), key)
    assert (found, type(found)) == (meaning, type(meaning))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993b", 2**53 + 1),
        *((f"5{unit}", 5 << 10) for unit in ("K", "k", "Ki", "KiB", "kib", " KIB")),
        *(("7m", 7 << 20), ("7\tGi", 7 << 30), ("7T", 7 << 40)),
        *(("1.001KB", 1001), ("4.035mb", 4_035_000), ("2.3GB", 2_300_000_000)),
        ("9.007199254743TB", 9_007_199_254_743),
    ],
)
def test_sizes_are_exact(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


# Refused values


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [(key, value, allowed) for key, values, allowed in REFUSED for value in values],
)
def test_a_message_has_the_key_the_value_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    outer, _, inner = key.partition(".")
    message = refusal({outer: {"type": "fs"} | {inner: value} if inner else value})
    assert message.startswith(f"kv_connector_extra_config: {key}={value!r}: ")
    assert allowed in message


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("copy_path", "kernal", "kernel"),
        ("backend", "auto ", "auto"),
        ("backend", "CUDA", "cuda"),
        ("backend", "tpu-v5", None),
        ("cpu_byte_to_use", "7", "cpu_bytes_to_use"),
        ("cpu_bytes_per_rank", "7", "cpu_bytes_to_use_per_rank"),
        ("num_cpu_block", "7", "num_cpu_blocks"),
        ("sync_load", "7", "sync_load_ms"),
        ("layout", "7", "kv_layout"),
        ("block_size", "7", "cpu_block_size"),
        ("CPU_BYTES_TO_USE", "7", "cpu_bytes_to_use"),
        ("cpuBytesToUse", "7", "cpu_bytes_to_use"),
        ("secondary_tiers", "7", "second_tier"),
    ],
)
def test_a_wrong_name_is_followed_by_the_nearest(key: str, value: str, nearest: str | None) -> None:
    message = refusal({key: value})
    assert f"{key}={value!r}" in message
    hint = message.partition("did you mean ")[2].partition("?")[0].partition(" (")[0]
    assert hint == (repr(nearest) if nearest else "")


def test_unknown_keys_that_resemble_none_are_ignored() -> None:
    keys = ("eviction_policy", "lmcache.chunk_size", "enable_cross_layers_blocks")
    config = parsed(num_cpu_blocks=8, **dict.fromkeys(keys, "7"))
    assert config == parsed(num_cpu_blocks=8)
    assert ignored_keys([*keys, "num_cpu_blocks", "num_cpu_block"]) == [*keys]


def test_every_wrong_key_is_named_at_once_and_every_known_one_is_listed() -> None:
    message = refusal({"lazy_offload": "yes", "num_cpu_blocks": -1, "backned": "cuda"})
    for text in ("lazy_offload='yes'", "num_cpu_blocks=-1", "backned='cuda'", "'backend'"):
        assert text in message
    assert all(key in message for key in OffloadConfig.model_fields)


# The second tier


def test_a_second_tier_has_keys_of_its_own_and_options_of_vllm_s() -> None:
    config = parsed(second_tier={"type": "fs", "root_dir": "/kv", "bytes": "2TiB", "n_threads": 4})
    assert config.second_tier == SecondTierConfig.model_validate(
        {"type": "fs", "bytes": 2 << 40, "root_dir": "/kv", "n_threads": 4}
    )
    assert config.second_tier.options == {"root_dir": "/kv", "n_threads": 4}
    assert (config.second_tier.fetch, config.second_tier.cache_namespace) == ("auto", None)
    with pytest.raises(ValidationError, match="frozen"):
        config.second_tier.fetch = "always"  # type: ignore[misc]
    own = {"cache_namespace": "v1", "fetch": "always", "module_path": "mine"}
    config = parsed(second_tier={"type": "Mine"} | own)
    assert config.second_tier is not None
    assert config.second_tier.model_dump(include={*own}) == own
    assert (config.second_tier.bytes, config.second_tier.options) == (None, {})


def test_a_second_tier_needs_a_type() -> None:
    message = refusal({"second_tier": {"root_dir": "/kv"}, "second_teir": {}})
    assert "second_tier.type is missing; second_teir={}: unknown key" in message
    assert "did you mean 'second_tier'?" in message


# Host blocks of several device blocks


@pytest.mark.parametrize(
    ("size", "nearest"), [(1, 16), (8, 16), (24, 16), (25, 32), (40, 32), (120, 112)]
)
def test_a_host_block_is_a_multiple_of_a_device_block(size: int, nearest: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(cpu_block_size=size).num_sub_blocks(16)
    message = f"cpu_block_size={size}: must be a multiple of the 16 tokens of a device block"
    assert str(caught.value) == f"{message}; the nearest is {nearest}"
