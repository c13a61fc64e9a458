"""Time in the hooks: of a step by running requests, of a request by its length and the tier."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random

from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import MAX_MODEL_LEN, Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, Mix, Plan
from examples.scheduler_bench.race import Race
from examples.scheduler_bench.results import Kind, Results, Row, least_cost
from examples.scheduler_bench.stopwatch import Cost

_CYCLE = 3
"""Prompts of the serving mix for each running request: by the time that one comes again, the
device has had room for others only."""
_LEAST_CYCLE = 8
_FRESH_TOKENS = 64
"""That a prompt of the serving mix has beyond what is in the tier."""


def run_costs(race: Race, results: Results, tell: Callable[[str], None]) -> None:
    """Add rows to ``results``."""
    plan = results.plan
    for running in plan.cost.running:
        tell(f"decode, {running} running")
        _measure(race, results, Kind.DECODE, running, _Decode)
    for kind, mix in (
        (Kind.SERVING, plan.cost.serving),
        (Kind.CONVERSATIONS, plan.cost.conversations),
    ):
        for running in plan.cost.running:
            tell(f"{kind.value}, {running} running")
            _measure(race, results, kind, running, partial(Serving, mix))
    for length in plan.cost.lengths:
        tell(f"one prompt of {length} tokens")
        _measure_prompts(race, results, (Kind.STORED, Kind.LOADED), length, length, None)
    for blocks in plan.cost.tiers:
        tell(f"a full tier of {blocks} blocks")
        kinds = (Kind.STORED_FULL, Kind.LOADED_FULL)
        _measure_prompts(race, results, kinds, blocks, plan.cost.tier_tokens, blocks)


class _Decode:
    """Requests that decode, and nothing else."""

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

    def measure(self) -> Cost:
        """Of a step."""
        self.engine.stopwatch.take()
        for _ in range(self._steps):
            self.engine.step()
        return self.engine.stopwatch.take().over(self._steps)


class Serving:
    """Requests that come, load their prompt, decode for a while and end; then comes another."""

    def __init__(self, mix: Mix, contender: Contender, plan: Plan, running: int) -> None:
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

    def measure(self) -> Cost:
        """Of a step."""
        self.engine.stopwatch.take()
        for _ in range(self._steps):
            self.engine.step()
            self._fill()
        return self.engine.stopwatch.take().over(self._steps)

    def _fill(self) -> None:
        while self.engine.num_unfinished < self._running:
            self._add()

    def _add(self) -> None:
        index = next(self._ids)
        prompt = self._prompts[index % len(self._prompts)] + _tokens(self._random, _FRESH_TOKENS)
        length = self._random.randint(self._answer_tokens // 2, self._answer_tokens * 3 // 2)
        self.engine.add(f"{index}", prompt, _tokens(self._random, length))


class _Prompts:
    """One prompt after another, alone: stored cold, and then, as the device has forgotten it,
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
        if full_tier is not None:
            fill_tier(self.engine, full_tier, self._random)
        self.measure()

    def measure(self) -> tuple[Cost, Cost, int]:
        """Stored, loaded, and tokens that should have been loaded and were not."""
        prompt = _tokens(self._random, self._length)
        index = next(self._ids)
        self.engine.stopwatch.take()
        self.engine.add(f"{index} cold", prompt, [1])
        self.engine.drain()
        stored = self.engine.stopwatch.take()
        self.engine.forget_device()
        self.engine.add(f"{index} again", prompt, [1])
        self.engine.drain()
        loaded = self.engine.stopwatch.take()
        self.engine.forget_device()
        wanted = (self._length - 1) // BLOCK_SIZE * BLOCK_SIZE
        return stored, loaded, wanted - self.engine.hits[f"{index} again"].host


def fill_tier(engine: Engine, num_blocks: int, random: Random) -> None:
    """Store that many blocks, of prompts that nobody asks for again."""
    longest = MAX_MODEL_LEN - BLOCK_SIZE
    left = num_blocks
    for index in count():
        if left <= 0:
            return
        prompt = _tokens(random, min(longest, left * BLOCK_SIZE))
        engine.add(f"filler {index}", prompt, [1])
        engine.drain()
        left -= len(prompt) // BLOCK_SIZE


def _measure(
    race: Race,
    results: Results,
    kind: Kind,
    size: int,
    make: "Callable[[Contender, Plan, int], _Decode | Serving]",
) -> None:
    plan = results.plan
    rigs = race.each(f"{kind.value}, {size}", lambda c: make(c, plan, size), _takes_part)
    costs: dict[str, list[Cost]] = {name: [] for name in rigs}
    with quiet_heap():
        for _ in range(plan.cost.repeats):
            measured = race.each(
                f"{kind.value}, {size}", lambda c: rigs[c.name].measure(), _takes_part
            )
            for name, cost in measured.items():
                costs[name].append(cost)
    results.rows.append(
        Row(kind, size, {name: least_cost(each) for name, each in costs.items() if each})
    )


def _measure_prompts(
    race: Race,
    results: Results,
    kinds: tuple[Kind, Kind],
    size: int,
    length: int,
    full_tier: int | None,
) -> None:
    what = f"{kinds[0].value}, {size}"
    plan = results.plan
    rigs = race.each(what, lambda c: _Prompts(c, plan, length, full_tier), _stores_at_once)
    stored: dict[str, list[Cost]] = {name: [] for name in rigs}
    loaded: dict[str, list[Cost]] = {name: [] for name in rigs}
    with quiet_heap():
        for _ in range(plan.cost.repeats):
            measured = race.each(what, lambda c: rigs[c.name].measure(), _stores_at_once)
            for name, (cold, again, missed) in measured.items():
                stored[name].append(cold)
                loaded[name].append(again)
                if missed:
                    results.problems[f"{name}, {kinds[1].value}, {size}"] = (
                        f"{missed} tokens were not loaded"
                    )
    for kind, costs in zip(kinds, (stored, loaded), strict=True):
        cells = {name: least_cost(each) for name, each in costs.items() if each}
        results.rows.append(Row(kind, size, cells))


def _takes_part(contender: Contender) -> bool:
    return not contender.for_one_offs


def _stores_at_once(contender: Contender) -> bool:
    return not contender.lazy and not contender.for_one_offs


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Let the garbage collector not run: whom it meets is chance. (vLLM's engine core takes what
    there is at its start out of the collector's sight, the tier included.)"""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _tokens(random: Random, count: int) -> list[int]:
    return random.choices(range(1000), k=count)
