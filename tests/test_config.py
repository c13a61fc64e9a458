"""OffloadConfig: accepted values, and messages about refused ones."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simple_offload.config import GIB, ConfigError, OffloadConfig, parse_size

pytestmark = pytest.mark.usefixtures("machine")

FACTORS = {
    "": 1,
    "B": 1,
    **{unit: 1024**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)},
}


def refusal(extra_config: Mapping[str, Any], num_ranks: int = 1) -> str:
    """The message with which ``parse`` refuses ``extra_config``."""
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.parse(extra_config, num_ranks)
    return str(caught.value)


# Accepted values


def parsed(**extra_config: Any) -> OffloadConfig:
    return OffloadConfig.parse(json.loads(json.dumps(extra_config)), num_ranks=1)


def test_defaults_are_those_of_the_builtin_connector() -> None:
    config = parsed()
    assert config.cpu_bytes_to_use == 8 * GIB
    assert config.cpu_bytes_to_use_per_rank is None
    assert config.num_cpu_blocks is None
    assert config.lazy_offload is False
    assert (config.cpu_block_size, config.store_threshold) == (None, 1)
    assert (config.backend, config.copy_path, config.kv_layout) == ("auto", "auto", "auto")
    assert config.sync_load_ms == 20.0


@pytest.mark.parametrize(
    ("key", "value", "meaning"),
    [
        ("num_cpu_blocks", 64, 64),
        ("kv_offload_backend", "cpu", "cpu"),
        ("store_threshold", 3, 3),
        ("copy_path", "kernel", "kernel"),
        ("kv_layout", "keep", "keep"),
        ("sync_load_ms", 0, 0.0),
        ("sync_load_ms", 8, 8.0),
        ("sync_load_ms", 0.25, 0.25),
        *(("lazy_offload", flag, True) for flag in (True, 1, "True", "1")),
        *(("lazy_offload", flag, False) for flag in (False, 0, "false")),
    ],
)
def test_accepted_values(key: str, value: object, meaning: object) -> None:
    found = getattr(parsed(**{key: value}), key)
    assert (found, type(found)) == (meaning, type(meaning))


@pytest.mark.parametrize(
    ("given_size", "num_bytes"),
    [
        (1, 1),
        (6.4e9, 6_400_000_000),
        ("12345", 12345),
        ("64GiB", 64 * GIB),
        ("64Gi", 64 * GIB),
        ("64G", 64 * GIB),
        ("64gib", 64 * GIB),
        ("64 GiB", 64 * GIB),
        (" 64GiB ", 64 * GIB),
        ("64GB", 64 * 10**9),
        ("512MiB", 512 * 1024**2),
        ("1.5KiB", 1536),
        ("0.05TiB", 54975581388),
        ("7B", 7),
    ],
)
@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
def test_sizes_in_every_form(key: str, given_size: object, num_bytes: int) -> None:
    assert getattr(parsed(**{key: given_size}), key) == num_bytes


@given(number=st.integers(0, 2**64), unit=st.sampled_from(sorted(FACTORS)), data=st.data())
def test_size_round_trip(number: int, unit: str, data: st.DataObject) -> None:
    spelled = data.draw(st.sampled_from([unit, unit.lower(), unit.upper()]))
    space = data.draw(st.sampled_from(["", " ", "\t"]))
    assert parse_size(f"{number}{space}{spelled}") == number * FACTORS[unit]
    assert parse_size(number) == number


@given(thousandths=st.integers(0, 10**9), unit=st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_decimal_fractions_are_exact(thousandths: int, unit: str) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{unit}"
    assert parse_size(text) == thousandths * FACTORS[unit] // 1000


@given(st.floats(min_value=1, max_value=2.0**50))
def test_fractions_of_a_byte_are_dropped(number: float) -> None:
    """vLLM makes floats of --kv-offloading-size: 0.3 GiB are 322122547.2 bytes."""
    assert parse_size(number) == math.floor(number)


# Refused values: the message has the key, the value and the allowed values


@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        "yes",
        "",
        "GiB",
        "64 GiB of memory",
        "64XiB",
        "5i",
        "5iB",
        "5GIIB",
        "-64GiB",
        "1e9",
        "0x10",
        "1,5GiB",
        0.5,
        float("inf"),
        float("nan"),
        [64],
        {"GiB": 64},
    ],
)
def test_not_a_size(key: str, value: object) -> None:
    message = refusal({key: value})
    assert f"{key}={value!r}" in message
    assert "number of bytes" in message
    assert "64GiB" in message


@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
@pytest.mark.parametrize("value", [0, -1, -64 * GIB, "0", "0.4"])
def test_a_size_must_be_positive(key: str, value: object) -> None:
    message = refusal({key: value})
    assert f"{key}=" in message
    assert "greater than 0" in message


@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
@pytest.mark.parametrize(
    "value", [10**400, 2.0**1000, "9" * 400 + "GiB"], ids=["int", "float", "string"]
)
def test_a_size_beyond_any_number_format(key: str, value: object) -> None:
    assert f"{key}=" in refusal({key: value})


@pytest.mark.parametrize(
    ("key", "values", "allowed"),
    [
        ("num_cpu_blocks", (1, 0, -5), "greater than or equal to 2"),
        ("num_cpu_blocks", (True, 4.0, "10", [10], "all"), "integer"),
        ("store_threshold", (0, -1), "greater than or equal to 1"),
        ("store_threshold", (True, 1.5, "2", None), "integer"),
        ("cpu_block_size", (0, -16), "greater than 0"),
        ("cpu_block_size", ("32", 16.5, True), "integer"),
        ("lazy_offload", (2, -1, "yes", "", "tru", 1.0, None, []), "must be true or false"),
        ("sync_load_ms", (-1, -0.001), "greater than or equal to 0"),
        ("sync_load_ms", (math.inf, math.nan), "finite number"),
        ("sync_load_ms", ("soon", "8", True, None, [8]), "valid number"),
        ("copy_path", ("kernal", "DMA", 1, True, None), "'auto', 'dma', 'kernel'"),
        ("kv_layout", ("keeps", "BLHNC", ["auto"], None), "'auto' or 'keep'"),
        ("backend", ("CUDA", "cudo", 1, True, ["cuda"], None), "'auto', 'cuda', 'npu' or 'host'"),
        ("kv_offload_backend", ("disk", None), "must be 'cpu', since there is no disk tier"),
        ("cpu_bytes_to_use", (None,), "number of bytes"),
    ],
)
def test_refused_values(key: str, values: tuple[object, ...], allowed: str) -> None:
    for value in values:
        message = refusal({key: value})
        assert f"{key}={value!r}: " in message
        assert allowed in message


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("copy_path", "kernal", "kernel"),
        ("copy_path", "DMA", None),
        ("kv_layout", "keeps", "keep"),
        ("kv_layout", "BLHNC", None),
        ("backend", "cudo", "cuda"),
        ("backend", "hots", "host"),
        ("backend", "auto ", "auto"),
        ("backend", "tpu", "npu"),
        ("backend", "CUDA", None),
    ],
)
def test_a_wrong_choice_is_named_with_its_nearest(
    key: str, value: str, nearest: str | None
) -> None:
    message = refusal({key: value})
    assert message.partition("did you mean ")[2] == (f"{nearest!r}?" if nearest else "")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("cpu_byte_to_use", "cpu_bytes_to_use"),
        ("cpu_bytes_per_rank", "cpu_bytes_to_use_per_rank"),
        ("num_cpu_block", "num_cpu_blocks"),
        ("lazy", "lazy_offload"),
        ("backen", "backend"),
        ("copy_paths", "copy_path"),
        ("sync_load", "sync_load_ms"),
        ("layout", "kv_layout"),
    ],
)
def test_an_unknown_key_is_named_with_its_nearest(key: str, nearest: str) -> None:
    message = refusal({key: "7"})
    assert f"{key}='7'" in message
    assert f"did you mean {nearest!r}" in message


def test_an_unknown_key_similar_to_none_lists_all_keys() -> None:
    message = refusal({"zzz": 1})
    assert "zzz=1" in message
    assert "did you mean" not in message
    for key in OffloadConfig.model_fields:
        assert key in message


def test_every_wrong_key_is_named_at_once() -> None:
    message = refusal({"lazy_offload": "yes", "num_cpu_blocks": -1, "backned": "cuda"})
    for text in ("lazy_offload='yes'", "num_cpu_blocks=-1", "backned='cuda'", "'backend'"):
        assert text in message


def test_a_configuration_is_not_changed_afterwards() -> None:
    config = OffloadConfig.parse({}, num_ranks=1)
    with pytest.raises(ValidationError, match="frozen"):
        config.cpu_bytes_to_use = 1  # type: ignore[misc]


# Host blocks of several device blocks


def test_sub_blocks_of_a_host_block() -> None:
    assert OffloadConfig.parse({}, num_ranks=1).num_sub_blocks(16) == 1
    for size, num_sub_blocks in [(16, 1), (32, 2), (128, 8)]:
        assert (
            OffloadConfig.parse({"cpu_block_size": size}, num_ranks=1).num_sub_blocks(16)
            == num_sub_blocks
        )
    for size, nearest in [(1, 16), (8, 16), (24, 16), (25, 32), (40, 32), (120, 112)]:
        config = OffloadConfig.parse({"cpu_block_size": size}, num_ranks=1)
        with pytest.raises(ConfigError) as caught:
            config.num_sub_blocks(16)
        message = f"cpu_block_size={size}: must be a multiple of the 16 tokens of a device block"
        assert str(caught.value) == f"{message}; the nearest is {nearest}"
