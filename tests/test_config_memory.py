"""OffloadConfig: limits of the machine's memory, and how ranks share it."""

import pytest

from simple_offload.config import GIB, ConfigError, OffloadConfig
from tests.conftest import Machine
from tests.test_config import refusal

pytestmark = pytest.mark.usefixtures("machine")


# Memory of the machine


def test_more_than_the_machine_has() -> None:
    OffloadConfig.parse({"cpu_bytes_to_use": 100 * GIB}, num_ranks=1)
    message = refusal({"cpu_bytes_to_use": "101GiB"})
    assert f"cpu_bytes_to_use={101 * GIB}" in message
    assert "100.00 GiB" in message


def test_the_ranks_share_the_machine() -> None:
    OffloadConfig.parse({"cpu_bytes_to_use": "60GiB"}, num_ranks=2)
    OffloadConfig.parse({"cpu_bytes_to_use_per_rank": "50GiB"}, num_ranks=2)
    message = refusal({"cpu_bytes_to_use_per_rank": "51GiB"}, num_ranks=2)
    assert f"cpu_bytes_to_use_per_rank={51 * GIB}" in message
    assert "102.00 GiB" in message
    assert "100.00 GiB" in message


def test_the_default_too_must_fit(machine: Machine) -> None:
    machine.num_bytes = 4 * GIB
    assert f"cpu_bytes_to_use={8 * GIB}" in refusal({})
    OffloadConfig.parse({"num_cpu_blocks": 16}, num_ranks=1)  # sized otherwise


@pytest.mark.parametrize(
    ("membership", "limit_file"),
    [
        ("0::/", "/sys/fs/cgroup/memory.max"),
        ("4:memory:/\n0::/", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        ("0::/jobs/one", "/sys/fs/cgroup/jobs/one/memory.max"),
        ("0::/jobs/one", "/sys/fs/cgroup/jobs/memory.max"),
        (
            "9:pids:/elsewhere\n4:cpu,memory:/jobs/one\n0::/",
            "/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes",
        ),
    ],
    ids=["v2", "v1", "v2 below the root", "v2 of the parent", "v1 below the root"],
)
def test_more_than_the_cgroup_may_use(machine: Machine, membership: str, limit_file: str) -> None:
    machine.write("/proc/self/cgroup", membership)
    machine.write(limit_file, f"{10 * GIB}\n")
    OffloadConfig.parse({"cpu_bytes_to_use": "10GiB"}, num_ranks=1)
    message = refusal({"cpu_bytes_to_use": "11GiB"})
    assert f"cpu_bytes_to_use={11 * GIB}" in message
    assert "10.00 GiB" in message


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n"])
def test_a_cgroup_without_a_limit(machine: Machine, limit: str) -> None:
    machine.write("/proc/self/cgroup", "4:memory:/\n0::/")
    machine.write("/sys/fs/cgroup/memory.max", limit)
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", limit)
    OffloadConfig.parse({"cpu_bytes_to_use": "100GiB"}, num_ranks=1)
    assert "100.00 GiB" in refusal({"cpu_bytes_to_use": "101GiB"})


def test_a_kernel_without_cgroups() -> None:
    OffloadConfig.parse({"cpu_bytes_to_use": "100GiB"}, num_ranks=1)


def test_the_smallest_limit_counts(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/jobs/one")
    for name, limit in (("", 30), ("jobs/", 10), ("jobs/one/", 20)):
        machine.write(f"/sys/fs/cgroup/{name}memory.max", f"{limit * GIB}\n")
    assert "10.00 GiB" in refusal({"cpu_bytes_to_use": "11GiB"})


# Sizes of a rank


def test_bytes_are_shared_by_the_ranks_unless_given_for_each() -> None:
    server_wide = OffloadConfig.parse({"cpu_bytes_to_use": "8GiB"}, num_ranks=4)
    assert server_wide.bytes_per_rank(4) == 2 * GIB
    both = {"cpu_bytes_to_use": "8GiB", "cpu_bytes_to_use_per_rank": "3GiB"}
    assert OffloadConfig.parse(both, num_ranks=4).bytes_per_rank(4) == 3 * GIB


def test_host_blocks_that_bytes_hold() -> None:
    config = OffloadConfig.parse({"cpu_bytes_to_use": 1000}, num_ranks=2)
    assert config.num_host_blocks(block_bytes=100, num_ranks=2) == 5
    assert config.num_host_blocks(block_bytes=250, num_ranks=2) == 2


@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
def test_bytes_for_less_than_two_blocks(key: str) -> None:
    config = OffloadConfig.parse({key: 500}, num_ranks=1)
    with pytest.raises(ConfigError) as caught:
        config.num_host_blocks(block_bytes=251, num_ranks=1)
    assert f"{key}=500" in str(caught.value)
    assert "502 bytes" in str(caught.value)


def test_blocks_beside_default_bytes_are_not_bound_by_them() -> None:
    config = OffloadConfig.parse({"num_cpu_blocks": 1000}, num_ranks=1)
    assert config.num_host_blocks(block_bytes=GIB, num_ranks=1) == 1000


@pytest.mark.parametrize("key", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
def test_blocks_beside_explicit_bytes_are_bound_by_them(key: str) -> None:
    config = OffloadConfig.parse({key: 1000, "num_cpu_blocks": 10}, num_ranks=1)
    assert config.num_host_blocks(block_bytes=100, num_ranks=1) == 10
    with pytest.raises(ConfigError) as caught:
        config.num_host_blocks(block_bytes=101, num_ranks=1)
    for text in ("num_cpu_blocks=10", "2 to 9", key):
        assert text in str(caught.value)
