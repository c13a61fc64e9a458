"""A chat whose users wait: conversations that come back, in an engine whose tiers are full."""

import heapq
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from examples.bench.connectors import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, ChatPlan
from examples.scheduler_bench.results import Outcome
from examples.scheduler_bench.watch import Watch


def run_chat(
    contender: Contender, plan: ChatPlan, host_factor: float, one_offs: bool, seed: int
) -> Outcome:
    """Play the plan's working sets one after another, and count the last. ``host_factor``: host
    memory over device memory. ``one_offs``: whether prompts that never come back come between."""
    device_blocks = plan.device_tokens // BLOCK_SIZE
    shape = Shape(
        device_blocks + 1,
        int(host_factor * device_blocks) + 1,
        bus_blocks=plan.bus_tokens / BLOCK_SIZE,
        step_seconds=plan.step_seconds,
        tokens_per_second=plan.tokens_per_second,
    )
    with closing(Engine(contender, shape)) as engine:
        watch = Watch(engine)
        chat = _Chat(engine, plan, one_offs, seed)
        for working_set in range(plan.working_sets):
            if working_set == plan.working_sets - 1:
                watch.begin()
            chat.play(working_set)
        return watch.outcome()


@dataclass(eq=False)
class _User:
    name: str
    history: list[int]
    num_turns: int = 0


class _Chat:
    def __init__(self, engine: Engine, plan: ChatPlan, one_offs: bool, seed: int) -> None:
        self._engine = engine
        self._plan = plan
        self._one_offs = one_offs
        self._random = Random(f"{seed} chat")
        self._fresh = count(1)
        """Tokens: none comes twice, but as a part of a history."""
        self._num_turns = 0

    def play(self, working_set: int) -> None:
        """Serve new users until the last one has had all turns."""
        engine, plan = self._engine, self._plan
        system = self._tokens(plan.system_tokens)
        users = self._users(f"{working_set}", system)
        order = count()
        due = [
            (engine.now, next(order), user) for user in (next(users) for _ in range(plan.active))
        ]
        running: dict[str, _User | None] = {}
        while due or running:
            if engine.at_rest and not running:
                engine.now = max(engine.now, due[0][0])
            while due and due[0][0] <= engine.now:
                came, _, user = heapq.heappop(due)
                running |= self._add(user, came)
            engine.step()
            for request_id in [each for each in running if not engine.is_running(each)]:
                answered = running.pop(request_id)
                if answered is None:
                    continue
                answered.history += self._tokens(plan.user_tokens)
                answered.num_turns += 1
                if answered.num_turns < plan.turns:
                    heapq.heappush(due, (engine.now + plan.pause, next(order), answered))
                elif (following := next(users, None)) is not None:
                    heapq.heappush(due, (engine.now, next(order), following))

    def _users(self, prefix: str, system: list[int]) -> Iterator[_User]:
        for number in range(self._plan.users):
            first = self._tokens(self._random.randint(*self._plan.first_tokens))
            yield _User(f"{prefix}, user {number}", system + first)

    def _add(self, user: _User, came: float) -> dict[str, _User | None]:
        """Ask for the user's next turn. Returns the requests that this makes."""
        answer = self._tokens(self._plan.answer_tokens)
        name = f"{user.name}, turn {user.num_turns}"
        self._engine.add(name, user.history, answer, came)
        user.history += answer
        added: dict[str, _User | None] = {name: user}
        self._num_turns += 1
        if self._one_offs and self._num_turns % self._plan.turns_per_one_off == 0:
            name = f"{name}, one-off"
            prompt = self._tokens(self._random.randint(*self._plan.first_tokens))
            self._engine.add(name, prompt, self._tokens(self._plan.answer_tokens), came)
            added[name] = None
        return added

    def _tokens(self, number: int) -> list[int]:
        return list(islice(self._fresh, number))
