"""What the benchmark does: sizes and numbers."""

from dataclasses import dataclass, field
from enum import Enum

BLOCK_SIZE = 16
"""Tokens of a block."""
CHUNK_TOKENS = 8192
"""Prompt tokens that a step computes at most."""


class Part(Enum):
    """What is measured."""

    COST = "cost"
    """Time in the connector's hooks."""
    FOOTPRINT = "footprint"
    """Memory and start-up time of a large tier."""
    HITS = "hits"
    """Hit rates."""


class Order(Enum):
    """Whose turn it is."""

    ROUND_ROBIN = "round robin"
    RANDOM = "random"


@dataclass(frozen=True)
class Mix:
    """Requests that come, load their prompt, decode for a while and end."""

    prompt_tokens: int
    """In the host tier but not on the device."""
    answer_tokens: int
    """On average."""


@dataclass(frozen=True)
class CostPlan:
    """Time in the hooks. Host tiers are large enough, unless said otherwise."""

    running: tuple[int, ...] = (1, 64, 256)
    """Requests that run at the same time."""
    context_tokens: int = 2048
    """Of each of them, while they decode."""
    steps: int = 128
    """Measured at a time, if not more: as many as a request needs to fill the largest host block
    once. Where requests come and go, no fewer than the longest of them needs."""
    serving: Mix = Mix(prompt_tokens=1024, answer_tokens=32)
    """So short that all is about requests that come and go."""
    conversations: Mix = Mix(prompt_tokens=8192, answer_tokens=256)
    """Histories, and what is said to them."""
    lengths: tuple[int, ...] = (2048, 16_384, 131_072)
    """Prompts that are stored cold, and then loaded."""
    tiers: tuple[int, ...] = (16_384, 131_072, 524_288)
    """Host blocks of a tier that is full, so that what is stored displaces something."""
    tier_tokens: int = 16_384
    """Prompt that is stored into such a tier, and then loaded."""
    repeats: int = 5
    """Of each measurement, contenders in turn; the least counts."""


@dataclass(frozen=True)
class FootprintPlan:
    """Memory and start-up time, each in a process of its own."""

    tier_blocks: int = 4_000_000
    filled_blocks: int = 262_144
    """Of them, to see what a block takes that holds something; 0: none."""
    repeats: int = 3


@dataclass(frozen=True)
class HitPlan:
    """Conversations. A prompt is all that was said before and something new."""

    conversations: int = 48
    turns: int = 6
    system_tokens: int = 256
    """Every conversation begins with."""
    user_tokens: tuple[int, int] = (64, 448)
    """Fewest and most that a turn adds."""
    answer_tokens: int = 16
    running: int = 4
    """Turns that the engine works on at the same time."""
    device_part: float = 0.125
    """Of the working set, the blocks of all conversations at their end, that the device holds."""
    host_parts: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Of the working set, that the host tier holds."""
    one_off_tokens: int = 1024
    """Of prompts that nobody continues, in the runs that have them."""
    one_offs: float = 0.5
    """Of these, for each turn of a conversation."""
    seeds: int = 2
    """Runs of each kind, whose tokens are added up."""


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark."""

    cost: CostPlan = field(default_factory=CostPlan)
    footprint: FootprintPlan = field(default_factory=FootprintPlan)
    hits: HitPlan = field(default_factory=HitPlan)
    delay: int = 2
    """Steps until the end of a transfer is reported."""
    seed: int = 0
