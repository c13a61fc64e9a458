"""OffloadConfig: limits of the machine's memory, and how ranks share it."""

import pytest

from simple_offload.config import GIB, ConfigError, OffloadConfig
from simple_offload.ranks import Ranks
from tests.conftest import Machine
from tests.test_config import refusal

pytestmark = pytest.mark.usefixtures("machine")

BOTH_SIZES = pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])


@pytest.mark.parametrize(
    ("key", "size", "num_ranks", "asked"),
    [("cpu_bytes_to_use", 100, 1, "101.00"), ("cpu_bytes_to_use_per_rank", 50, 2, "102.00")],
)
def test_more_than_the_machine_has(key: str, size: int, num_ranks: int, asked: str) -> None:
    OffloadConfig.parse({key: f"{size}GiB"}, Ranks(num_ranks, num_ranks))
    message = refusal({key: f"{size + 1}GiB"}, num_ranks)
    assert f"{key}='{size + 1}GiB' asks for {asked} GiB" in message
    assert "100.00 GiB in all" in message


@BOTH_SIZES
@pytest.mark.parametrize(
    "value", [10**400, 2.0**1000, "9" * 400 + "GiB"], ids=["int", "float", "string"]
)
def test_a_size_beyond_any_number_format(key: str, value: object) -> None:
    assert f"{key}=" in refusal({key: value})


def test_the_default_too_must_fit(machine: Machine) -> None:
    machine.num_bytes = 4 * GIB
    assert f"cpu_bytes_to_use={8 * GIB}" in refusal({})
    OffloadConfig.parse({"num_cpu_blocks": 16}, Ranks(1, 1))  # sized otherwise


def test_a_machine_that_may_get_more_memory(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.num_bytes = 31 * GIB
    machine.write("/sys/bus/virtio/drivers/virtio_mem/virtio3/device", "")
    config = OffloadConfig.parse({"cpu_bytes_to_use": "200GiB"}, Ranks(1, 1))
    assert config.cpu_bytes_to_use == 200 * GIB
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "has 31.00 GiB so far" in record.getMessage()


# Shares of the machine


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [("80%", 80 * GIB), ("100%", 100 * GIB), (" 12.5 % ", 25 * GIB // 2), ("0.1%", GIB // 10)],
)
@BOTH_SIZES
def test_a_share_of_the_machine_s_memory(key: str, value: str, num_bytes: int) -> None:
    assert getattr(OffloadConfig.parse({key: value}, Ranks(1, 1)), key) == num_bytes


def test_a_share_is_the_same_for_processes_that_start_one_after_another(machine: Machine) -> None:
    """Whatever the ranks that started before have taken."""
    machine.available = 3 * GIB
    assert (
        OffloadConfig.parse({"cpu_bytes_to_use": "80%"}, Ranks(1, 1)).cpu_bytes_to_use == 80 * GIB
    )


@BOTH_SIZES
def test_shares_of_all_engines_together(key: str) -> None:
    """Each engine of data parallelism has that share, as it would have those bytes."""
    OffloadConfig.parse({key: "25%"}, Ranks(1, 4))
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.parse({key: "25%"}, Ranks(1, 5))
    assert f"{key}='25%' asks for 125.00 GiB of host memory" in str(caught.value)


# Sizes of a rank


@BOTH_SIZES
def test_bytes_for_less_than_two_blocks(key: str) -> None:
    config = OffloadConfig.parse({key: 500}, Ranks(1, 1))
    with pytest.raises(ConfigError) as caught:
        config.num_host_blocks(block_bytes=251, num_ranks=1)
    assert f"{key}=500" in str(caught.value)
    assert "502 bytes" in str(caught.value)


@BOTH_SIZES
def test_explicit_bytes_bind_the_number_of_blocks_and_default_bytes_do_not(key: str) -> None:
    config = OffloadConfig.parse({"num_cpu_blocks": 1000}, Ranks(1, 1))
    assert config.num_host_blocks(block_bytes=GIB, num_ranks=1) == 1000
    config = OffloadConfig.parse({key: 1000, "num_cpu_blocks": 10}, Ranks(1, 1))
    assert config.num_host_blocks(block_bytes=100, num_ranks=1) == 10
    with pytest.raises(ConfigError) as caught:
        config.num_host_blocks(block_bytes=101, num_ranks=1)
    for text in ("num_cpu_blocks=10", "2 to 9", key):
        assert text in str(caught.value)
