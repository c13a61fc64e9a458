"""OffloadConfig: what it takes, and what it says about what it does not take."""

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
    """What ``parse`` says when it refuses ``extra_config``."""
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.parse(extra_config, num_ranks)
    return str(caught.value)


# What is taken


def test_defaults_are_those_of_the_builtin_connector() -> None:
    config = OffloadConfig.parse({}, num_ranks=1)
    assert config.cpu_bytes_to_use == 8 * GIB
    assert config.cpu_bytes_to_use_per_rank is None
    assert config.num_cpu_blocks is None
    assert config.lazy_offload is False
    assert config.cpu_block_size is None
    assert config.backend == "auto"
    assert (config.copy_path, config.kv_layout, config.sync_load_ms) == ("auto", "auto", 20.0)


def test_a_configuration_of_the_builtin_connector_is_taken_as_it_is() -> None:
    config = OffloadConfig.parse(
        {
            "cpu_bytes_to_use": 2 * GIB,
            "cpu_bytes_to_use_per_rank": GIB,
            "num_cpu_blocks": 64,
            "lazy_offload": True,
            "kv_offload_backend": "cpu",
        },
        num_ranks=2,
    )
    assert (config.cpu_bytes_to_use, config.cpu_bytes_to_use_per_rank) == (2 * GIB, GIB)
    assert (config.num_cpu_blocks, config.lazy_offload) == (64, True)


def test_store_threshold_counts_requests() -> None:
    assert OffloadConfig.parse({}, num_ranks=1).store_threshold == 1
    assert OffloadConfig.parse({"store_threshold": 3}, num_ranks=1).store_threshold == 3


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None], ids=repr)
def test_store_threshold_is_an_int_of_at_least_one(value: object) -> None:
    message = refusal({"store_threshold": value})
    assert f"store_threshold={value!r}" in message


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
    # As it arrives: through JSON.
    extra_config = json.loads(json.dumps({key: given_size}))
    assert getattr(OffloadConfig.parse(extra_config, num_ranks=1), key) == num_bytes


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


# What is refused: key, value, what is allowed


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


@pytest.mark.parametrize("value", [1, 0, -5, True, 4.0, "10", [10], "all"])
def test_num_cpu_blocks_is_an_int_of_at_least_two(value: object) -> None:
    message = refusal({"num_cpu_blocks": value})
    assert f"num_cpu_blocks={value!r}" in message
    assert "integer" in message or "greater than or equal to 2" in message


@pytest.mark.parametrize("value", [2, -1, "yes", "", "tru", 1.0, None, []])
def test_lazy_offload_is_true_or_false(value: object) -> None:
    message = refusal({"lazy_offload": value})
    assert f"lazy_offload={value!r}: must be true or false" in message


@pytest.mark.parametrize(
    ("value", "meant"),
    [(True, True), (1, True), ("True", True), ("1", True), (0, False), ("false", False)],
)
def test_templates_write_flags_in_many_ways(value: object, meant: bool) -> None:
    assert OffloadConfig.parse({"lazy_offload": value}, num_ranks=1).lazy_offload is meant


@pytest.mark.parametrize("copy_path", ["auto", "dma", "kernel"])
@pytest.mark.parametrize("kv_layout", ["auto", "keep"])
def test_paths_and_layouts(copy_path: str, kv_layout: str) -> None:
    config = OffloadConfig.parse({"copy_path": copy_path, "kv_layout": kv_layout}, num_ranks=1)
    assert (config.copy_path, config.kv_layout) == (copy_path, kv_layout)


@pytest.mark.parametrize(
    ("key", "value", "allowed", "nearest"),
    [
        ("copy_path", "kernal", ("auto", "dma", "kernel"), "kernel"),
        ("copy_path", "DMA", ("auto", "dma", "kernel"), None),
        ("copy_path", 1, ("auto", "dma", "kernel"), None),
        ("copy_path", True, ("auto", "dma", "kernel"), None),
        ("kv_layout", "keeps", ("auto", "keep"), "keep"),
        ("kv_layout", "BLHNC", ("auto", "keep"), None),
        ("kv_layout", ["auto"], ("auto", "keep"), None),
    ],
)
def test_an_unknown_path_or_layout(
    key: str, value: object, allowed: tuple[str, ...], nearest: str | None
) -> None:
    message = refusal({key: value})
    assert f"{key}={value!r}" in message
    for choice in allowed:
        assert f"'{choice}'" in message
    assert ("did you mean" in message) == (nearest is not None)
    if nearest is not None:
        assert f"did you mean {nearest!r}" in message


@pytest.mark.parametrize(("given_time", "milliseconds"), [(0, 0.0), (8, 8.0), (0.25, 0.25)])
def test_milliseconds_of_a_load_that_compute_may_wait_for(
    given_time: float, milliseconds: float
) -> None:
    extra_config = json.loads(json.dumps({"sync_load_ms": given_time}))
    assert OffloadConfig.parse(extra_config, num_ranks=1).sync_load_ms == milliseconds


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (-1, "greater than or equal to 0"),
        (-0.001, "greater than or equal to 0"),
        (float("inf"), "finite number"),
        (float("nan"), "number"),
        ("soon", "valid number"),
        ("8", "valid number"),
        (True, "valid number"),
        (None, "valid number"),
        ([8], "valid number"),
    ],
)
def test_sync_load_ms_is_a_time(value: object, allowed: str) -> None:
    message = refusal({"sync_load_ms": value})
    assert f"sync_load_ms={value!r}" in message
    assert allowed in message


@pytest.mark.parametrize(
    "key", ["cpu_bytes_to_use", "backend", "copy_path", "kv_layout", "kv_offload_backend"]
)
def test_null_is_not_a_value(key: str) -> None:
    assert f"{key}=None" in refusal({key: None})


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


def test_an_unknown_key_like_no_other_is_answered_with_all_keys() -> None:
    message = refusal({"zzz": 1})
    assert "zzz=1" in message
    assert "did you mean" not in message
    for key in OffloadConfig.model_fields:
        assert key in message


@pytest.mark.parametrize(
    ("value", "nearest"),
    [("CUDA", None), ("cudo", "cuda"), ("hots", "host"), ("auto ", "auto"), ("tpu", "npu")],
)
def test_an_unknown_backend_is_named_with_its_nearest(value: str, nearest: str | None) -> None:
    message = refusal({"backend": value})
    assert f"backend={value!r}" in message
    for allowed in ("auto", "cuda", "npu", "host"):
        assert f"'{allowed}'" in message
    if nearest is not None:
        assert f"did you mean {nearest!r}" in message


@pytest.mark.parametrize("value", [1, True, ["cuda"]])
def test_a_backend_is_a_string(value: object) -> None:
    message = refusal({"backend": value})
    assert f"backend={value!r}" in message
    assert "'cuda'" in message


def test_the_disk_tier_of_the_builtin_connector() -> None:
    message = refusal({"kv_offload_backend": "disk"})
    assert "kv_offload_backend='disk'" in message
    assert "no disk tier" in message


def test_every_wrong_key_is_named_at_once() -> None:
    message = refusal({"lazy_offload": "yes", "num_cpu_blocks": -1, "backned": "cuda"})
    for part in ("lazy_offload='yes'", "num_cpu_blocks=-1", "backned='cuda'", "'backend'"):
        assert part in message


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
        said = f"cpu_block_size={size}: must be a multiple of the 16 tokens of a device block"
        assert str(caught.value) == f"{said}; the nearest is {nearest}"


@pytest.mark.parametrize("size", [0, -16, "32", 16.5, True])
def test_a_block_size_is_a_positive_number(size: object) -> None:
    assert f"cpu_block_size={size!r}: " in refusal({"cpu_block_size": size})
