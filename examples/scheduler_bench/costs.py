"""Time in the hooks: of a step by running requests, of a request by its length."""

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from examples.bench.connectors import Contender
from examples.bench.race import Race
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CONTENDERS_OF, CostPlan, Mix
from examples.scheduler_bench.results import POOL, Results, Row

_CYCLE = 3
"""Prompts of the serving mix for each running request: before a prompt comes again, the device has
evicted it for others."""
_LEAST_CYCLE = 8
_FRESH_TOKENS = 64
"""Tokens of a prompt of the serving mix after those in the tier."""


class Rig(Protocol):
    """An engine with work to measure."""

    num_missed: int = 0
    """Tokens that should have been loaded and were not, in all measurements."""

    def measure(self) -> dict[str, float]:
        """Do the work once. Returns seconds."""


def run_costs(race: Race[Contender], results: Results) -> None:
    """Add rows to ``results``."""
    plan = results.plan.cost

    def measure(
        step: str, size: int, make: Callable[[Contender], Rig], pool: Rig | None = None
    ) -> None:
        names = CONTENDERS_OF["cost"]
        rigs = race.run(step, make, names)
        cells: dict[str, dict[str, float]] = {}
        # Chance decides which contender the garbage collector meets. (vLLM's engine core freezes
        # all objects of its start, the tier included.)
        gc.disable()
        try:
            for _ in range(plan.repeats):
                costs = race.run(step, lambda each: rigs[each.name].measure(), names)
                if pool is not None:
                    costs[POOL] = pool.measure()
                for name, by_kind in costs.items():
                    for kind, seconds in by_kind.items():
                        of_kind = cells.setdefault(kind, {})
                        # Other work on the machine only adds time, so the least counts.
                        of_kind[name] = min(of_kind.get(name, seconds), seconds)
        finally:
            gc.enable()
        results.rows += [Row(kind, size, of_kind) for kind, of_kind in cells.items()]
        for name, rig in rigs.items():
            if rig.num_missed:
                results.problems[f"{name}, {step}"] = f"{rig.num_missed} tokens were not loaded"

    for running in plan.running:
        measure(f"decode, {running} running", running, partial(_Decode, plan=plan, running=running))
    for kind, mix in (("serving", plan.serving), ("conversations", plan.conversations)):
        for running in plan.running:
            make = partial(Serving, kind=kind, mix=mix, plan=plan, running=running)
            measure(f"{kind}, {running} running", running, make)
    for length in plan.lengths:
        measure(
            f"one prompt of {length} tokens",
            length,
            partial(_Prompts, plan=plan, length=length),
            _Pool(length, plan.repeats),
        )


class _Steps(Rig):
    """Requests in the midst of their work. Its cost is that of a step."""

    def __init__(self, engine: Engine, kind: str, num_steps: int) -> None:
        self.engine = engine
        self._kind = kind
        self._num_steps = num_steps

    def measure(self) -> dict[str, float]:
        """Of a step."""
        self.engine.stopwatch.drain()
        for _ in range(self._num_steps):
            self.engine.step()
            self._refill()
        return {self._kind: self.engine.stopwatch.drain() / self._num_steps}

    def _refill(self) -> None:
        """Add a request for each one that has ended."""


class _Decode(_Steps):
    """Requests that decode, and nothing else."""

    def __init__(self, contender: Contender, plan: CostPlan, running: int) -> None:
        answer = (plan.repeats + 1) * plan.steps + running
        longest = plan.context_tokens + BLOCK_SIZE + answer
        blocks = running * (longest // BLOCK_SIZE + 1) + 16
        super().__init__(Engine(contender, Shape(blocks, blocks, running)), "decode", plan.steps)
        random = Random(0)
        for index in range(running):
            # Not all fill their blocks in the same step.
            length = plan.context_tokens + index % BLOCK_SIZE
            self.engine.add(f"{index}", _tokens(random, length), _tokens(random, answer))
        while not self.engine.all_decode:
            self.engine.step()
        self.measure()


class Serving(_Steps):
    """Requests that load their prompt, decode for a while and end; another follows each."""

    def __init__(
        self, contender: Contender, kind: str, mix: Mix, plan: CostPlan, running: int
    ) -> None:
        self._answer_tokens = mix.answer_tokens
        self._random = Random(0)
        self._running = running
        num_prompts = max(_CYCLE * running, _LEAST_CYCLE)
        self._prompts = [_tokens(self._random, mix.prompt_tokens) for _ in range(num_prompts)]
        longest = mix.prompt_tokens + _FRESH_TOKENS + 2 * mix.answer_tokens
        device_blocks = running * (longest // BLOCK_SIZE + 2) * 5 // 4 + 16
        host_blocks = 2 * num_prompts * (longest // BLOCK_SIZE + 1)
        engine = Engine(contender, Shape(device_blocks, host_blocks, running))
        super().__init__(engine, kind, max(plan.steps, 2 * mix.answer_tokens))
        self._ids = count()
        for _ in range(num_prompts):
            self._add()
        self.engine.drain()
        self._ids = count(2 * num_prompts)  # begin with the first prompt again
        self._refill()
        self.measure()

    def _refill(self) -> None:
        while self.engine.num_unfinished < self._running:
            self._add()

    def _add(self) -> None:
        index = next(self._ids)
        prompt = self._prompts[index % len(self._prompts)] + _tokens(self._random, _FRESH_TOKENS)
        length = self._random.randint(self._answer_tokens // 2, self._answer_tokens * 3 // 2)
        self.engine.add(f"{index}", prompt, _tokens(self._random, length))


class _Prompts(Rig):
    """One prompt after another, alone: stored cold; then, after a reset of the device's cache,
    loaded; and found on the device."""

    def __init__(self, contender: Contender, plan: CostPlan, length: int) -> None:
        own_blocks = length // BLOCK_SIZE + 2
        self.engine = Engine(contender, Shape(own_blocks + 16, own_blocks * (plan.repeats + 2)))
        self._random = Random(0)
        self._length = length
        self._ids = count()
        self.measure()
        self.num_missed = 0

    def measure(self) -> dict[str, float]:
        """Of one prompt, by kind."""
        prompt = _tokens(self._random, self._length)
        index = next(self._ids)
        costs = {}
        for kind in ("stored", "loaded", "on the device"):
            if kind != "on the device":
                self._empty_device()
            self.engine.add(f"{index} {kind}", prompt, [1])
            self.engine.drain()
            costs[kind] = self.engine.stopwatch.drain()
        wanted = (self._length - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.num_missed += wanted - self.engine.hits[f"{index} loaded"].host
        return costs

    def _empty_device(self) -> None:
        """A connector learns of it in the next step, which is not part of any prompt."""
        self.engine.reset_device()
        self.engine.add(f"{next(self._ids)} short", [0], [1])
        self.engine.drain()
        self.engine.stopwatch.drain()


class _Pool(Rig):
    """A prompt as in ``_Prompts``, by the methods of vLLM's pool alone that look up, hold, fill and
    free its blocks: no hook, copy or order of its own."""

    def __init__(self, length: int, repeats: int) -> None:
        self._num_blocks = length // BLOCK_SIZE
        room = (repeats + 1) * self._num_blocks + 1  # so that none is evicted
        self._device, self._host = (
            BlockPool(room, enable_caching=True, hash_block_size=BLOCK_SIZE) for _ in range(2)
        )
        self.measure()

    def measure(self) -> dict[str, float]:
        """Of one prompt, stored and loaded."""
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
        return {"stored": stored - start, "loaded": loaded - stored}


def _tokens(random: Random, count: int) -> list[int]:
    return random.choices(range(1000), k=count)
