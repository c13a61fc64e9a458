"""A second tier under script, behind vLLM's own interface of second tiers."""

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from simple_offload.second_tier import namespace, opening
from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.helper import Helper
from simple_offload.second_tier.process import Message, Process
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.seals import Seals
from simple_offload.second_tier.second_tier import SecondTier
from simple_offload.shared_memory import SEAL_BYTES
from tests.simulation.identity import Story

SECONDS_OF_A_STEP = 0.5
_PAGES = 64
"""Bytes of a row that are pages in all worlds. Most of the rest is padding."""


@dataclass(frozen=True)
class DiskFaults:
    """Probabilities of failures, per object or per step."""

    vanished: float = 0.0
    """Another server has removed the object."""
    failed: float = 0.0
    """A read or write fails half-way."""
    short: float = 0.0
    """A read brings a part of the object, and says it brought all."""
    wrong: float = 0.0
    """Likewise, with a byte changed."""
    foreign: float = 0.0
    """Likewise, with the bytes of another object."""
    hang: float = 0.0
    """A read or write does not end before the script does."""
    raised: float = 0.0
    """A method of vLLM's tier raises an exception."""
    death: float = 0.0
    """The helper's process ends."""
    freeze: float = 0.0
    """No step is made for up to an hour."""


@dataclass(eq=False)
class _Job:
    job: TransferJob
    hangs: bool = False


@dataclass(eq=False)
class ScriptedDisk:
    """Objects that outlive worlds. It does what its tier is told when the script decides."""

    objects: dict[bytes, bytes] = field(default_factory=dict)
    stories: list[Story] = field(default_factory=list)
    """Of requests of earlier worlds."""
    on_read: Callable[[Iterable[int]], None] = lambda _: None
    """Called with the host blocks that a read will fill."""
    tier: "ScriptedTier | None" = None
    """Of the present world."""
    connection: "LocalConnection | None" = None
    """To the present world's helper."""
    raised: Callable[[], bool] = lambda: False
    """Whether a method of the tier raises."""
    num_read: int = 0
    num_bad: int = 0
    """Objects that were damaged or vanished."""

    @property
    def config(self) -> dict[str, Any]:
        """The value of ``second_tier``."""
        return {
            "type": "ScriptedTier",
            "module_path": __name__,
            "cache_namespace": "simulation",
            "disk": self,
        }

    @property
    def is_busy(self) -> bool:
        """Whether its tier has begun what it has not ended, or not told of."""
        return self.tier is not None and bool(self.tier.jobs or self.tier.ended)

    def act(self, rng: random.Random, speed: float, faults: DiskFaults) -> int:
        """Do some of what is due, each thing with the probability ``speed``. Returns the number of
        faults."""
        if self.tier is None:
            return 0
        num_bad = self.num_bad
        self.raised = lambda: faults.raised > 0 and rng.random() < faults.raised
        if self.connection is not None and rng.random() < faults.death:
            self.connection.is_dead = True
            self.num_bad += 1
        self.tier.answer(rng, speed)
        for each in [*self.tier.jobs]:
            each.hangs = each.hangs or rng.random() < faults.hang
            if not each.hangs and rng.random() < speed:
                self.tier.end(each, rng, faults)
        return self.num_bad - num_bad

    def finish(self) -> None:
        """End all that hangs. It was late, and is right."""
        rng = random.Random(0)
        self.raised = lambda: False
        if self.tier is not None:
            self.tier.answer(rng, 1.0)
            for each in [*self.tier.jobs]:
                self.tier.end(each, rng, DiskFaults())


class ScriptedTier(SecondaryTierManager):
    """Reads and writes rows of host memory at any time between submission and end, as threads or a
    device would."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        disk: ScriptedDisk,
        backpressure_detector: object = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self._rows = np.asarray(primary_kv_view)
        self._disk = disk
        self._answers: dict[OffloadKey, bool | None] = {}
        self.asked: dict[str, set[OffloadKey]] = {}
        """By request, what it has asked for."""
        self.jobs: list[_Job] = []
        self.ended: list[JobResult] = []
        """Those that were not told of."""
        self.is_shut_down = False
        disk.tier = self

    # As vLLM's tier

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._may_raise()
        self.asked.setdefault(req_context.req_id, set()).add(key)
        answer = self._answers.setdefault(key, None)
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._may_raise()
        self.jobs.append(_Job(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._disk.on_read(job_metadata.chunk_ids.tolist())
        # A read may write to its rows at any time.
        self._rows[job_metadata.chunk_ids] = 0xC9
        self.jobs.append(_Job(job_metadata))
        self._may_raise()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._may_raise()
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._may_raise()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._may_raise()
        others = self.asked.values()
        for key in self.asked.pop(req_context.req_id, ()):
            if not any(key in asked for asked in others):
                self._answers.pop(key, None)

    def drain_jobs(self) -> None:
        self._disk.finish()

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _may_raise(self) -> None:
        if self._disk.raised():
            self._disk.num_bad += 1
            raise RuntimeError("a fault of the tier")

    # As the disk

    def answer(self, rng: random.Random, speed: float) -> None:
        """Answer some questions."""
        for key, answer in self._answers.items():
            if answer is None and rng.random() < speed:
                self._answers[key] = key in self._disk.objects

    def end(self, each: _Job, rng: random.Random, faults: DiskFaults) -> None:
        """End a read or a write."""
        self.jobs.remove(each)
        job = each.job
        act = self._read if job.is_promotion else self._write
        done: list[OffloadKey] = []
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            if not act(key, int(row), rng, faults):
                break
            done.append(key)
        ok = len(done) == len(job.keys)
        if job.is_promotion and not ok:
            asked = [key for key in job.keys if self._answers.get(key, True) is None]
            assert not asked, "vLLM's fs tier fails if an object that it reads is asked for"
        self.ended.append(JobResult(job.job_id, ok, None if ok else tuple(done)))

    def _write(self, key: OffloadKey, row: int, rng: random.Random, faults: DiskFaults) -> bool:
        if rng.random() < faults.failed:
            self._disk.num_bad += 1
            return False
        self._disk.objects.setdefault(key, self._rows[row].tobytes())
        return True

    def _read(self, key: OffloadKey, row: int, rng: random.Random, faults: DiskFaults) -> bool:
        objects, target = self._disk.objects, self._rows[row]
        if rng.random() < faults.vanished:
            objects.pop(key, None)
        found = objects.get(key)
        is_bad = found is None or rng.random() < faults.failed
        self._disk.num_bad += is_bad
        if found is None or is_bad:
            return False
        self._disk.num_read += 1
        content = np.frombuffer(found, np.uint8)
        if rng.random() < faults.foreign:
            other = objects[rng.choice(sorted(objects))]
            self._disk.num_bad += other != found
            content = np.frombuffer(other, np.uint8)
        if rng.random() < faults.short:
            self._disk.num_bad += 1
            target[: _PAGES // 2] = content[: _PAGES // 2]
            return True
        target[:] = content
        if rng.random() < faults.wrong:
            self._disk.num_bad += 1
            target[rng.randrange(_PAGES // 2, _PAGES)] ^= 1 << rng.randrange(8)
        return True


class LocalConnection(Process):
    """Does in this process what a helper's process would, at once."""

    def __init__(self, rows: Rows) -> None:
        self.directory: Directory | None = None
        self._seals = Seals(rows.array, SEAL_BYTES)
        self._requests: list[Message] = []
        self.messages: list[Message] = [("seen", sys.maxsize)]
        """To its parent."""
        self.is_held = False
        """Whether requests wait until ``release``."""
        self.is_dead = False
        """Whether the process has ended."""
        self.patience: float | None = None
        """Seconds that its end was waited for, once it was."""

    def send(self, message: Message) -> None:
        if self.is_dead:
            raise BrokenPipeError("its process has ended")
        number, what, *arguments = message
        if not number:
            getattr(self.directory, what)(*arguments)
            return
        self._requests.append(message)
        if not self.is_held:
            self.release()

    def release(self) -> None:
        """Answer all requests so far."""
        self.is_held = False
        for number, what, *arguments in self._requests:
            self.messages.append(("answer", number, getattr(self._seals, what)(*arguments)))
        self._requests.clear()

    def receive(self, seconds: float = 0.0) -> list[Message]:
        if self.is_dead:
            raise EOFError("its process has ended")
        messages, self.messages = self.messages, []
        return messages

    def close(self, seconds: float = 0.0) -> None:
        """Another process would know nothing of this one's requests."""
        self._requests.clear()
        self.patience = seconds
        self.messages = [("seen", sys.maxsize)]


def scripted_clock(now: Callable[[], float], disk: ScriptedDisk) -> Callable[[], None]:
    """Let second tiers have this clock, no process and one namespace, until the returned function
    is called."""

    def start_helper(rows: Rows, *_: object) -> Helper:
        def connect() -> LocalConnection:
            disk.connection = LocalConnection(rows)
            return disk.connection

        return Helper(connect)

    stack = ExitStack()
    stack.enter_context(patch.object(SecondTier, "clock", staticmethod(now)))
    stack.enter_context(patch.object(opening, "start_helper", start_helper))
    # The model has neither weights nor a drafter's configuration.
    stack.enter_context(patch.object(namespace, "describe", return_value={"model": "scripted"}))
    return stack.close
