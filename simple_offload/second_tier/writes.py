"""Writes: host blocks on their way to the second tier, behind their store."""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_offload.base import OffloadKey

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run
from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.helper import Helper
from simple_offload.second_tier.objects import Objects
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.seals import Seals
from simple_offload.second_tier.speeds import EngineTime

logger = get_logger(__name__)

_WRITE_BYTES = 64 << 20
"""Of one write. vLLM's fs tier has a thread for each."""
_MAX_WRITES, _CORES_PER_WRITE = 4, 8
"""Writes under way at once: each takes up a core where the page cache or tmpfs gets a copy. What
does not find room waits in a list."""
_MAX_WAITING = 1 << 16
"""Keys of blocks that wait to be written. Beyond them, the newest are dropped."""
_PAUSE_SECONDS = 30.0
"""Pause of writes after one has failed: the disk may be full."""


class _Write(NamedTuple):
    rows: dict[BlockHashWithGroupId, int]
    """By key of a block, where it is."""
    seals: "Future[list[bytes]]"
    began: float


class Writes:
    """Each host block that has become findable is written once, in the order in which they came.

    A write has no reference to its blocks, so that it does not change the order of eviction. If a
    block gets other contents meanwhile, its seal does not fit what was written.
    """

    def __init__(
        self,
        objects: Objects,
        rows: Rows,
        helper: Helper,
        tier: CpuTier,
        meter: metrics.Meter,
        now: EngineTime,
    ) -> None:
        self._objects = objects
        self._rows = rows
        self._helper = helper
        self._tier = tier
        self._meter = meter
        self._now = now
        self._waiting: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        self._sealing: deque[_Write] = deque()
        self._in_flight: dict[int, _Write] = {}
        self._paused_until = 0.0
        self._per_write = max(1, _WRITE_BYTES // rows.num_bytes)
        num_cores = len(os.sched_getaffinity(0))
        self._at_once = max(1, min(_MAX_WRITES, num_cores // _CORES_PER_WRITE))

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or could be."""
        return not (self.has_pending_work or self._in_flight)

    @property
    def has_pending_work(self) -> bool:
        """Whether something waits for the next step, which no thread does by itself."""
        return bool(self._sealing) or self._num_writable > 0

    @property
    def beginnings(self) -> list[float]:
        """When each write under way began."""
        return [write.began for write in self._in_flight.values()]

    def on_stored(self, run: Run, useless: Collection[int]) -> None:
        """The blocks of ``run`` have become findable in the tier, except at the places
        ``useless``."""
        new = [key for place, key in enumerate(run.keys) if place not in useless]
        room = max(0, _MAX_WAITING - len(self._waiting))
        self._waiting.update(dict.fromkeys(new[:room]))
        self._meter.add(metrics.SECOND_TIER_DROPPED, len(new[room:]), "busy")

    def start(self) -> None:
        """Start what can be written now."""
        while len(self._in_flight) < self._at_once and not self._objects.error:
            if not (self._sealing and self._sealing[0].seals.done()):
                break
            write = self._sealing.popleft()
            if not write.seals.cancelled():  # the helper's process has ended
                self._write(write)
        while (count := self._num_writable) > 0:
            rows: dict[BlockHashWithGroupId, int] = {}
            while self._waiting and len(rows) < count:
                key, _ = self._waiting.popitem(last=False)
                if found := self._tier.ids_of([key]):
                    [rows[key]] = found
                else:
                    self._meter.add(metrics.SECOND_TIER_DROPPED, 1, "evicted")
            if rows:
                seals = self._helper.ask(Seals.make, [*rows.values()], self._names(rows))
                self._sealing.append(_Write(rows, seals, self._now()))

    def on_ended(self, write_id: int, *, ok: bool) -> None:
        """A write has ended."""
        rows = self._in_flight.pop(write_id).rows
        num_bytes = len(rows) * self._rows.num_bytes
        if ok:
            self._meter.add(metrics.SECOND_TIER_BYTES, num_bytes, "write")
        else:
            self._meter.add(metrics.SECOND_TIER_FAILED, 1, "write")
            now = self._now.clock()
            if self._paused_until <= now:
                logger.warning(
                    "The second tier could not write objects. It goes on in %.0f s", _PAUSE_SECONDS
                )
            self._paused_until = now + _PAUSE_SECONDS
        # A write that failed may have written some of them.
        self._helper.on_written(self._objects.paths(self._names(rows)), num_bytes)
        # Some blocks have changed since: their seal does not fit.
        changed = self._names(key for key in rows if not self._is_unchanged(key, rows[key]))
        self._helper.tell(Directory.remove, self._objects.paths(changed))

    def finish(self, poll: Callable[[], None], patience: float) -> None:
        """Write all that can be written, and wait for it. ``poll``: take note of what has ended.
        ``patience``: seconds for the helper's answers."""
        while not self.idle and not (self._objects.error or self._helper.error):
            self._helper.wait(patience)
            self.start()
            self._objects.drain()
            poll()

    def forget(self) -> None:
        """Write nothing of what has come so far, but for what is under way."""
        self._waiting.clear()
        self._sealing.clear()

    @property
    def _num_writable(self) -> int:
        """Blocks that the next write may have."""
        is_busy = len(self._sealing) >= self._at_once
        if is_busy or not self._waiting or self._now.clock() < self._paused_until:
            return 0
        writes = (*self._sealing, *self._in_flight.values())
        num_objects = sum(len(write.rows) for write in writes)
        room = self._helper.room - num_objects * self._rows.num_bytes
        return max(0, min(self._per_write, room // self._rows.num_bytes))

    def _names(self, keys: Iterable[BlockHashWithGroupId]) -> list[OffloadKey]:
        return [self._objects.name(key) for key in keys]

    def _is_unchanged(self, key: BlockHashWithGroupId, row: int) -> bool:
        """Whether a block still has the contents to be written."""
        return self._tier.ids_of([key]) == [row]

    def _write(self, write: _Write) -> None:
        """Begin a write whose seals are known, without blocks that have lost their contents. Such a
        seal may be that of other bytes, and a read may be filling that row."""
        sealed = zip(write.rows.items(), write.seals.result(), strict=True)
        seals = {key: seal for (key, row), seal in sealed if self._is_unchanged(key, row)}
        rows = {key: write.rows[key] for key in seals}
        self._meter.add(metrics.SECOND_TIER_DROPPED, len(write.rows) - len(rows), "evicted")
        if rows:
            self._rows.seal([*rows.values()], [*seals.values()])
            write_id = self._objects.write(self._names(rows), [*rows.values()])
            self._in_flight[write_id] = write._replace(rows=rows)
