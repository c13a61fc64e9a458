"""The plan of a run: sizes and numbers."""

import argparse
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from examples.bench.arguments import option, whole
from examples.bench.connectors import CONTENDERS as ALL
from examples.bench.connectors import OURS, Contender
from examples.scheduler_bench.hybrids import MODELS, Model

BLOCK_SIZE = 16
"""Tokens of a block."""
CHUNK_TOKENS = 8192
"""Prompt tokens that a step computes at most."""
UNLIMITED = "ours-unlimited"
"""The contender with all the host memory that it needs."""
CONTENDERS: Mapping[str, Contender] = {
    "ours": OURS,
    "ours-128": replace(OURS, name="ours-128", extra={"cpu_block_size": 128}),
    UNLIMITED: replace(OURS, name=UNLIMITED),
    **{name: ALL[name] for name in ("builtin", "builtin-lazy", "offloading")},
}
_CALLS = {"ours", "ours-128", "builtin"}
_WAITS = {"ours", "builtin", "builtin-lazy", "offloading"}
_MODELS = {"ours", "builtin", "offloading"}
CONTENDERS_OF: Mapping[str, Set[str]] = {
    "cost": _CALLS,
    "chat": _WAITS,
    "traces": _WAITS,
    "sizes": {"ours"},
    "models": _MODELS | {UNLIMITED},
    "bytes": _MODELS,
}
"""By measurement, those that take part in it."""


def _memory(text: str) -> tuple[float, float]:
    try:
        device, host = (float(each) for each in text.split("/"))
    except ValueError:
        device = host = 0.0
    if not (0.01 <= device <= 1000 and 0.01 <= host <= 1000):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not device/host in millions of tokens, each from 0.01 to 1000"
        )
    return device, host


@dataclass(frozen=True)
class Mix:
    """Requests that load their prompt, decode for a while and end."""

    prompt_tokens: int
    """In the host tier but not on the device."""
    answer_tokens: int
    """On average."""


@dataclass(frozen=True)
class CostPlan:
    """Time in the hooks. Host tiers are large enough."""

    running: tuple[int, ...] = (1, 64, 256)
    """Numbers of concurrent requests."""
    context_tokens: int = 2048
    """Context of each of them, while they decode."""
    steps: int = 128
    """Least number of steps in a measurement: a request fills the largest host block once. Where
    requests come and go, the longest of them must fit."""
    serving: Mix = Mix(prompt_tokens=1024, answer_tokens=32)
    """So short that requests come and go all the time."""
    conversations: Mix = Mix(prompt_tokens=8192, answer_tokens=256)
    """Histories, and their answers."""
    lengths: tuple[int, ...] = (2048, 16_384, 131_072)
    """Prompts that are stored cold, and then loaded."""
    repeats: int = 5
    """Of each measurement, contenders in turn; the least counts."""


@dataclass(frozen=True)
class ChatPlan:
    """Users who come back with their history and a new message, and others in their place when they
    leave. An 8B model on an H200."""

    users: int = 24
    """Of a working set: 2.9 times the device."""
    active: int = 12
    turns: int = 5
    system_tokens: int = 512
    """Common to the users of a working set."""
    first_tokens: tuple[int, int] = (4000, 8000)
    """Shortest and longest first message."""
    user_tokens: int = 200
    answer_tokens: int = 64
    pause: float = 0.05
    """Seconds from an answer to the next message."""
    working_sets: int = 3
    """One after another through one engine. The last counts: both tiers are full."""
    device_tokens: int = 65_536
    host_factors: tuple[float, ...] = (0.3, 2.0, 5.0)
    """Host memory over device memory."""
    turns_per_one_off: int = 4
    """Turns for each one-off prompt, which is as long as a first message, in the runs that have
    these."""
    bus_tokens: int = 409_600
    """Tokens that are copied in a second, in each direction: 54 GB/s."""
    step_seconds: float = 0.006
    """Time of a step that computes nothing: the weights are read."""
    tokens_per_second: float = 40_000.0


@dataclass(frozen=True)
class TracePlan:
    """Replay of traces, in their tokens and seconds."""

    files: tuple[Path, ...] = option(
        (), "recorded, of Mooncake or Claude Code", Path, name="traces", metavar="FILE", nargs="+"
    )
    agents: int = option(32, "sessions of a replay at the same time", whole(1, 4096))
    memories: tuple[tuple[float, float], ...] = option(
        ((0.5, 1.0), (1.0, 1.0), (0.5, 2.0)),
        "device and host memory of a replay, D/H in millions of tokens",
        _memory,
        name="memory",
        metavar="D/H",
        nargs="+",
    )
    working_sets: int = option(1, "of agents, one after another in an engine; the last counts")
    requests: int = option(3000, "of each working set of a replay")
    warm_up: float = 0.3
    """Share of the requests that are not counted."""
    scale: int = 32
    """Tokens for which one token is played."""
    step_ms: int = option(50, "of a replay's step that computes nothing", whole(1, 60_000))
    """A step stands for several of an engine's: answers are divided by ``scale`` too."""
    tokens_per_second: int = option(40_000, "of a replay, beside the time of its steps")
    bus_tokens: int = 500_000
    """Tokens that are copied in a second, in each direction: 8B, 64 GB/s."""
    running: int = 16
    """Concurrent requests of the engine, at most."""
    max_pause: int = option(300, "longest pause of a replay, s", whole(0))
    max_prompt: int = 262_144
    """A session ends before a longer prompt."""


@dataclass(frozen=True)
class AgentPlan:
    """Agents of hybrid models. Each has a session, and another when it has become too long."""

    agents: int = 32
    turns: int = 800
    """Of all agents together, in random order."""
    warm_up: float = 0.3
    """Share of the turns that are not counted."""
    running: int = 4
    """Concurrent turns."""
    system_tokens: int = 6000
    """Length of the prefix of all sessions."""
    first_tokens: tuple[int, int] = (2000, 12_000)
    """Shortest and longest first message."""
    user_tokens: tuple[int, int] = (300, 4000)
    """Of a later turn, such as the output of a tool."""
    answer_tokens: tuple[int, int] = (50, 250)
    least_longest: int = 24_000
    """Each session ends between this length and its model's ``longest``."""
    device_part: float = 0.5
    """Share of the sessions' blocks, each with one boundary, that the device has room for."""
    chunk_tokens: int = 2048
    step_seconds: float = 0.008
    """Time of a step that computes nothing."""


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark."""

    cost: CostPlan = field(default_factory=CostPlan)
    chat: ChatPlan = field(default_factory=ChatPlan)
    traces: TracePlan = field(default_factory=TracePlan)
    models: tuple[Model, ...] = tuple(MODELS.values())
    agents: AgentPlan = field(default_factory=AgentPlan)
    seeds: int = option(5, "runs of each chat, replay and model", whole(1, 100))


QUICK = Plan(
    cost=CostPlan(
        running=(1, 8),
        context_tokens=256,
        steps=16,
        serving=Mix(prompt_tokens=128, answer_tokens=16),
        conversations=Mix(prompt_tokens=512, answer_tokens=32),
        lengths=(256, 4096),
        repeats=2,
    ),
    chat=ChatPlan(users=6, active=3, turns=2, device_tokens=16_384, host_factors=(2.0,)),
    seeds=1,
)
"""Shows that it works."""
