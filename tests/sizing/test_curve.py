"""MissRatioCurve: beside an LRU cache that is played block by block."""

import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from random import Random

import pytest

from simple_offload.sizing.curve import MissRatioCurve, Prompt

TOKENS = 16
"""Of a block."""


def chain(name: object, count: int) -> list[bytes]:
    """Hashes of a prefix's blocks; those of a longer prefix of the same name begin alike."""
    return list(accumulate(range(count), lambda parent, i: sha256(parent + b"%d" % i).digest(),
                           initial=sha256(repr(name).encode()).digest()))[:count]  # fmt: skip


class Lru:
    """A cache that loses the least recently used block first, a prefix's tail before its head."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    def find(self, hashes: Sequence[bytes]) -> int:
        """The length of the prefix that it has."""
        there = [each in self._cache for each in hashes]
        return [*there, False].index(False)

    def use(self, hashes: Sequence[bytes]) -> None:
        for each in reversed(hashes):
            self._cache[each] = None
            self._cache.move_to_end(each)
        while len(self._cache) > self._num_blocks:
            self._cache.popitem(last=False)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Play:
    """Shows the same prompts to a curve and to LRU caches."""

    def __init__(self, curve: MissRatioCurve, sizes: Sequence[int]) -> None:
        self.curve = curve
        self.caches = {size: Lru(size) for size in sizes}
        self._found = dict.fromkeys(sizes, 0)
        self._num_tokens = 0

    def prompt(self, hashes: Sequence[bytes], num_rest: int = 1) -> Prompt:
        """``num_rest``: tokens behind the full blocks."""
        num_tokens = len(hashes) * TOKENS + num_rest
        self._num_tokens += num_tokens
        for size, cache in self.caches.items():
            self._found[size] += cache.find(hashes) * TOKENS
            cache.use(hashes)
        return self.curve.on_prompt(hashes, TOKENS, num_tokens)

    def end(self, hashes: Sequence[bytes], prompt: Prompt) -> None:
        for cache in self.caches.values():
            cache.use(hashes)
        self.curve.on_used(hashes[prompt.num_blocks :], prompt)

    def errors(self) -> dict[int, float]:
        """By size, the curve's hit ratio less the cache's."""
        return {
            size: self.curve.hit_ratio(size) - found / self._num_tokens
            for size, found in self._found.items()
        }


def play_conversations(play: Play, num_requests: int, *, running: int, seed: int = 0) -> None:
    """Users of different zeal go on with their conversations, or begin others, up to ``running``
    at a time. All have the same system prompt."""
    random = Random(seed)
    users = [f"user {number}" for number in range(40)]
    zeal = [1 / (1 + number) for number in range(len(users))]
    lengths = dict.fromkeys(users, 3)
    system = chain("system", 3)
    running_now: list[tuple[list[bytes], Prompt]] = []
    for _ in range(num_requests):
        [user] = random.choices(users, zeal)
        if random.random() < 0.1:
            users[users.index(user)] = user = f"{user}'"
            lengths[user] = 3
        lengths[user] += random.randint(1, 4)
        hashes = system + chain(user, lengths[user])
        prompt = play.prompt(hashes, num_rest=random.randint(1, TOKENS))
        lengths[user] += random.randint(0, 2)
        running_now.append((system + chain(user, lengths[user]), prompt))
        while len(running_now) > random.randint(0, running):
            play.end(*running_now.pop(random.randrange(len(running_now))))


@pytest.mark.parametrize("running", [0, 4])
@pytest.mark.parametrize(
    ("num_requests", "sizes", "error"),
    [
        (500, [0, 1, 3, 10, 40, 100, 200, 255], 1e-9),
        (1000, [300, 500, 1000, 5000], 0.002),  # buckets are as wide as 1/128 of their distances
    ],
    ids=["small", "large"],
)
def test_exact_if_nothing_is_dropped_from_the_sample(
    running: int, num_requests: int, sizes: list[int], error: float
) -> None:
    play = Play(MissRatioCurve(), sizes)
    play_conversations(play, num_requests, running=running)
    assert play.curve.rate == 1.0
    assert play.curve.hit_ratio(sizes[-1]) > 0.1
    assert play.errors() == pytest.approx(dict.fromkeys(sizes, 0.0), abs=error)


def zipf_errors(curve: MissRatioCurve) -> dict[int, float]:
    """Prefixes of 1 to 200 blocks are asked for, some much more often than others."""
    random = Random(0)
    play = Play(curve, [1000, 3000, 10_000, 30_000])
    chains = [chain(number, random.randint(1, 200)) for number in range(500)]
    weights = [1 / (1 + number) ** 0.8 for number in range(len(chains))]
    for hashes in random.choices(chains, weights, k=1500):
        play.end(hashes, play.prompt(hashes))
    return play.errors()


def test_sampling_error() -> None:
    """Of some 40,000 blocks, the sample has a tenth: 100 blocks where the smallest cache has
    1,000."""
    curve = MissRatioCurve(max_samples=4096)
    errors = zipf_errors(curve)
    assert 0.08 < curve.rate < 0.12
    assert all(abs(error) < 0.02 for error in errors.values()), errors


def test_a_sample_that_covers_less() -> None:
    """Caches above 12,000 blocks are not asked for. So as many samples are a larger share."""
    curve = MissRatioCurve(max_samples=4096)
    curve.cover(12_000)
    rate = curve.rate
    errors = zipf_errors(curve)
    assert curve.rate == rate > 0.2
    assert all(abs(errors[size]) < 0.015 for size in (1000, 3000, 10_000)), errors


@pytest.mark.parametrize("has_hot_block", [False, True])
def test_a_block_that_every_prompt_has(has_hot_block: bool) -> None:
    """Whether the sample has it or not, it counts as often as prompts ask for it. The other blocks
    come twice, 500 prompts later."""
    curve = MissRatioCurve(max_samples=2048)
    curve.cover(6000)
    wanted = (0.0, 0.05) if has_hot_block else (0.5, 1.0)
    number = next(n for n in range(1000) if wanted[0] < _leading(chain(n, 1)) < wanted[1])
    for prompt in (*range(500), *range(500)):
        curve.on_prompt([*chain(number, 1), *chain(f"{prompt}", 10)[1:]], TOKENS, 10 * TOKENS + 1)
    assert 0.05 < curve.rate < 0.5
    assert curve.hit_ratio(100) == pytest.approx(0.1, abs=0.02)
    assert curve.hit_ratio(6000) == pytest.approx(0.55, abs=0.02)


def _leading(hashes: Sequence[bytes]) -> float:
    return int.from_bytes(hashes[0][:8], sys.byteorder) / 2**64


def test_a_larger_cover_lowers_the_rate() -> None:
    curve = MissRatioCurve(max_samples=1000)
    curve.cover(100)
    assert curve.rate == 1.0
    curve.on_prompt(chain("a", 1000), TOKENS, 1000 * TOKENS + 1)
    assert curve.num_samples == 1000
    curve.cover(10_000)
    assert curve.rate < 0.1
    assert curve.num_samples == pytest.approx(1000 * curve.rate, rel=0.3)
    # Those that stay are found where they were.
    curve.on_prompt(chain("a", 1000), TOKENS, 1000 * TOKENS + 1)
    assert curve.hit_ratio(1000) == pytest.approx(0.5, abs=1e-3)
    assert curve.hit_ratio(800) < 0.45


def test_no_number_before_the_first_prompt() -> None:
    curve = MissRatioCurve()
    curve.on_used(chain("a", 3))
    assert math.isnan(curve.hit_ratio(10))
    assert math.isnan(curve.size_of(0.5))
    assert math.isnan(curve.found_ratio)
    curve.on_prompt([], TOKENS, 5)
    assert curve.hit_ratio(10) == 0.0
    assert math.isnan(curve.found_ratio)


def test_prompts_are_forgotten_after_the_window() -> None:
    """But not what they used."""
    clock = Clock()
    curve = MissRatioCurve(window=100.0, clock=clock)
    asked = chain("a", 8)
    for _ in range(2):
        curve.on_prompt(asked, TOKENS, 8 * TOKENS + 1)
        curve.on_found(8 * TOKENS, 5)
    clock.now = 99.0
    assert curve.hit_ratio(8) == pytest.approx(0.5, abs=0.01)
    clock.now = 130.0
    assert math.isnan(curve.hit_ratio(8))
    assert math.isnan(curve.found_ratio)
    assert curve.num_duplicates == 0.0
    curve.on_prompt(asked, TOKENS, 8 * TOKENS + 1)
    assert curve.hit_ratio(8) == pytest.approx(1.0, abs=0.01)


def test_size_of_a_hit_ratio() -> None:
    curve = MissRatioCurve()
    for number in (*range(10), *range(10)):
        curve.on_prompt(chain(number, 10), TOKENS, 10 * TOKENS + 1)
    assert curve.size_of(0.0) == 0.0
    # All ten prompts come between a block's uses.
    assert 90 < curve.size_of(0.01) <= curve.size_of(0.49) <= 100
    assert curve.size_of(0.6) == math.inf
    size = curve.size_of(0.3)
    assert curve.hit_ratio(size) == pytest.approx(0.3)


def test_what_the_real_caches_found() -> None:
    curve = MissRatioCurve()
    curve.on_prompt(chain("a", 4), TOKENS, 100)
    curve.on_found(0, 10)
    curve.on_prompt(chain("a", 4), TOKENS, 100)
    curve.on_found(50, 30)
    assert curve.found_ratio == 0.25
    assert curve.num_duplicates == 20.0


def test_short_and_long_hashes() -> None:
    """vLLM's hash functions give 16 or 32 bytes. Leading bytes decide."""
    curves = [MissRatioCurve(max_samples=500) for _ in range(2)]
    for number in [*range(60), *range(60)]:
        hashes = chain(number, 30)
        for curve, size in zip(curves, (16, 32), strict=True):
            curve.on_prompt([each[:size] for each in hashes], TOKENS, 30 * TOKENS + 1)
    short, long = (curve.hit_ratios([100, 1000, 1900]) for curve in curves)
    assert short == long
    assert curves[0].num_samples == curves[1].num_samples <= 500


def test_memory_and_work_are_bounded() -> None:
    """100,000 requests of new prompts, 400,000 blocks."""
    clock = Clock()
    curve = MissRatioCurve(max_samples=1024, clock=clock)
    largest = 0
    for number in range(100_000):
        clock.now += number // 50_000  # the second half takes many windows
        hashes = [sha256(b"%d %d" % (number, place)).digest() for place in range(4)]
        curve.on_prompt(hashes, TOKENS, 4 * TOKENS + 1)
        curve.on_used(hashes)
        if number % 5000 == 0:
            largest = max(largest, len(pickle.dumps(curve)))
            assert curve.num_samples <= 1024
    assert largest < 2**20
    # Of 800,000: about max_samples whenever the number of blocks has grown by a factor of e.
    assert curve.num_sampled_references < 20_000
    assert curve.hit_ratio(math.inf) == 0.0


def test_work_of_a_long_prompt_is_bounded() -> None:
    curve = MissRatioCurve(max_samples=1024)
    curve.cover(100_000)
    hashes = chain("long", 8000)
    curve.on_prompt(hashes, TOKENS, 8000 * TOKENS)
    curve.on_used(hashes)
    assert 0 < curve.num_sampled_references < 2 * 2 * 8000 * 1024 / 100_000
