"""Hit rates: conversations that take turns, over tiers that do or do not hold them all."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import TypeVar

from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS, HitPlan, Order
from examples.scheduler_bench.results import Outcome
from examples.scheduler_bench.watch import Watch

T = TypeVar("T")


class Workload:
    """The prompts and their order: the same for every contender."""

    def __init__(self, plan: HitPlan, order: Order, one_offs: bool, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        random = Random(f"{seed} lengths")
        self.user_tokens = [
            [random.randint(*plan.user_tokens) for _ in range(plan.turns)]
            for _ in range(plan.conversations)
        ]
        """By conversation and turn, the tokens of the user's message."""
        self._order = order
        self._one_offs = one_offs

    @property
    def lengths(self) -> list[int]:
        """Of all conversations at their end."""
        beside = self.plan.system_tokens + self.plan.turns * self.plan.answer_tokens
        return [beside + sum(messages) for messages in self.user_tokens]

    @property
    def working_set(self) -> int:
        """Blocks of all conversations at their end."""
        system = self.plan.system_tokens // BLOCK_SIZE
        return system + sum(length // BLOCK_SIZE - system for length in self.lengths)

    def sequence(self) -> Iterator[int | None]:
        """Conversations in the order of their turns, and None for a one-off prompt."""
        random = Random(f"{self.seed} order")
        turns = list(range(self.plan.conversations)) * self.plan.turns
        if self._order is Order.RANDOM:
            random.shuffle(turns)
        for conversation in turns:
            yield conversation
            if self._one_offs and random.random() < self.plan.one_offs:
                yield None


def run_turns(
    contender: Contender, plan: HitPlan, order: Order, one_offs: bool, host_part: float, seed: int
) -> Outcome:
    """Play conversations with a host tier of ``host_part`` of their working set."""
    load = Workload(plan, order, one_offs, seed)
    longest = max(load.lengths)
    assert longest < CHUNK_TOKENS, "a prompt is computed in one step"
    least = plan.running * (max(longest, plan.one_off_tokens) // BLOCK_SIZE + 2)
    device_blocks = max(int(plan.device_part * load.working_set), least)
    shape = Shape.of_8b(device_blocks, int(host_part * load.working_set), plan.running)
    with closing(Engine(contender, shape)) as engine:
        watch = Watch(engine)
        watch.begin()
        known = _play(engine, load)
        outcome = watch.outcome()
        # Turns that run at the same time share their beginning before either has ended.
        on_device = {name: min(engine.hits[name].device, known[name]) for name in known}
        in_host = (min(engine.hits[name].host, known[name] - on_device[name]) for name in known)
    return replace(
        outcome,
        known=sum(known.values()),
        known_on_device=sum(on_device.values()),
        known_in_host=sum(in_host),
    )


def take_turns(
    engine: Engine,
    turns: Iterable[T],
    running: int,
    whose: Callable[[T], int | None],
    ask: Callable[[T], str],
) -> None:
    """``ask`` for the answers to ``turns`` in their order, at most ``running`` at a time. A turn
    waits for the answer to an earlier one of the same number in ``whose``; None waits for none.
    ``ask`` adds a request and returns its name. Returns at rest."""
    waiting, busy = list(turns), dict[str, int | None]()
    while waiting or busy:
        while len(busy) < running:
            places = (
                place
                for place, turn in enumerate(waiting)
                if (number := whose(turn)) is None or number not in busy.values()
            )
            if (place := next(places, None)) is None:
                break
            turn = waiting.pop(place)
            busy[ask(turn)] = whose(turn)
        engine.step()
        busy = {name: number for name, number in busy.items() if engine.is_running(name)}
    engine.drain()


def _play(engine: Engine, load: Workload) -> dict[str, int]:
    """Returns, by request of a conversation, the tokens that were computed before, in whole
    blocks."""
    plan = load.plan
    system = _tokens(f"{load.seed} system", plan.system_tokens)
    histories = [list(system) for _ in range(plan.conversations)]
    num_turns = Counter[int | None]()
    known: dict[str, int] = {}

    def ask(index: int | None) -> str:
        turn = num_turns[index]
        num_turns[index] += 1
        if index is None:
            name = f"{load.seed} one-off {turn}"
            text = _tokens(name, plan.one_off_tokens)
        else:
            name = f"{load.seed} conversation {index} turn {turn}"
            text = histories[index]
            # The last token of an answer is never computed.
            length = len(text) - bool(turn)
            any_ended = not all(map(engine.is_running, known))
            known[name] = length // BLOCK_SIZE * BLOCK_SIZE if any_ended else 0
            text += _tokens(name, load.user_tokens[index][turn])
        answer = _tokens(f"{name} answer", plan.answer_tokens)
        engine.add(name, text, answer)
        text += answer
        return name

    take_turns(engine, load.sequence(), plan.running, lambda index: index, ask)
    return known


def _tokens(seed: str, count: int) -> list[int]:
    return Random(seed).choices(range(1000), k=count)
