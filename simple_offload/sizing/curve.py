"""MissRatioCurve: what an LRU cache of any size would have found, from a sample of blocks."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from math import inf, isnan, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALL = 2**64
"""Threshold of a sample that has every block."""
_BATCH_BLOCKS = 4096
"""Blocks of prompts and answers that wait to be looked at. numpy takes about as long for hundreds
as for one."""
_DROPPED_SHARE = 1 / 8
"""Of a sample that is too large. Less would be dropped more often: each time all are looked at."""
_NUM_SLICES = 4
"""Parts of the window, which are forgotten one by one."""
_EXACT_BITS = 8
"""Distances below 2 to the power of this have a bucket each. A bucket of longer ones is as wide as
2 ** (1 - _EXACT_BITS) of their least."""


def _largest_distances() -> NDArray[np.float64]:
    """By bucket."""
    exact = np.arange(2**_EXACT_BITS, dtype=np.float64)
    half = exact[2 ** (_EXACT_BITS - 1) :] + 1
    return np.concatenate([exact, *(half * 2.0**power - 1 for power in range(1, 48))])


_LARGEST = _largest_distances()


@dataclass(eq=False)
class _Slice:
    """A part of the window."""

    began: float
    num_tokens: int = 0
    """Of all prompts."""
    num_blocks: int = 0
    """Of all prompts, those that can be found."""
    num_found_tokens: int = 0
    """By the real caches."""
    num_duplicates: float = 0.0
    """Of the real caches, summed over the prompts."""
    num_told: int = 0
    """Prompts of which ``on_found`` has told."""
    num_unseen: float = 0.0
    """Estimate of those that were not used before."""
    found: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, len(_LARGEST))))
    """By bucket, an estimate of those with such a distance; and the same with each block counted as
    often as it has been asked for."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that was shown to a curve."""

    num_blocks: int
    sampled: list[int] = field(default_factory=list)
    """Filled when the curve looks at it."""


_Waiting = tuple[Prompt, bool, int, int]
"""A prompt, or the end of its request with the blocks behind it, that the curve has not looked at:
the prompt; whether it is the end; and the places in the hashes that wait at which its blocks end,
and those that may be found."""


class _Found(NamedTuple):
    """Sampled blocks that prompts ask for, and that were used before."""

    num_after: list[int]
    """How many others were used since."""
    num_asked: list[int]
    """How often prompts have asked for it."""


class MissRatioCurve:
    """Follows the blocks whose hash is below a threshold, as in SHARDS (Waldspurger et al.,
    "Efficient MRC construction with SHARDS", FAST 2015). A block's distance is the number of
    distinct blocks used since it was last used, and itself. An LRU cache finds it if it has room
    for so many.

    A prefix leaves such a cache tail first, because parents are used after their children. So a
    cache with a block has its predecessors too, and each block counts alone.

    The error of sampling is 0.1 to 1.6 points where the cache has 700 blocks of the sample or more
    (standard deviation; Claude Code sessions and Mooncake's chat, eight samples of each).

    The threshold falls when the sample grows too large. If the sample reaches as far as ``cover``
    says, the least recently used blocks leave instead.
    """

    def __init__(
        self,
        max_samples: int = 8192,
        window: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_samples``: blocks of the sample. ``window``: seconds after which prompts are
        forgotten."""
        self._max_samples = max_samples
        self._slice_seconds = window / _NUM_SLICES
        self._clock = clock
        self._max_blocks = inf
        self._threshold = _ALL
        self._used_at: dict[int, int] = {}
        """By sampled block, a number that grows with each use. The least recently used is first."""
        self._times: list[int] = []
        """The values of ``_used_at``."""
        self._num_asked: list[int] = []
        """In the same order, how often prompts have asked for the block."""
        self._now = 0
        self._num_references = 0
        self._slices: deque[_Slice] = deque()
        """Oldest first."""
        self._block_tokens = 1
        self._waiting: list[_Waiting] = []
        self._hashes: list[bytes] = []
        """Of all blocks that wait."""

    # What happens

    def cover(self, num_blocks: float) -> None:
        """No larger cache than of ``num_blocks`` blocks will be asked for. The sample then needs
        no more room, and takes less work."""
        self._enter()
        self._max_blocks = max(1.0, num_blocks)
        # The sample stays full after it has dropped blocks.
        num_samples = (1 - 2 * _DROPPED_SHARE) * self._max_samples
        self._lower_threshold(int(_ALL * min(1.0, num_samples / self._max_blocks)))

    def on_prompt(self, hashes: Sequence[bytes], block_tokens: int, num_tokens: int) -> Prompt:
        """A request asks for its prompt of ``num_tokens`` tokens. ``hashes`` are those of its full
        blocks of ``block_tokens`` each, parents first: 16 or 32 bytes, each once. A prompt's
        last token is computed in any case, so a block that it fills is not found."""
        now = self._clock()
        if not self._slices or now >= self._slices[-1].began + self._slice_seconds:
            self._enter()
            self._forget()
            self._slices.append(_Slice(now))
        num_asked = min(len(hashes), (num_tokens - 1) // block_tokens)
        self._slices[-1].num_tokens += num_tokens
        self._slices[-1].num_blocks += num_asked
        self._block_tokens = block_tokens
        prompt = Prompt(len(hashes))
        self._wait(prompt, False, hashes, num_asked)
        return prompt

    def on_found(self, num_tokens: int, num_duplicates: int = 0) -> None:
        """The real caches have found ``num_tokens`` tokens of the last prompt. They have
        ``num_duplicates`` blocks of contents that they also have elsewhere."""
        if not self._slices:  # the prompt is forgotten
            return
        last = self._slices[-1]
        last.num_found_tokens += num_tokens
        last.num_duplicates += num_duplicates
        last.num_told += 1

    def on_used(self, hashes: Sequence[bytes], prompt: Prompt | None = None) -> None:
        """A request ends. ``hashes`` are those of its full blocks, prompt and answer, parents
        first. They become the most recently used. With ``prompt``, what ``on_prompt`` has
        returned, they are those behind it."""
        self._wait(prompt or Prompt(0), True, hashes, 0)

    # What would have been found

    def hit_ratio(self, num_blocks: float) -> float:
        """Share of the prompts' tokens in the window that an LRU cache of ``num_blocks`` blocks
        would have found; nan without prompts."""
        return self.hit_ratios([num_blocks])[0]

    def hit_ratios(self, sizes: Iterable[float]) -> list[float]:
        """``hit_ratio`` of each size."""
        wanted = [max(0.0, each) for each in sizes]
        ratios: list[float] = np.interp(wanted, _LARGEST, self._ratios()).tolist()
        return ratios

    def size_of(self, hit_ratio: float) -> float:
        """Blocks of the least LRU cache that would have found this share; inf if none would, nan
        without prompts."""
        ratios = self._ratios()
        bucket = int(np.searchsorted(ratios, hit_ratio))
        if isnan(ratios[0]):
            return nan
        if bucket in (0, len(ratios)):
            return inf if bucket else 0.0
        near = slice(bucket - 1, bucket + 1)
        return float(np.interp(hit_ratio, ratios[near], _LARGEST[near]))

    # What the real caches have found

    @property
    def found_ratio(self) -> float:
        """Share of the prompts' tokens in the window that the real caches have found; nan if
        nothing was told of them."""
        self._forget()
        if not any(each.num_told for each in self._slices):
            return nan
        num_found = sum(each.num_found_tokens for each in self._slices)
        return num_found / sum(each.num_tokens for each in self._slices)

    @property
    def num_duplicates(self) -> float:
        """Blocks of contents that the real caches had twice, mean of the window's prompts."""
        self._forget()
        num_told = sum(each.num_told for each in self._slices)
        return sum(each.num_duplicates for each in self._slices) / max(1, num_told)

    # The sample

    @property
    def num_samples(self) -> int:
        """Blocks of the sample."""
        self._enter()
        return len(self._used_at)

    @property
    def rate(self) -> float:
        """Share of all blocks that belong to the sample."""
        self._enter()
        return self._threshold / _ALL

    @property
    def num_sampled_references(self) -> int:
        """How often sampled blocks were used, since the start: the work of this class. Other blocks
        take next to none."""
        self._enter()
        return self._num_references

    # Details

    def _forget(self) -> None:
        oldest = self._clock() - (_NUM_SLICES + 1) * self._slice_seconds
        while self._slices and self._slices[0].began <= oldest:
            self._slices.popleft()

    def _ratios(self) -> NDArray[np.float64]:
        """By bucket, the hit ratio of a cache of its largest distance."""
        self._enter()
        self._forget()
        num_tokens = sum(each.num_tokens for each in self._slices)
        if not num_tokens:
            return np.full(len(_LARGEST), nan)
        found, weighted = np.sum([each.found for each in self._slices], axis=0)
        num_unseen = sum(each.num_unseen for each in self._slices)
        estimate, uses = found.sum() + num_unseen, weighted.sum() + num_unseen
        missing = sum(each.num_blocks for each in self._slices) - estimate
        # Prompts tell how many blocks they ask for. If the sample has far too few of these, it has
        # none of the few blocks that all prompts have (SHARDS-adj). What chance explains is more
        # likely of blocks that are asked for more often.
        variance = (2 * uses - estimate) * (1 / self.rate - 1)
        hot = max(0.0, missing - variance / missing) if missing > 0 else 0.0
        found += (missing - hot) * weighted / max(1.0, uses)
        found[1] += hot
        return np.clip(np.cumsum(found) * (self._block_tokens / num_tokens), 0.0, 1.0)

    def _wait(self, prompt: Prompt, is_end: bool, hashes: Sequence[bytes], num_asked: int) -> None:
        if not (hashes or prompt.num_blocks):
            return
        first = len(self._hashes)
        self._hashes += hashes
        self._waiting.append((prompt, is_end, len(self._hashes), first + num_asked))
        if len(self._hashes) >= _BATCH_BLOCKS:
            self._enter()

    def _enter(self) -> None:
        """Use the blocks that wait. The prompts among them belong to the last slice."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        hashes, self._hashes = self._hashes, []
        found = _Found([], [])
        num_unseen = 0
        keys = np.frombuffer(b"".join(hashes), np.uint64)
        # The first 8 of 16 or 32 bytes. No block: all have ended without an answer.
        keys = keys[:: max(1, len(keys) // max(1, len(hashes)))]
        places = np.flatnonzero(keys <= np.uint64(self._threshold - 1))
        sampled = keys[places].tolist()
        prompts, are_ends, *ends = zip(*waiting, strict=True)
        stops = np.searchsorted(places, ends).tolist()
        start = 0
        for prompt, is_end, stop, asked in zip(prompts, are_ends, *stops, strict=True):
            new, num_found = sampled[start:stop], len(found.num_after)
            num_asked, start = asked - start, stop
            if not is_end:
                prompt.sampled = new
            elif prompt.sampled:
                # The threshold may have fallen.
                new = [key for key in prompt.sampled if key < self._threshold] + new
            if new:
                self._use(new[::-1], num_asked, found)
                num_unseen += num_asked - (len(found.num_after) - num_found)
                self._num_references += len(new)
        if self._slices:
            weight = _ALL / self._threshold
            self._slices[-1].num_unseen += num_unseen * weight
            buckets = np.searchsorted(_LARGEST, 1 + np.array(found.num_after) * weight)
            np.add.at(self._slices[-1].found[0], buckets, weight)
            np.add.at(self._slices[-1].found[1], buckets, weight * np.array(found.num_asked))
        while len(self._used_at) > self._max_samples:
            self._shrink()

    def _use(self, keys: list[int], num_asked: int, found: _Found) -> None:
        """Make sampled blocks the most recently used, one after the other. A prompt asks for the
        last ``num_asked`` ones: add those that were used before to ``found``."""
        used_at, times, counts = self._used_at, self._times, self._num_asked
        ats = [used_at.pop(key, -1) for key in keys]
        num_times, num_others = len(times), len(keys) - num_asked
        new_counts: list[int] = []
        runs: list[tuple[int, int]] = []
        first = 0
        while first < len(ats):
            is_asked = first >= num_others
            most = (len(ats) if is_asked else num_others) - first
            if ats[first] < 0:
                unseen = ats[first : first + most]
                length = next((i for i, at in enumerate(unseen) if at >= 0), most)
                new_counts += [int(is_asked)] * length
            else:
                # Mostly the blocks of a prefix were last used together.
                place = bisect_left(times, ats[first])
                length = _num_equal(times, place, ats, first, most)
                runs.append((place, length))
                of_run = counts[place : place + length]
                if is_asked:
                    of_run = [count + 1 for count in of_run]
                    found.num_asked.extend(of_run)
                    after = num_times - 1 - place
                    found.num_after.extend(range(after, after - length, -1))
                new_counts += of_run
            first += length
        for place, length in sorted(runs, reverse=True):
            del times[place : place + length], counts[place : place + length]
        new_times = range(self._now, self._now + len(keys))
        self._now += len(keys)
        used_at.update(zip(keys, new_times, strict=True))
        times += new_times
        counts += new_counts

    def _shrink(self) -> None:
        """Drop a part of the sample."""
        num_dropped = max(1, int(_DROPPED_SHARE * self._max_samples))
        reach = (len(self._used_at) - num_dropped) * _ALL / self._threshold
        if reach < self._max_blocks:
            self._lower_threshold(int(self._threshold * (1 - _DROPPED_SHARE)))
        else:
            self._used_at = dict(islice(self._used_at.items(), num_dropped, None))
            del self._times[:num_dropped], self._num_asked[:num_dropped]

    def _lower_threshold(self, threshold: int) -> None:
        if threshold >= self._threshold:
            return
        self._threshold = max(1, threshold)
        kept = [key < self._threshold for key in self._used_at]
        self._used_at = dict(compress(self._used_at.items(), kept))
        self._times = list(self._used_at.values())
        self._num_asked = list(compress(self._num_asked, kept))


def _num_equal(one: list[int], place: int, other: list[int], first: int, most: int) -> int:
    """How many elements from ``place`` and ``first`` on are the same, at least one, up to
    ``most``. The lists are compared in large pieces."""
    num_equal, step = 1, most
    while step and num_equal < most:
        step = min(step, most - num_equal)
        start, end = num_equal, num_equal + step
        if one[place + start : place + end] == other[first + start : first + end]:
            num_equal = end
        else:
            step //= 2
    return num_equal
