"""Ledger: what vLLM's loggers would hear of an engine, held against what has happened."""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from simple_offload import metrics
from simple_offload.backends.base import Direction


class Ledger:
    """Adds up all that is counted."""

    def __init__(self) -> None:
        self.stats = metrics.OffloadStats()

    def watch(self, connector: Any) -> None:
        """Add up the counts that ``connector``, of the scheduler side, gives vLLM from now on."""
        tell = connector.get_kv_connector_stats

        def tell_both() -> KVConnectorStats | None:
            told: KVConnectorStats | None = tell()
            self.add(told)
            return told

        connector.get_kv_connector_stats = tell_both

    def add(self, stats: KVConnectorStats | None) -> None:
        """Add a payload, unless it is another connector's."""
        if isinstance(stats, MultiKVConnectorStats):
            for each in stats.data.values():
                self.add(each)
        elif isinstance(stats, metrics.OffloadStats):
            self.stats.aggregate(stats)

    def __call__(self, name: str, *labels: str) -> float:
        """A number; without labels the sum."""
        values: dict[tuple[str, ...], float] = self.stats.data["data"].get(name, {})
        return sum(value for of, value in values.items() if labels in ((), of))

    def samples(self, name: str, *labels: str) -> list[float]:
        """What a histogram has seen."""
        samples: list[float] = self.stats.data["samples"].get(name, {}).get(labels, [])
        return samples

    def check(self, num_bytes: Mapping[Direction, int], num_sent: int, num_used: int) -> None:
        """Raise AssertionError unless the numbers fit what has happened: bytes copied on all ranks
        without failing, blocks sent to be stored, and blocks that now hold something."""
        for direction, expected in num_bytes.items():
            found = self(metrics.BYTES, direction.value, "host")
            assert found == expected, f"{found} bytes counted, {expected} copied ({direction})"
        kept = self(metrics.STORED) - self(metrics.EVICTED)
        assert num_used == kept, f"{num_used} blocks are used; stored and not evicted are {kept}"
        assert num_used == self(metrics.USED), f"{num_used} blocks are used"
        least = self(metrics.STORED)
        least += sum(self(metrics.DROPPED, reason) for reason in ("copy_failed", "obsolete"))
        # Of what a reset drops, some had not been sent.
        most = least + self(metrics.DROPPED, "reset")
        assert least <= num_sent <= most, f"{num_sent} blocks sent, counted {least} to {most}"
