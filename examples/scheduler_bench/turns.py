"""Hit rates: conversations that take turns, over tiers that do or do not hold them all."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS, HitPlan, Order
from examples.scheduler_bench.results import Outcome
from examples.scheduler_bench.watch import Watch


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


@dataclass
class _Conversation:
    history: list[int]
    """Token ids, prompts and answers."""
    answer: list[int] = field(default_factory=list)
    num_turns: int = 0
    running: bool = False


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


def _play(engine: Engine, load: Workload) -> dict[str, int]:
    """Returns, by request, the tokens that were computed before, in whole blocks."""
    plan = load.plan
    system = _tokens(f"{load.seed} system", plan.system_tokens)
    conversations = [_Conversation(list(system)) for _ in range(plan.conversations)]
    waiting = list(load.sequence())
    running: dict[str, _Conversation] = {}
    known: dict[str, int] = {}
    one_offs = count()
    while waiting or running:
        while len(running) < plan.running:
            # The first turn whose conversation awaits no answer.
            ready = (
                place
                for place, index in enumerate(waiting)
                if index is None or not conversations[index].running
            )
            if (place := next(ready, None)) is None:
                break
            index = waiting.pop(place)
            if index is None:
                request_id = f"{load.seed} one-off {next(one_offs)}"
                talk = _Conversation(_tokens(request_id, plan.one_off_tokens))
                known[request_id] = 0
            else:
                talk = conversations[index]
                request_id = f"{load.seed} conversation {index} turn {talk.num_turns}"
                # The last token of an answer is never computed.
                length = len(talk.history) - bool(talk.num_turns)
                any_ended = any(each.num_turns for each in conversations)
                known[request_id] = length // BLOCK_SIZE * BLOCK_SIZE if any_ended else 0
                talk.history += _tokens(request_id, load.user_tokens[index][talk.num_turns])
            talk.running = True
            talk.answer = _tokens(f"{request_id} answer", plan.answer_tokens)
            engine.add(request_id, talk.history, talk.answer)
            running[request_id] = talk
        engine.step()
        for request_id in [each for each in running if not engine.is_running(each)]:
            talk = running.pop(request_id)
            talk.history += talk.answer
            talk.num_turns += 1
            talk.running = False
    engine.drain()
    return known


def _tokens(seed: str, count: int) -> list[int]:
    return Random(seed).choices(range(1000), k=count)
