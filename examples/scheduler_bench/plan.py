"""The plan of a run: sizes and numbers."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from examples.scheduler_bench.hybrids import MODELS, Model

BLOCK_SIZE = 16
"""Tokens of a block."""
CHUNK_TOKENS = 8192
"""Prompt tokens that a step computes at most."""


class Part(Enum):
    """A measurement."""

    COST = "cost"
    """Time in the connector's hooks."""
    FOOTPRINT = "footprint"
    """Memory and start-up time of a large tier."""
    CHAT = "chat"
    """What users of a chat wait for, while the tiers are full."""
    TRACES = "traces"
    """The same of recorded requests, and what they find."""
    SIZES = "sizes"
    """What they find with other sizes of host memory: predicted, and replayed."""
    MODELS = "models"
    """What agents of hybrid models find and wait for."""
    BYTES = "bytes"
    """Host bytes of a token, of such models."""


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
class FootprintPlan:
    """Memory and start-up time, each in a process of its own."""

    tier_blocks: int = 4_000_000
    filled_blocks: int = 262_144
    """Blocks to fill, for the bytes of a block that holds KV; 0: none."""
    repeats: int = 3

    @property
    def bytes_needed(self) -> int:
        """Memory that it may take: of a process that has imported vLLM, and a host block's Python
        objects, at most, where it holds KV."""
        return (2 << 30) + 400 * self.tier_blocks


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
    host_factors: tuple[float, ...] = (2.0, 5.0)
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

    files: tuple[Path, ...] = ()
    agents: int = 32
    """Sessions at the same time, of a trace that has sessions."""
    memories: tuple[tuple[float, float], ...] = ((0.5, 1.0), (1.0, 1.0), (0.5, 2.0))
    """Device and host memory, in millions of tokens."""
    working_sets: int = 1
    """Of agents with other sessions, one after another through one engine. The last counts."""
    requests: int = 3000
    """Of each working set."""
    warm_up: float = 0.3
    """Share of the requests that are not counted."""
    scale: int = 32
    """Tokens for which one token is played."""
    step_seconds: float = 0.05
    """Time of a step that computes nothing. A step stands for several of an engine's: answers are
    divided by ``scale`` too."""
    tokens_per_second: float = 40_000.0
    bus_tokens: int = 500_000
    """Tokens that are copied in a second, in each direction: 8B, 64 GB/s."""
    running: int = 16
    """Concurrent requests of the engine, at most."""
    max_pause: float = 300.0
    """Longest pause between an answer and the next request."""
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
    seeds: int = 3


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark."""

    cost: CostPlan = field(default_factory=CostPlan)
    footprint: FootprintPlan = field(default_factory=FootprintPlan)
    chat: ChatPlan = field(default_factory=ChatPlan)
    traces: TracePlan = field(default_factory=TracePlan)
    models: tuple[Model, ...] = tuple(MODELS.values())
    agents: AgentPlan = field(default_factory=AgentPlan)
    seeds: int = 5
    """Number of runs of each chat and replay, whose tokens are summed."""


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
    footprint=FootprintPlan(tier_blocks=100_000, filled_blocks=0, repeats=1),
    chat=ChatPlan(users=6, active=3, turns=2, device_tokens=16_384, host_factors=(2.0,)),
    seeds=1,
)
"""Shows that it works."""
