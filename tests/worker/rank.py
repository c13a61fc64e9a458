"""Rank: a worker on a scripted backend, stepped by a test."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata
from simple_offload.ranks import Ranks
from simple_offload.transfer import Transfer
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import within_patience
from tests.simulation.ledger import Ledger
from tests.worker.kv_memory import full, group, make_kv_memory
from tests.worker.scripted import ScriptedBackend, ScriptedPending

NUM_HOST_BLOCKS = 8
BLOCK_BYTES = full().page_size_bytes
NOTHING: tuple[set[str], set[str]] = (set(), set())
"""What ``poll`` returns if no request's load has ended."""


class Rank:
    """A worker, its backend, and the clock that the worker reads."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        layers: str = "a",
        waiting_layers: str = "",
        are_alike: bool = True,
        **extra_config: Any,
    ) -> None:
        """``waiting_layers``: those of its layers that wait for loads one by one. ``are_alike``: as
        in ``Ranks``."""
        self.backend = ScriptedBackend()
        self.now = 1000.0
        package = "simple_offload.worker"
        monkeypatch.setattr(f"{package}.worker.make_backend", lambda name, path: self.backend)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(f"{package}.early_announcement.time", clock)
        self.memory = make_kv_memory([group(full(), *layers)], 4, KVCacheLayout.LBHNC)
        ranks = Ranks(1, 1, are_alike)
        config = OffloadConfig.parse({"num_cpu_blocks": NUM_HOST_BLOCKS} | extra_config, ranks)
        self.worker = OffloadWorker(
            self.memory.config, config, ranks, waiting_layers=lambda: waiting_layers
        )

    def register(self) -> None:
        self.worker.register_kv_caches(self.memory.kv_caches)

    def submit(self, metadata: StepMetadata) -> None:
        """Call a step's hooks in vLLM's order. The copy threads work on."""
        self.worker.bind(metadata)
        self.worker.submit_loads()
        self.worker.submit_stores()

    def flush(self) -> None:
        """Wait until the copy threads have submitted everything."""
        for lane in self.worker.lanes.values():
            lane.flush()

    def step(self, metadata: StepMetadata | None = None) -> tuple[set[str], set[str]]:
        """Run one engine step. Returns the polled requests."""
        self.submit(metadata or StepMetadata())
        self.flush()
        return self.worker.poll()

    def report(self) -> tuple[dict[int, int], dict[int, int]]:
        """Transfers that the rank reports as ended, and those of them that failed."""
        report = self.worker.drain_report()
        return (dict(report.ended), dict(report.failed)) if report is not None else ({}, {})

    def pend(self, transfer_id: int, remaining: float) -> ScriptedPending:
        """Keep the copy of this transfer in flight, with ``remaining`` seconds left."""
        pending = ScriptedPending(remaining=remaining, log=self.backend.log)
        self.backend.pendings[transfer_id] = pending
        return pending

    def announce(self, number: int, num_new_tokens: int = 1) -> ScriptedPending:
        """Announce a load that has not ended."""
        pending = self.pend(number, 0.0)
        step = StepMetadata([load(number, f"r{number}", num_new_tokens=num_new_tokens)])
        assert self.step(step) == ({f"r{number}"}, set())
        return pending

    def close(self) -> None:
        self.backend.release()
        within_patience(self.worker.shutdown)


def load(
    transfer_id: int, request_id: str, after_compute: bool = True, num_new_tokens: int = 1
) -> Transfer:
    return Transfer.pairing(
        transfer_id, [1], [2], request_id, after_compute, num_new_tokens=num_new_tokens
    )


def store(transfer_id: int) -> Transfer:
    return Transfer.pairing(transfer_id, [1], [2])


def run(worker: OffloadWorker, step: StepMetadata) -> tuple[set[str], set[str]]:
    """Run a step until its copies have ended. Returns the polled requests."""
    worker.bind(step)
    worker.submit_loads()
    worker.submit_stores()
    worker.drain()
    return worker.poll()


def drain_stats(worker: OffloadWorker) -> Ledger:
    ledger = Ledger()
    ledger.add(worker.drain_stats())
    return ledger
