"""Writes: host blocks on their way to the second tier, behind their store."""

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_offload.base import OffloadKey

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run
from simple_offload.second_tier.helper import Helper
from simple_offload.second_tier.objects import Objects
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.speeds import EngineTime

logger = get_logger(__name__)

_WRITE_BYTES = 64 << 20
"""Of one write. vLLM's fs tier has a thread for each."""
_MAX_WRITES = max(1, min(4, len(os.sched_getaffinity(0)) // 8))
"""Writes under way at once. Each takes up a core where the page cache or tmpfs gets a copy. What
does not find room waits in a list."""
_MAX_WAITING = 1 << 16
"""Keys of blocks that wait to be written. Beyond them, the newest are dropped."""
_PAUSE_SECONDS = 30.0
"""Pause of writes after one has failed: the disk may be full."""


class _Write(NamedTuple):
    seals: "Future[list[bytes]]"
    keys: Sequence[BlockHashWithGroupId]
    names: Sequence[OffloadKey]
    rows: Sequence[int]
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
        self._waiting: dict[BlockHashWithGroupId, None] = {}
        self._sealing: deque[_Write] = deque()
        self._in_flight: dict[int, _Write] = {}
        self._paused_until = 0.0
        self._per_write = max(1, _WRITE_BYTES // rows.num_bytes)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or could be."""
        return not (self._sealing or self._in_flight or self._num_writable)

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
        while (
            self._sealing and len(self._in_flight) < _MAX_WRITES and self._sealing[0].seals.done()
        ):
            write = self._sealing.popleft()
            if not write.seals.cancelled():  # the helper's process has ended
                self._write(write)
        while (count := self._num_writable) > 0:
            keys: list[BlockHashWithGroupId] = []
            rows: list[int] = []
            while self._waiting and len(keys) < count:
                key = next(iter(self._waiting))
                del self._waiting[key]
                if found := self._tier.ids_of([key]):
                    keys.append(key)
                    rows += found
                else:
                    self._meter.add(metrics.SECOND_TIER_DROPPED, 1, "evicted")
            if keys:
                names = [self._objects.name(key) for key in keys]
                seals = self._helper.make_seals(rows, names)
                self._sealing.append(_Write(seals, keys, names, rows, self._now()))

    def on_ended(self, write_id: int, *, ok: bool) -> None:
        """A write has ended."""
        write = self._in_flight.pop(write_id)
        num_bytes = len(write.keys) * self._rows.num_bytes
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
        paths = self._objects.paths(write.names)
        # A write that failed may have written some of them.
        self._helper.on_written(paths, num_bytes)
        unchanged = self._unchanged(write)
        if len(unchanged) < len(write.keys):
            # The seal does not fit the others' contents.
            kept = {*unchanged}
            self._helper.remove([path for place, path in enumerate(paths) if place not in kept])

    def finish(self, poll: Callable[[], None]) -> None:
        """Write all that can be written, and wait for it. ``poll``: take note of what has ended."""
        while not self.idle and not (self._objects.error or self._helper.error):
            self._helper.wait()
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
        is_busy = len(self._sealing) >= _MAX_WRITES
        if is_busy or not self._waiting or self._now.clock() < self._paused_until:
            return 0
        writes = (*self._sealing, *self._in_flight.values())
        num_objects = sum(len(write.keys) for write in writes)
        room = self._helper.room.left() - num_objects * self._rows.num_bytes
        return max(0, min(self._per_write, room // self._rows.num_bytes))

    def _unchanged(self, write: _Write) -> Sequence[int]:
        """The places of blocks that still have the contents to be written."""
        if self._tier.ids_of(write.keys) == write.rows:
            return range(len(write.keys))
        return [
            place
            for place, key in enumerate(write.keys)
            if self._tier.ids_of([key]) == [write.rows[place]]
        ]

    def _write(self, write: _Write) -> None:
        """Begin a write whose seals are known, without blocks that have lost their contents. Such a
        seal may be that of other bytes, and a read may be filling that row."""
        seals = write.seals.result()
        places = self._unchanged(write)
        if len(places) < len(write.keys):
            self._meter.add(metrics.SECOND_TIER_DROPPED, len(write.keys) - len(places), "evicted")
            seals = [seals[place] for place in places]
            write = write._replace(
                keys=[write.keys[place] for place in places],
                names=[write.names[place] for place in places],
                rows=[write.rows[place] for place in places],
            )
        if write.keys:
            self._rows.seal(write.rows, seals)
            self._in_flight[self._objects.write(write.names, write.rows)] = write
