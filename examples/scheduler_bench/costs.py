"""Time in the hooks: of a step by running requests, of a request by its length and the tier."""

import gc
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

from examples.bench.race import Race
from examples.scheduler_bench.contenders import Contender, When
from examples.scheduler_bench.engine import MAX_MODEL_LEN, Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, Mix, Plan
from examples.scheduler_bench.results import POOL, Kind, Results, Row
from examples.scheduler_bench.stopwatch import Cost, Hook

_CYCLE = 3
"""Prompts of the serving mix for each running request: before a prompt comes again, the device has
evicted it for others."""
_LEAST_CYCLE = 8
_FRESH_TOKENS = 64
"""Tokens of a prompt of the serving mix after those in the tier."""


class Rig(Protocol):
    """An engine with work to measure."""

    num_missed: int
    """Tokens that should have been loaded and were not, in all measurements."""

    def measure(self) -> dict[Kind, Cost]:
        """Do the work once."""


def run_costs(race: Race[Contender], results: Results, begin: Callable[[str], None]) -> None:
    """Add rows to ``results``."""
    cost = results.plan.cost
    mixes = {Kind.SERVING: cost.serving, Kind.CONVERSATIONS: cost.conversations}

    def measure(
        step: str,
        size: int,
        make: Callable[[Contender], Rig],
        whens: Collection[When] = tuple(When),
    ) -> None:
        begin(step)
        _measure(race, results, step, size, make, whens)

    for running in cost.running:
        make_decode = partial(_Decode, plan=results.plan, running=running)
        measure(f"decode, {running} running", running, make_decode)
    for kind, mix in mixes.items():
        for running in cost.running:
            make_mix = partial(Serving, kind=kind, mix=mix, plan=results.plan, running=running)
            measure(f"{kind.value}, {running} running", running, make_mix)
    # These prompts are not evicted.
    for length in cost.lengths:
        make_prompt = partial(_Prompts, plan=results.plan, length=length, full_tier=None)
        measure(
            f"one prompt of {length} tokens", length, make_prompt, {When.AT_ONCE, When.WITH_ROOM}
        )
        pool = _Pool(length, cost.repeats)
        with quiet_heap():
            by_kind = min(
                (pool.measure() for _ in range(cost.repeats)),
                key=lambda each: sum(one.seconds for one in each.values()),
            )
        for row in results.rows:
            if row.size == length and row.kind in by_kind:
                row.cells[POOL] = by_kind[row.kind]
    for blocks in cost.tiers:
        make_prompt = partial(
            _Prompts, plan=results.plan, length=cost.tier_tokens, full_tier=blocks
        )
        measure(f"a full tier of {blocks} blocks", blocks, make_prompt, {When.AT_ONCE})


def _measure(
    race: Race[Contender],
    results: Results,
    step: str,
    size: int,
    make: Callable[[Contender], Rig],
    whens: Collection[When],
) -> None:
    def takes_part(contender: Contender) -> bool:
        return contender.takes_times and contender.stores in whens

    rigs = race.run(step, make, takes_part)
    cells: dict[Kind, dict[str, Cost]] = {}
    with quiet_heap():
        for _ in range(results.plan.cost.repeats):
            costs = race.run(step, lambda each: rigs[each.name].measure(), takes_part)
            for name, by_kind in costs.items():
                for kind, cost in by_kind.items():
                    of_kind = cells.setdefault(kind, {})
                    # Other work on the machine only adds time, so the least counts.
                    of_kind[name] = min(cost, of_kind.get(name, cost), key=lambda c: c.seconds)
    results.rows += [Row(kind, size, of_kind) for kind, of_kind in cells.items()]
    for name, rig in rigs.items():
        if rig.num_missed:
            results.problems[f"{name}, {step}"] = f"{rig.num_missed} tokens were not loaded"


class _Decode:
    """Requests that decode, and nothing else."""

    num_missed = 0

    def __init__(self, contender: Contender, plan: Plan, running: int) -> None:
        cost = plan.cost
        answer = (cost.repeats + 1) * cost.steps + running
        longest = cost.context_tokens + BLOCK_SIZE + answer
        blocks = running * (longest // BLOCK_SIZE + 1) + 16
        self.engine = Engine(contender, Shape(blocks, blocks, running, plan.delay))
        self._steps = cost.steps
        random = Random(plan.seed)
        for index in range(running):
            # Not all fill their blocks in the same step.
            length = cost.context_tokens + index % BLOCK_SIZE
            self.engine.add(f"{index}", _tokens(random, length), _tokens(random, answer))
        while not self.engine.all_decode:
            self.engine.step()
        self.measure()

    def measure(self) -> dict[Kind, Cost]:
        """Of a step."""
        self.engine.stopwatch.drain()
        for _ in range(self._steps):
            self.engine.step()
        return {Kind.DECODE: self.engine.stopwatch.drain().over(self._steps)}


class Serving:
    """Requests that load their prompt, decode for a while and end; another follows each."""

    num_missed = 0

    def __init__(
        self, contender: Contender, kind: Kind, mix: Mix, plan: Plan, running: int
    ) -> None:
        self._kind = kind
        self._answer_tokens = mix.answer_tokens
        self._steps = max(plan.cost.steps, 2 * mix.answer_tokens)
        self._random = Random(plan.seed)
        self._running = running
        num_prompts = max(_CYCLE * running, _LEAST_CYCLE)
        self._prompts = [_tokens(self._random, mix.prompt_tokens) for _ in range(num_prompts)]
        longest = mix.prompt_tokens + _FRESH_TOKENS + 2 * mix.answer_tokens
        device_blocks = running * (longest // BLOCK_SIZE + 2) * 5 // 4 + 16
        host_blocks = 2 * num_prompts * (longest // BLOCK_SIZE + 1)
        self.engine = Engine(contender, Shape(device_blocks, host_blocks, running, plan.delay))
        self._ids = count()
        for _ in range(num_prompts):
            self._add()
        self.engine.drain()
        while next(self._ids) % num_prompts != num_prompts - 1:
            pass  # begin with the first prompt again
        self._fill()
        self.measure()

    def measure(self) -> dict[Kind, Cost]:
        """Of a step."""
        self.engine.stopwatch.drain()
        for _ in range(self._steps):
            self.engine.step()
            self._fill()
        return {self._kind: self.engine.stopwatch.drain().over(self._steps)}

    def _fill(self) -> None:
        while self.engine.num_unfinished < self._running:
            self._add()

    def _add(self) -> None:
        index = next(self._ids)
        prompt = self._prompts[index % len(self._prompts)] + _tokens(self._random, _FRESH_TOKENS)
        length = self._random.randint(self._answer_tokens // 2, self._answer_tokens * 3 // 2)
        self.engine.add(f"{index}", prompt, _tokens(self._random, length))


class _Prompts:
    """One prompt after another, alone: stored cold, and then, after a reset of the device's cache,
    loaded."""

    def __init__(
        self, contender: Contender, plan: Plan, length: int, full_tier: int | None
    ) -> None:
        own_blocks = length // BLOCK_SIZE + 2
        room = full_tier or own_blocks * (plan.cost.repeats + 2)
        most = MAX_MODEL_LEN // BLOCK_SIZE if full_tier else own_blocks
        self.engine = Engine(contender, Shape(most + 16, room, delay=plan.delay))
        self._random = Random(plan.seed)
        self._length = length
        self._ids = count()
        self._kinds = (Kind.STORED, Kind.LOADED)
        self.num_missed = 0
        if full_tier is not None:
            self._kinds = (Kind.STORED_FULL, Kind.LOADED_FULL)
            fill_tier(self.engine, full_tier, self._random)
        self.measure()
        self.num_missed = 0

    def measure(self) -> dict[Kind, Cost]:
        """Of one prompt, stored and loaded."""
        prompt = _tokens(self._random, self._length)
        index = next(self._ids)
        self.engine.stopwatch.drain()
        self.engine.add(f"{index} cold", prompt, [1])
        self.engine.drain()
        stored = self.engine.stopwatch.drain()
        self._empty_device()
        self.engine.add(f"{index} again", prompt, [1])
        self.engine.drain()
        loaded = self.engine.stopwatch.drain()
        self._empty_device()
        wanted = (self._length - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.num_missed += wanted - self.engine.hits[f"{index} again"].host
        return dict(zip(self._kinds, (stored, loaded), strict=True))

    def _empty_device(self) -> None:
        """A connector learns of it in the next step, which is not part of any prompt."""
        self.engine.reset_device()
        self.engine.add(f"{next(self._ids)} short", [0], [1])
        self.engine.drain()
        self.engine.stopwatch.drain()


class _Pool:
    """A prompt as in ``_Prompts``, by the methods of vLLM's pool alone that look up, hold, fill and
    free its blocks: no hook, copy or order of its own."""

    def __init__(self, length: int, repeats: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self._num_blocks = length // BLOCK_SIZE
        room = (repeats + 1) * self._num_blocks + 1  # so that none is evicted
        self._device, self._host = (
            BlockPool(room, enable_caching=True, hash_block_size=BLOCK_SIZE) for _ in range(2)
        )
        self.measure()

    def measure(self) -> dict[Kind, Cost]:
        """Of one prompt, stored and loaded."""
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        device, host, num_blocks = self._device, self._host, self._num_blocks
        hashes = [BlockHash(os.urandom(32)) for _ in range(num_blocks)]
        keys = [make_block_hash_with_group_id(each, 0) for each in hashes]
        sources = device.get_new_blocks(num_blocks)
        start = time.thread_time()
        absent = [each for each in hashes if host.get_cached_block(each, [0]) is None]
        device.touch(sources)
        blocks = host.get_new_blocks(len(absent))
        for block, key in zip(blocks, keys, strict=True):
            host._insert_block_hash(key, block, num_tokens=BLOCK_SIZE)
        host.free_blocks(reversed(blocks))
        device.free_blocks(reversed(sources))
        stored = time.thread_time()
        found = [block for each in hashes for block in host.get_cached_block(each, [0]) or ()]
        host.touch(found)
        host.free_blocks(reversed(found))
        loaded = time.thread_time()
        device.free_blocks(reversed(sources))
        return {
            Kind.STORED: Cost({Hook.OTHER: stored - start}),
            Kind.LOADED: Cost({Hook.OTHER: loaded - stored}),
        }


def fill_tier(engine: Engine, num_blocks: int, random: Random) -> None:
    """Store ``num_blocks`` blocks of prompts that do not come again."""
    longest = MAX_MODEL_LEN - BLOCK_SIZE
    left = num_blocks
    for index in count():
        if left <= 0:
            return
        prompt = _tokens(random, min(longest, left * BLOCK_SIZE))
        engine.add(f"filler {index}", prompt, [1])
        engine.drain()
        left -= len(prompt) // BLOCK_SIZE


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Stop the garbage collector: chance decides which contender it meets. (vLLM's engine core
    freezes all objects of its start, the tier included.)"""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _tokens(random: Random, count: int) -> list[int]:
    return random.choices(range(1000), k=count)
