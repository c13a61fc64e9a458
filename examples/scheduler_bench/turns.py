"""Hit rates: conversations that take turns, over tiers that do or do not hold them all."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import (
    BLOCK_SIZE,
    BUS_TOKENS,
    CHUNK_TOKENS,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    HitPlan,
    Order,
)
from examples.scheduler_bench.results import HitCount, Outcome
from examples.scheduler_bench.watch import Watch


@dataclass(frozen=True)
class Workload:
    """The prompts and their order: the same for every contender."""

    plan: HitPlan
    order: Order
    one_offs: bool
    seed: int

    @property
    def user_tokens(self) -> list[list[int]]:
        """By conversation and turn, the tokens of the user's message."""
        random = Random(f"{self.seed} lengths")
        fewest, most = self.plan.user_tokens
        return [
            [random.randint(fewest, most) for _ in range(self.plan.turns)]
            for _ in range(self.plan.conversations)
        ]

    @property
    def working_set(self) -> int:
        """Blocks of all conversations at their end."""
        system = self.plan.system_tokens // BLOCK_SIZE
        answers = self.plan.turns * self.plan.answer_tokens
        own = [self.plan.system_tokens + sum(messages) + answers for messages in self.user_tokens]
        return system + sum(length // BLOCK_SIZE - system for length in own)

    def sequence(self) -> Iterator[int | None]:
        """Conversations in the order of their turns, and None for a one-off prompt."""
        random = Random(f"{self.seed} order")
        turns = list(range(self.plan.conversations)) * self.plan.turns
        if self.order is Order.RANDOM:
            random.shuffle(turns)
        for conversation in turns:
            yield conversation
            if self.one_offs and random.random() < self.plan.one_offs:
                yield None


@dataclass
class _Conversation:
    history: list[int]
    """Token ids, prompts and answers."""
    num_turns: int = 0
    running: bool = False


def run_turns(
    contender: Contender, load: Workload, host_part: float, delay: int
) -> tuple[HitCount, Outcome]:
    """Play ``load`` with a host tier of ``host_part`` of its working set, and count hits."""
    plan = load.plan
    messages = load.user_tokens
    longest = plan.system_tokens + max(map(sum, messages)) + plan.turns * plan.answer_tokens
    least = plan.running * (max(longest, plan.one_off_tokens) // BLOCK_SIZE + 2)
    shape = Shape(
        device_blocks=max(int(plan.device_part * load.working_set), least) + 1,
        host_blocks=int(host_part * load.working_set) + 1,
        max_running=plan.running,
        delay=delay,
        bus_blocks=BUS_TOKENS / BLOCK_SIZE,
        step_seconds=STEP_SECONDS,
        tokens_per_second=TOKENS_PER_SECOND,
    )
    assert longest < CHUNK_TOKENS, "a prompt is computed in one step"
    system = _tokens(f"{load.seed} system", plan.system_tokens)
    conversations = [_Conversation(list(system)) for _ in range(plan.conversations)]
    engine = Engine(contender, shape)
    try:
        watch = Watch(engine)
        watch.begin()
        return _play(engine, load, conversations), watch.outcome()
    finally:
        engine.close()


def _play(engine: Engine, load: Workload, conversations: list[_Conversation]) -> HitCount:
    plan, messages = load.plan, load.user_tokens
    waiting = deque(load.sequence())
    running: dict[str, int | None] = {}
    answers: dict[str, list[int]] = {}
    reusable: dict[str, int] = {}
    num_one_offs = 0
    any_ended = False
    while waiting or running:
        while len(running) < plan.running and waiting:
            index = _next(waiting, conversations)
            if index == _NONE_READY:
                break
            if index is None:
                request_id = f"{load.seed} one-off {num_one_offs}"
                num_one_offs += 1
                prompt = _tokens(request_id, plan.one_off_tokens)
                reusable[request_id] = 0
            else:
                talk = conversations[index]
                request_id = f"{load.seed} conversation {index} turn {talk.num_turns}"
                # The last token of an answer is never computed.
                known = len(talk.history) - bool(talk.num_turns)
                known = known if talk.num_turns or any_ended else 0
                reusable[request_id] = known // BLOCK_SIZE * BLOCK_SIZE
                talk.history += _tokens(request_id, messages[index][talk.num_turns])
                talk.running = True
                prompt = talk.history
            answers[request_id] = _tokens(f"{request_id} answer", plan.answer_tokens)
            engine.add(request_id, prompt, answers[request_id])
            running[request_id] = index
        engine.step()
        for request_id in [r for r in running if not engine.is_running(r)]:
            index = running.pop(request_id)
            if index is not None:
                talk = conversations[index]
                talk.history += answers[request_id]
                talk.num_turns += 1
                talk.running = False
                any_ended = True
    engine.drain()
    total = HitCount(0, 0, 0)
    for request_id, known in reusable.items():
        hit = engine.hits[request_id]
        # Turns that run at the same time share their beginning before either has ended.
        on_device = min(hit.device, known)
        total += HitCount(known - on_device, min(hit.host, known - on_device), on_device)
    return total


_NONE_READY = -1


def _next(waiting: deque[int | None], conversations: list[_Conversation]) -> int | None:
    """Remove and return the first turn of ``waiting`` whose conversation awaits no answer;
    ``_NONE_READY`` if there is none."""
    for place, index in enumerate(waiting):
        if index is None or not conversations[index].running:
            del waiting[place]
            return index
    return _NONE_READY


def _tokens(seed: str, count: int) -> list[int]:
    return Random(seed).choices(range(1000), k=count)
