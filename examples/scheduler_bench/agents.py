"""Hybrid models: host bytes of a token, and agents, whose sessions grow turn by turn and leave a
boundary behind each."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from random import Random
from typing import NamedTuple

from examples.bench.connectors import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.hybrids import Model
from examples.scheduler_bench.plan import UNLIMITED, AgentPlan
from examples.scheduler_bench.planned import Planned
from examples.scheduler_bench.results import Outcome
from examples.scheduler_bench.watch import Watch
from simple_offload.memory import GIB

_FLOPS = 0.4e15
"""Of an H200 in 16 bits, at 40% of its peak."""
_BUS_BYTES = 54e9
"""That a rank copies in a second, in each direction."""
_FIRST = ", first"
"""In the name of a session's first request."""

PROMPT_TOKENS = 65_536
ANSWER_TOKENS = 300
"""Of the request whose bytes are counted."""


def bytes_of_a_token(contender: Contender, planned: Planned) -> float:
    """Host bytes of one prompt token on the whole server, by the host blocks in the connector's
    own tables after the answer. Raises RuntimeError if not all were stored."""
    num_blocks = 64 + sum(
        # Windows have their blocks of a chunk at once.
        PROMPT_TOKENS // group.block_tokens + 2 * group.num_boundary_blocks
        for group in planned.sizes.groups
    )
    with closing(Engine(contender, Shape(num_blocks, num_blocks), planned)) as engine:
        text = list(range(PROMPT_TOKENS + ANSWER_TOKENS))
        engine.add("0", text[:PROMPT_TOKENS], text[PROMPT_TOKENS:])
        engine.drain()
        used, room = engine.side.num_used(engine.connector)
        if not 0 < used < room - 1:
            raise RuntimeError(f"{used} of {room} host blocks are used")
        return planned.num_bytes(num_blocks) * used / room / PROMPT_TOKENS


class _Turn(NamedTuple):
    agent: int
    is_first: bool
    """Of a session."""
    prompt_tokens: int
    """Behind the last answer, or behind the system prompt."""
    answer_tokens: int


def run_agents(
    contender: Contender,
    model: Model,
    planned: Planned,
    host_gib: float,
    plan: AgentPlan,
    seed: int,
) -> Outcome:
    """Play the plan's turns with ``host_gib`` of host memory in the server, and count those after
    the warm-up."""
    turns = list(_turns(model, plan, seed))
    num_warm_up = int(plan.warm_up * len(turns))
    shape = Shape(
        device_blocks=_device_blocks(model, planned, plan),
        host_blocks=int(host_gib * GIB / planned.block_bytes / model.num_ranks),
        max_running=plan.running,
        bus_blocks=_BUS_BYTES / planned.block_bytes,
        chunk_tokens=plan.chunk_tokens,
        step_seconds=plan.step_seconds,
        tokens_per_second=_FLOPS * model.num_ranks / (2e9 * model.active),
    )
    if contender.name == UNLIMITED:
        shape = replace(shape, host_blocks=_most_blocks(planned, turns))
    with closing(Engine(contender, shape, planned)) as engine:
        watch = Watch(engine, is_later=lambda request: _FIRST not in request.request_id)
        agents = _Agents(engine, plan)
        agents.take(turns[:num_warm_up])
        watch.begin()
        agents.take(turns[num_warm_up:])
        return watch.outcome()


def _turns(model: Model, plan: AgentPlan, seed: int) -> Iterator[_Turn]:
    """The same for every contender."""
    random = Random(f"{seed} agents")
    lengths, longest = [0] * plan.agents, [0] * plan.agents
    for _ in range(plan.turns):
        agent = random.randrange(plan.agents)
        is_first = lengths[agent] >= longest[agent]
        if is_first:
            lengths[agent] = plan.system_tokens
            longest[agent] = random.randint(plan.least_longest, model.longest)
        turn = _Turn(
            agent,
            is_first,
            random.randint(*(plan.first_tokens if is_first else plan.user_tokens)),
            random.randint(*plan.answer_tokens),
        )
        lengths[agent] += turn.prompt_tokens + turn.answer_tokens
        yield turn


class _Agents:
    def __init__(self, engine: Engine, plan: AgentPlan) -> None:
        self._engine = engine
        self._running = plan.running
        self._fresh = count(1)
        """Tokens: none comes twice, but as a part of a session."""
        self._system = self._tokens(plan.system_tokens)
        self._texts: dict[int, list[int]] = {}
        """Of the sessions, by agent, with the last answers."""
        self._num_turns = 0

    def take(self, turns: Sequence[_Turn]) -> None:
        """Ask for the answers in their order, at most ``running`` at a time. A turn waits for the
        answer to an earlier one of its agent. Returns at rest."""
        waiting, busy = list(turns), dict[str, int]()
        while waiting or busy:
            while len(busy) < self._running:
                of_idle = (turn for turn in waiting if turn.agent not in busy.values())
                if (turn := next(of_idle, None)) is None:
                    break
                waiting.remove(turn)
                busy[self._ask(turn)] = turn.agent
            self._engine.step()
            busy = {name: agent for name, agent in busy.items() if self._engine.is_running(name)}
        self._engine.drain()

    def _ask(self, turn: _Turn) -> str:
        """Returns the request's name."""
        before = self._system if turn.is_first else self._texts[turn.agent]
        text, answer = before + self._tokens(turn.prompt_tokens), self._tokens(turn.answer_tokens)
        self._texts[turn.agent] = text + answer
        self._num_turns += 1
        name = f"{self._num_turns}{_FIRST if turn.is_first else ''}"
        self._engine.add(name, text, answer)
        return name

    def _tokens(self, number: int) -> list[int]:
        return list(islice(self._fresh, number))


def _device_blocks(model: Model, planned: Planned, plan: AgentPlan) -> int:
    """For the plan's part of the sessions, of mean length with one boundary, and for the windows of
    the tokens that concurrent turns compute in a step."""
    first = plan.system_tokens + sum(plan.first_tokens) / 2
    tokens = (first + (plan.least_longest + model.longest) / 2) / 2
    groups = planned.sizes.groups
    session = sum(group.num_boundary_blocks or tokens / group.block_tokens for group in groups)
    windows = [group.block_tokens for group in groups if group.kind == "window"]
    step = sum(plan.chunk_tokens / block_tokens for block_tokens in windows)
    return int(plan.device_part * plan.agents * session + plan.running * step)


def _most_blocks(planned: Planned, turns: Sequence[_Turn]) -> int:
    """Host blocks of a rank, if it has all that was ever computed."""
    tokens = sum(turn.prompt_tokens + turn.answer_tokens for turn in turns)
    sizes = planned.sizes
    copies = sum(tokens / group.block_tokens * group.num_host_copies for group in sizes.groups)
    return int(copies / sizes.num_ranks) + 1024
