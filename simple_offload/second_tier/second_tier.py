"""SecondTier: objects behind host memory, fetched ahead and written behind."""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_offload.base import OffloadKey

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.helper import Helper
from simple_offload.second_tier.interface import SecondTierHooks
from simple_offload.second_tier.objects import Objects
from simple_offload.second_tier.reach import Reach
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.seals import Seals
from simple_offload.second_tier.speeds import LONGEST_STEP, EngineTime, Speeds
from simple_offload.second_tier.writes import Writes

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

_FIRST_ASKED = 16
"""Blocks that a request asks for first. Mostly the first is missing, and so are all behind it."""
_READ_BYTES = 16 << 20
"""Of one read: vLLM's fs tier has a thread for each, and 16 of them."""
_MAX_READS = 32
"""Reads under way at once."""
_FORGET_SECONDS = 300.0
"""How long an object that could not be read is not asked for."""
_MAX_FAILED = 1 << 16
"""Objects that are remembered for that."""
_HUNG_SECONDS = 60.0
"""After this time in which no read, write or check ends, the tier is switched off."""
_RETRY_SECONDS = 60.0
"""How long it is off. It comes back later if something of before is still under way."""
_LONGEST_SILENCE = 1.0
"""Seconds without an answer that the time between two steps counts as, at most."""
_LINGER_SECONDS = 5.0
"""How long an engine without requests goes on stepping for the tier. vLLM's pause, sleep and
shutdown wait so long. What is left is done when requests come again, or at shutdown."""
_CLOSE_SECONDS = 10.0
"""Longest shutdown, for writes under way."""
_SHORTEST_END = 1.0
"""Seconds that the helper's process has for its end in any case. It needs far less."""

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


@dataclass(slots=True, eq=False)
class _Read:
    """Objects on their way into host blocks, which it has a reference to."""

    keys: Sequence[BlockHashWithGroupId]
    names: Sequence[OffloadKey]
    blocks: Sequence[KVCacheBlock]
    began: float
    num_read: int = 0
    """Objects that were read, from the first on."""
    check: "Future[int] | None" = None
    """How many of those, from the first on, are whole and the right ones."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """What one request asks for and fetches. It may outlive the request's wait."""

    request: "Request"
    num_computed_tokens: int
    num_hit_tokens: int
    """Tokens that the tier has, behind those on the device."""
    began: float
    limit: float
    """When the request goes on without."""
    asking: Iterator[None] = field(init=False)
    """Asks, takes the answers that there are at each ``next``, and plans after the last one."""
    is_asking: bool = True
    """Whether it is not known yet what there is to fetch."""
    result: str = "miss"
    """How the request's wait ends, unless it is late or a source has failed."""
    has_failed: bool = False
    """An object was missing or bad, or all have become useless: what still comes is not kept."""
    chain_end: int | None = None
    """The token that the first missing block of a chain ends before."""
    found: set[BlockHashWithGroupId] = field(default_factory=set)
    tokens_per_block: float = 0.0
    """Tokens that the request gets, by block that is fetched for it."""
    sources: set["_Fetch"] = field(default_factory=set)
    """Fetches that bring them: itself, and those of other requests that need the same blocks."""
    num_waiting: int = 0
    """Requests that wait for it."""
    ends: dict[BlockHashWithGroupId, int] = field(default_factory=dict)
    """By key of all that it reads, the token that its block ends before."""
    unread: deque[BlockHashWithGroupId] = field(default_factory=deque)
    reads: deque[_Read] = field(default_factory=deque)
    """In the order of their tokens."""
    own: set[int] = field(default_factory=set)
    """Host blocks that it has read into. They must not make room for its rest."""
    num_brought: int = 0
    """Blocks of those that were read and are whole."""

    @property
    def ended(self) -> bool:
        """Whether it brings no more."""
        return not (self.unread or self.reads)


def _guarded(hook: _Hook) -> _Hook:
    """For hooks of the tier, which is optional: whatever one raises closes the tier. It returns
    None then: no wait, no work and no number."""

    @wraps(hook)
    def guarded(self: "SecondTier", *arguments: Any) -> Any:
        try:
            return hook(self, *arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            self.close_for(error)
            return None

    return cast("_Hook", guarded)


class SecondTier(SecondTierHooks):
    """vLLM asks the host tier for a prefix. What that lacks, this asks vLLM's second tier for,
    while the request waits in vLLM's queue, no longer than computing it would take. Objects become
    ordinary host blocks, head first. New host blocks are written behind (``Writes``).

    A read has a reference to its host blocks until vLLM's tier has ended it, however long that
    takes.

    A tier that hangs or fails is switched off for a while. A reset, or an exception here, closes it
    for good: no object is asked for, read or written any more.

    ``SecondTierHooks`` describes what the scheduler side calls.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        objects: Objects,
        rows: Rows,
        helper: Helper,
        tier: CpuTier,
        groups: Groups,
        reach: Reach,
        meter: metrics.Meter,
        on_device: Callable[[], Container[bytes]],
        on_fetched: Callable[[Run, "Request", list[int]], None],
        *,
        always: bool = False,
    ) -> None:
        """``on_device``: the keys that the device finds. ``on_fetched`` is called with blocks that
        were fetched for a request, each time some can be found, and the places of useless ones.
        ``always``: fetch, however slow that is."""
        # Whether it is used: a tier that fails must not end the server.
        self._off_since: float | None = None
        """When it was switched off. Infinite: for good."""

        # Times: the engine takes note of what has ended in its steps only, and may stand still.
        self._now = EngineTime(self.clock, LONGEST_STEP)
        """For what is measured."""
        self._stepped = EngineTime(self.clock, _LONGEST_SILENCE)
        """For how long something has not answered."""
        self._last_tokens = self.clock()
        """When vLLM last scheduled a step with tokens, by the clock on the wall."""
        self._last_ended = 0.0
        """When a read or write last ended."""
        self._has_polled = False
        """Whether the step that is being scheduled has taken note of what has ended."""
        self.speeds = Speeds(self.clock, always=always)

        # What it works with.
        self._objects = objects
        self._rows = rows
        self._tier = tier
        self._groups = groups
        self._reach = reach
        self._meter = meter
        self._on_device = on_device
        self._on_fetched = on_fetched
        self._helper = helper
        helper.clock = self._stepped
        self.writes = Writes(objects, rows, helper, tier, meter, self._stepped)

        # Requests and their fetches. Both end in their own time: a read goes on without a request.
        self._waits: dict[str, _Fetch] = {}
        """By request that waits."""
        self._over: dict[str, int | None] = {}
        """Requests that have waited: each waits once. The tokens that device and tier had before
        the fetch, if it was to bring more."""
        self._fetches: list[_Fetch] = []
        """All that have something under way, oldest first."""
        self._coming: dict[BlockHashWithGroupId, _Fetch] = {}
        self._reading: dict[int, _Read] = {}
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        """By name of an object that could not be read, when that was."""
        self._per_read = max(1, _READ_BYTES // rows.num_bytes)

    @property
    def is_on(self) -> bool:
        """Whether objects are asked for, read and written."""
        return self._off_since is None

    # Fetch ahead

    @_guarded
    def on_new_request(self, request: "Request") -> None:
        # For the first blocks that neither device nor tier has. The answers are there when vLLM
        # comes to the request.
        if not self.is_on or not self.speeds.should_ask(request.num_tokens):
            return
        on_device = self._on_device()
        for group in self._groups.chained_ids:
            keys = self._groups.keys(request.block_hashes, group)
            lacking = (
                key
                for key in keys
                if not (self._tier.has(key) or key in self._coming or key in on_device)
            )
            for key in islice(lacking, _FIRST_ASKED):
                self._ask_for(self._objects.name(key), request.request_id)
        self._objects.flush()

    @_guarded
    def on_lookup(self) -> None:
        if not self._has_polled:
            self._poll()
            self._has_polled = True

    @_guarded
    def must_wait(self, request: "Request", num_computed_tokens: int, num_hit_tokens: int) -> bool:
        request_id = request.request_id
        if not self.is_on or request_id in self._over:
            return False
        fetch = self._waits.get(request_id)
        if fetch is None:
            num_lacking = request.num_tokens - num_computed_tokens - num_hit_tokens
            if not self.speeds.should_ask(num_lacking):
                self._end_wait(request_id, "slower")
                return False
            limit = self.clock() + self.speeds.max_wait(max(0, num_lacking))
            fetch = _Fetch(request, num_computed_tokens, num_hit_tokens, self._now(), limit)
            fetch.asking = self._ask(fetch)
            self._waits[request_id] = fetch
        if fetch.is_asking:
            fetch.num_hit_tokens = num_hit_tokens
            next(fetch.asking, None)
        if not fetch.is_asking and all(source.ended for source in fetch.sources):
            has_failed = any(source.has_failed for source in fetch.sources)
            self._end_wait(request_id, "miss" if has_failed else fetch.result)
            return False
        # Without a limit, too, no request waits for ever.
        is_hung = fetch.is_asking and self._now() - fetch.began >= _HUNG_SECONDS
        is_hung |= any(self._is_hung(source.reads[0]) for source in fetch.sources if source.reads)
        if is_hung or self.clock() >= fetch.limit:
            if fetch.is_asking:  # the answers take so long, or never come
                self.speeds.on_answered(self._now() - fetch.began)
            self._end_wait(request_id, "late")
            return False
        return True

    def num_fetched_tokens(self, request_id: str, num_tokens: int) -> int:
        before = self._over.get(request_id)
        return max(0, num_tokens - before) if before is not None else 0

    @_guarded
    def on_request_finished(self, request_id: str) -> None:
        self._end_wait(request_id, None)
        self._over.pop(request_id, None)
        self._objects.on_answered(request_id)

    # One step

    @_guarded
    def on_stored(self, run: Run, useless: Collection[int]) -> None:
        if self.is_on:
            self.writes.on_stored(run, useless)

    @_guarded
    def on_step_ended(self, number: int) -> None:
        self.speeds.on_step_ended(number)

    @_guarded
    def on_step(self, num_tokens: int) -> int | None:
        self._now.on_step()
        self._stepped.on_step()
        if num_tokens:
            self._last_tokens = self.clock()
        self._poll()
        self._has_polled = False
        self._come_back()
        if self.is_on:
            # vLLM may not come to these requests in a step, while it has no room for more.
            for fetch in self._waits.values():
                next(fetch.asking, None)
            self._start_reads()
            self.writes.start()
            self._objects.flush()
            self._check_hung()
        return self.speeds.on_step(num_tokens)

    @property
    @_guarded
    def has_pending_work(self) -> bool:
        if not self.is_on or self.clock() - self._last_tokens >= _LINGER_SECONDS:
            return False
        return bool(self._fetches) or self.writes.has_pending_work

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or waits."""
        return not (self._waits or self._fetches) and self.writes.idle

    @_guarded
    def reset(self) -> None:
        if self._off_since != math.inf:
            logger.warning(
                "The host tier was reset, which may mean other weights: the second tier is off "
                "until the server starts again"
            )
        self._close(math.inf)
        for fetch in self._fetches:
            fetch.has_failed = True

    def close_for(self, error: Exception) -> None:
        """An exception here: the server goes on without the tier."""
        if self._off_since != math.inf:
            logger.error("The second tier is off until the server starts again", exc_info=error)
        with suppress(Exception):
            self._close(math.inf)
        self._waits.clear()

    def shutdown(self, seconds: float = _CLOSE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        # Half of it for the helper's process: if that is stopped, the tier ends without it.
        thread = threading.Thread(
            target=self._finish, args=[seconds / 2], name="simple-offload-close", daemon=True
        )
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            logger.warning("The second tier did not end within %.0f s", seconds)
        self._helper.close(max(_SHORTEST_END, deadline - time.monotonic()))
        self._rows.memory.close()

    @_guarded
    def _finish(self, patience: float) -> None:
        """Write what can be written, and end. As long as the tier hangs."""
        try:
            if self.is_on:
                self.writes.finish(self._poll, patience)
        finally:
            self._objects.close()

    def gauges(self) -> dict[str, float]:
        return {
            metrics.SECOND_TIER_ON: float(self.is_on and self.speeds.pays),
            metrics.FETCH_SPEED: self.speeds.fetch or 0.0,
            metrics.COMPUTE_SPEED: self.speeds.compute or 0.0,
        }

    # Asking

    def _ask(self, fetch: _Fetch) -> Iterator[None]:
        """Ask for the blocks that a request lacks, and plan. Yields while answers are missing."""
        request, groups = fetch.request, self._groups
        # Mostly the first blocks of chains are missing, and so are all behind them.
        start, sizes = fetch.num_computed_tokens + fetch.num_hit_tokens, groups.block_sizes
        first = [
            (group, start, start + _FIRST_ASKED * sizes[group]) for group in groups.chained_ids
        ]
        has_asked = yield from self._ask_about(fetch, first)
        stop = fetch.chain_end or request.num_tokens
        if (
            not first
            or groups.next_hit(stop - 1) > fetch.num_computed_tokens + fetch.num_hit_tokens
        ):
            # The chains allow a longer hit: it is other groups that the tier lacks.
            stop -= fetch.chain_end is not None
            every = [(group, fetch.num_computed_tokens, stop) for group in groups.ids]
            has_asked |= yield from self._ask_about(fetch, every)
        if has_asked:
            self.speeds.on_answered(self._now() - fetch.began)
        self._objects.on_answered(request.request_id)
        self._plan(fetch)

    def _ask_about(
        self, fetch: _Fetch, parts: Iterable[tuple[int, int, int]]
    ) -> Generator[None, None, bool]:
        """Ask for the blocks of groups between two tokens. Returns whether there are any."""
        request = fetch.request
        blocks = [
            (group, end, key)
            for group, start, stop in parts
            for end, key in self._groups.keys_between(request.block_hashes, group, start, stop)
        ]
        # vLLM's tier must not be asked for an object that is read: if the read fails before the
        # answer comes, vLLM 0.32's raises an exception.
        lacking = [
            (group, end, key, self._objects.name(key))
            for group, end, key in blocks
            if not (self._tier.has(key) or key in self._coming)
        ]
        for *_, name in lacking:
            self._ask_for(name, request.request_id)
        self._objects.flush()
        for group, end, key, name in lacking:
            while (answer := self._ask_for(name, request.request_id)) is None:
                yield
            if answer:
                fetch.found.add(key)
            elif group in self._groups.chained_ids:
                fetch.chain_end = min(end, fetch.chain_end or end)
        return bool(lacking)

    def _ask_for(self, name: OffloadKey, request_id: str) -> bool | None:
        """As ``Objects.ask``. What could not be read of late counts as missing."""
        failed = self._failed.get(name)
        if failed is not None and self.clock() - failed < _FORGET_SECONDS:
            return False
        return self._objects.ask(name, request_id)

    def _plan(self, fetch: _Fetch) -> None:
        """Decide what to fetch: what a lookup needs for the longest prefix."""
        fetch.is_asking = False
        if not (fetch.found or self._coming):
            return
        request, start = fetch.request, fetch.num_computed_tokens
        num_tokens, needed = self._reach.find(
            request.block_hashes,
            start,
            request.num_tokens - 1 - start,
            lambda key: key in fetch.found or key in self._coming or self._tier.has(key),
        )
        if num_tokens <= fetch.num_hit_tokens:
            return
        if not self.speeds.should_fetch():
            fetch.result = "slower"
            return
        fetch.result = "hit"
        lacking = [(end, key) for end, key in needed if not self._tier.has(key)]
        fetch.tokens_per_block = (num_tokens - fetch.num_hit_tokens) / max(1, len(lacking))
        for end, key in lacking:
            source = self._coming.setdefault(key, fetch)
            source.num_waiting += source not in fetch.sources
            fetch.sources.add(source)
            if source is fetch:
                fetch.ends[key] = end
        fetch.unread.extend(fetch.ends)
        if fetch.unread:
            self._fetches.append(fetch)

    def _end_wait(self, request_id: str, result: str | None) -> None:
        """The request does not wait any more. ``result``: None if it has ended."""
        fetch = self._waits.pop(request_id, None)
        if result is not None:
            self._over[request_id] = None
            if fetch is not None and fetch.result == "hit":
                self._over[request_id] = fetch.num_computed_tokens + fetch.num_hit_tokens
            self._meter.add(metrics.SECOND_TIER_LOOKUPS, 1, result)
        if fetch is None:
            return
        if fetch.is_asking:
            self._objects.on_answered(request_id)
        while fetch.sources:
            source = fetch.sources.pop()
            source.num_waiting -= 1
            if not source.num_waiting:
                self._give_up(source)

    # Reading

    def _start_reads(self) -> None:
        for fetch in self._fetches:
            while fetch.unread and len(self._reading) < _MAX_READS and not self._objects.error:
                keys = list(islice(fetch.unread, self._per_read))
                blocks = self._tier.allocate_for(keys, fetch.own)
                if not blocks:
                    # Too small a tier for this prefix, or all of it is in use.
                    fetch.has_failed |= not fetch.own
                    self._give_up(fetch)
                    break
                keys = [fetch.unread.popleft() for _ in blocks]
                names = [self._objects.name(key) for key in keys]
                read = _Read(keys, names, blocks, self._stepped())
                rows = [block.block_id for block in blocks]
                fetch.own.update(rows)
                request_id = fetch.request.request_id
                self._reading[self._objects.read(names, rows, request_id)] = read
                fetch.reads.append(read)

    def _give_up(self, fetch: _Fetch) -> None:
        """Begin no more reads of a fetch. Those under way go on."""
        for key in fetch.unread:
            self._coming.pop(key, None)
        fetch.unread.clear()

    def _poll(self) -> None:
        """Take note of what has ended, and commit what was read, head first."""
        for ended in self._objects.drain_ended():
            self._last_ended = self._stepped()
            if (read := self._reading.pop(ended.id, None)) is None:
                self.writes.on_ended(ended.id, ok=ended.ok)
                continue
            read.num_read = ended.num_read
            rows = [block.block_id for block in read.blocks[: ended.num_read]]
            read.check = self._helper.ask(Seals.count_whole, rows, read.names[: ended.num_read])
        self._helper.poll()
        for fetch in self._fetches:
            while fetch.reads and (check := fetch.reads[0].check) is not None and check.done():
                self._commit(fetch, fetch.reads.popleft(), check)
            if fetch.ended and fetch.num_brought:
                brought = round(fetch.tokens_per_block * fetch.num_brought)
                self.speeds.on_fetched(brought, self._now() - fetch.began)
        self._fetches = [fetch for fetch in self._fetches if not fetch.ended]
        if self.is_on and (self._objects.error or self._helper.error):
            self._switch_off("has failed")

    def _commit(self, fetch: _Fetch, read: _Read, check: "Future[int]") -> None:
        """Make the blocks of a read findable, up to the first that is not whole. What lies behind
        a block that is missing is of no use."""
        num_whole = 0 if check.cancelled() else check.result()
        for key in read.keys:
            self._coming.pop(key, None)
        self._meter.add(metrics.SECOND_TIER_BYTES, num_whole * self._rows.num_bytes, "read")
        num_brought = 0 if fetch.has_failed else num_whole
        if num_whole < len(read.keys):
            if not check.cancelled():  # the helper's process has ended
                self._on_bad(read.names[num_whole], is_damaged=num_whole < read.num_read)
            fetch.has_failed = True
            self._give_up(fetch)
        fetch.num_brought += num_brought
        on_device = self._on_device()
        wanted = [index for index in range(num_brought) if read.keys[index] not in on_device]
        run = Run(
            (),
            [read.keys[index] for index in wanted],
            num_tokens=[fetch.ends[read.keys[index]] for index in wanted],
            on_device=False,
            host_blocks=[read.blocks[index] for index in wanted],
        )
        self._tier.unpin([b for index, b in enumerate(read.blocks) if index not in wanted])
        useless = self._tier.commit(run)
        self._meter.add(metrics.FETCHED, len(wanted) - len(useless))
        self._on_fetched(run, fetch.request, useless)
        self._helper.tell(Directory.on_read, self._objects.paths(read.names[:num_brought]))

    def _on_bad(self, name: OffloadKey, *, is_damaged: bool) -> None:
        """An object has other bytes than it should, or could not be read: that may pass."""
        self._meter.add(metrics.SECOND_TIER_FAILED, 1, "read")
        self._failed[name] = self.clock()
        if len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)
        if is_damaged:
            self._helper.tell(Directory.remove, self._objects.paths([name]))

    # Hanging

    def _check_hung(self) -> None:
        """Switch the tier off if it has not answered for long. Its reads keep their blocks."""
        now = self._stepped()
        jobs = [*(read.began for read in self._reading.values()), *self.writes.beginnings]
        # A slow tier has a queue, and ends something now and then.
        since = max(min(jobs, default=now), self._last_ended)
        if self._helper.waiting_since is not None:
            since = min(since, self._helper.waiting_since)
        if now - since >= _HUNG_SECONDS:
            self._switch_off(f"has not answered for {_HUNG_SECONDS:.0f} s")
            return
        # Where others end and one read does not, no later request waits for its objects.
        for read in takewhile(self._is_hung, self._reading.values()):
            for key, name in zip(read.keys, read.names, strict=True):
                self._coming.pop(key, None)
                self._failed[name] = self.clock()

    def _is_hung(self, read: _Read) -> bool:
        return self._stepped() - read.began >= _HUNG_SECONDS

    def _switch_off(self, reason: str) -> None:
        """For a while. Reads and writes under way go on."""
        self._close(self._stepped())
        logger.error(
            "The second tier %s and is switched off. The server goes on without it, and tries it "
            "again in %.0f s",
            reason,
            _RETRY_SECONDS,
        )

    def _come_back(self) -> None:
        """Switch the tier on again after some time, once nothing of before is under way."""
        if self._off_since is None or self._stepped() - self._off_since < _RETRY_SECONDS:
            return
        under_way = (self._fetches, self._reading, self.writes.beginnings)
        if any(under_way) or self._helper.waiting_since is not None:
            return
        self._objects.error = None
        if self._helper.error is not None:
            self._helper.restart()
        self._off_since = None
        logger.info("The second tier is switched on again")

    def _close(self, since: float) -> None:
        self._off_since = since
        self.writes.forget()
        for request_id in [*self._waits]:
            self._end_wait(request_id, "late")
