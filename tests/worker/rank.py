"""Rank: a worker on a scripted backend, stepped by a test."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.backends.base import Barrier, Direction
from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata, Transfer
from simple_offload.ranks import Ranks
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import within_patience
from tests.worker.kv_memory import full, group, make_kv_memory
from tests.worker.scripted import Mark, ScriptedBackend, ScriptedPending

NUM_HOST_BLOCKS = 8
BLOCK_BYTES = full().page_size_bytes


class MarkingBackend(ScriptedBackend):
    """Gives each barrier a mark of its own; logs ("barrier",)."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []

    def barrier(self) -> Barrier | None:
        self.log.append(("barrier",))
        self.marks.append(Mark())
        return self.marks[-1]

    def barriers_of(self, direction: Direction) -> list[object]:
        return [entry[3] for entry in self.log if entry[:2] == ("copy", direction)]


class LoggedPending(ScriptedPending):
    """Logs ("hold", id) when compute has to wait for it."""

    def __init__(self, backend: ScriptedBackend, transfer_id: int, remaining: float) -> None:
        super().__init__(remaining=remaining)
        self._entry = ("hold", transfer_id)
        self._log = backend.log

    def hold_compute(self) -> None:
        super().hold_compute()
        self._log.append(self._entry)


class Rank:
    """A worker, its backend, and the clock that the worker reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **extra_config: Any) -> None:
        self.backend = MarkingBackend()
        self.now = 1000.0
        package = "simple_offload.worker"
        monkeypatch.setattr(f"{package}.worker.make_backend", lambda name, path: self.backend)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(f"{package}.early_announcement.time", clock)
        self.memory = make_kv_memory([group(full(), "a")], 4, KVCacheLayout.LBHNC)
        config = OffloadConfig.parse({"num_cpu_blocks": NUM_HOST_BLOCKS} | extra_config, 1)
        self.worker = OffloadWorker(self.memory.config, config, Ranks(1, 1))

    def register(self) -> None:
        self.worker.register_kv_caches(self.memory.kv_caches)

    def flush(self) -> None:
        """Wait until the copy threads have submitted everything."""
        for lane in self.worker.lanes.values():
            lane.flush()

    def step(self, metadata: StepMetadata) -> tuple[set[str], set[str]]:
        """Run one engine step, with hooks in vLLM's order. Returns the polled requests."""
        self.worker.bind(metadata)
        self.worker.submit_loads()
        self.worker.submit_stores()
        self.flush()
        return self.worker.poll()

    def pend(self, transfer_id: int, remaining: float) -> LoggedPending:
        """Keep the copy of this transfer in flight, with ``remaining`` seconds left."""
        pending = LoggedPending(self.backend, transfer_id, remaining)
        self.backend.pendings[transfer_id] = pending
        return pending

    def close(self) -> None:
        self.backend.release()
        within_patience(self.worker.shutdown)


def load(transfer_id: int, request_id: str, after_compute: bool = True) -> Transfer:
    return Transfer.pairing(transfer_id, [1], [2], request_id, after_compute)


def store(transfer_id: int) -> Transfer:
    return Transfer.pairing(transfer_id, [1], [2])
