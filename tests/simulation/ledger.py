"""Ledger: an engine's stats as vLLM's loggers would receive them, compared with the actual
events."""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from simple_offload import metrics
from simple_offload.backends.base import Direction
from tests.simulation.watch import watch


class Ledger:
    """Adds up all stats."""

    def __init__(self) -> None:
        self.stats = metrics.OffloadStats()

    def watch(self, connector: Any) -> None:
        """Add up the stats that ``connector``, of the scheduler side, gives vLLM from now on."""

        def get_and_add(get_stats: Any) -> KVConnectorStats | None:
            stats: KVConnectorStats | None = get_stats()
            self.add(stats)
            return stats

        watch(connector, "get_kv_connector_stats", get_and_add)

    def add(self, stats: KVConnectorStats | None) -> None:
        """Add a payload, unless it is another connector's."""
        if isinstance(stats, MultiKVConnectorStats):
            for each in stats.data.values():
                self.add(each)
        elif isinstance(stats, metrics.OffloadStats):
            self.stats.aggregate(stats)

    def __call__(self, name: str, *labels: str) -> float:
        """The value of a metric. Without labels, the sum."""
        values: dict[tuple[str, ...], float] = self.stats.data["data"].get(name, {})
        return sum(value for of, value in values.items() if labels in ((), of))

    def samples(self, name: str, *labels: str) -> list[float]:
        """All samples of a histogram."""
        samples: list[float] = self.stats.data["samples"].get(name, {}).get(labels, [])
        return samples

    def check(self, num_bytes: Mapping[Direction, int], num_sent: int, num_used: int) -> None:
        """Raise AssertionError unless the counts are right. ``num_bytes``: bytes of successful
        copies on all ranks. ``num_sent``: blocks in submitted stores. ``num_used``: blocks with
        contents."""
        for direction, expected in num_bytes.items():
            found = self(metrics.BYTES, direction.value, "host")
            assert found == expected, f"{found} bytes counted, {expected} copied ({direction})"
        kept = self(metrics.STORED) + self(metrics.FETCHED) - self(metrics.EVICTED)
        assert num_used == kept, f"{num_used} blocks are used; stored and not evicted are {kept}"
        assert num_used == self(metrics.USED), f"{num_used} blocks are used"
        least = self(metrics.STORED)
        least += sum(self(metrics.DROPPED, reason) for reason in ("copy_failed", "obsolete"))
        # Some of the blocks that a reset drops had not been sent.
        most = least + self(metrics.DROPPED, "reset")
        assert least <= num_sent <= most, f"{num_sent} blocks sent, counted {least} to {most}"
