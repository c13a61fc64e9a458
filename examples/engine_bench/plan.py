"""The work of every contender: the model's shape, the sizes, and the prompts.

A plan is plain data, which travels to each engine's process as JSON; all prompts follow from
its seed, so that all contenders get the same.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from examples.bench.agents import AgentPlan
from examples.bench.child import Device
from examples.bench.command import CannotStart
from examples.bench.models import LLAMA_8B, SMALL, ModelShape

Part = Literal["ttft", "grown", "idle", "mix", "turns", "traces", "restart"]
PARTS: tuple[Part, ...] = get_args(Part)

FIRST_TEXT_TOKEN = 10
"""Ids below this one are the model's special tokens."""


@dataclass(frozen=True)
class Plan:
    """One bench. Lengths are in tokens, answers included where the name says so."""

    model: ModelShape
    device: Device
    block_size: int
    device_tokens: int
    """Capacity of the device's KV space."""
    host_bytes: int
    """Size of the host tier, for all ranks together."""
    prompt_tokens: int
    """Length of a prompt that comes back as a hit."""
    first_tokens: int
    """Length of its answer; contenders must agree on the tokens."""
    new_tokens: tuple[int, ...]
    """By how much such prompts have grown when they come back."""
    idle_prompts: int
    idle_prompt_tokens: int
    idle_answer_tokens: int
    mix_decodes: int
    """Requests that decode while others hit."""
    mix_answer_tokens: int
    mix_hits: int
    users: int
    users_at_once: int
    """Users whose conversations the device cannot hold together."""
    turns: int
    system_tokens: int
    """Length of the prefix that all users share."""
    history_tokens: tuple[int, int]
    """Shortest and longest first message of a user."""
    message_tokens: int
    turn_answer_tokens: int
    agents: int
    """Sessions of the trace that go on at the same time."""
    trace_requests: int
    """Requests of all agents together."""
    trace_scale: int
    """Recorded tokens for each token that is sent. Pauses shrink by the same factor."""
    trace_pause: float
    """Longest pause of an agent, in seconds."""
    settle_seconds: float
    """Pause before a part. Contenders go on storing after the last answer, none reports the end,
    and their stores would disturb the next measurement."""
    think_seconds: float
    """Pause between an answer and the user's next message."""
    compare_shapes: bool
    """True if answers must be the same even where contenders had other numbers of cached
    tokens. With dummy weights in bfloat16, other shapes of a step decide ties another way."""
    rounds: int
    """Engines of each contender."""
    graphs: bool = False
    tensor_parallel: int = 1
    trace: str | None = None
    """File with recorded sessions; None without the part ``traces``."""
    trace_seed: int = 0
    """Of the order of the sessions, which all repeats have in common."""
    seed: int = 0

    @property
    def num_hits(self) -> int:
        """Prompts that fill the device one and a half times."""
        return max(4, 3 * self.device_tokens // (2 * self.prompt_tokens))

    @property
    def max_model_len(self) -> int:
        longest_chat = (
            self.system_tokens
            + self.history_tokens[1]
            + self.turns * (self.message_tokens + self.turn_answer_tokens)
        )
        longest = max(
            self.prompt_tokens + max(self.new_tokens) + self.first_tokens,
            self.idle_prompt_tokens + self.idle_answer_tokens,
            self.mix_prompt_tokens + self.mix_answer_tokens,
            longest_chat,
            self.max_trace_tokens if self.trace is not None else 0,
        )
        return -(-longest // self.block_size) * self.block_size

    @property
    def replay(self) -> AgentPlan:
        """The agents of the part ``traces``. Raises CannotStart without a file."""
        if self.trace is None:
            raise CannotStart("--traces: the part traces needs a file")
        return AgentPlan(
            trace=Path(self.trace),
            agents=self.agents,
            requests=self.trace_requests,
            scale=self.trace_scale,
            pause_scale=self.trace_scale,
            max_pause=self.trace_pause,
            max_tokens=self.max_trace_tokens,
            seed=self.trace_seed,
        )

    @property
    def max_trace_tokens(self) -> int:
        """Longest request of an agent with its answer: the device holds two of them."""
        return self.device_tokens // 2

    @property
    def mix_prompt_tokens(self) -> int:
        """Length of the prompts that decode: short, so that they decode most of the time."""
        return self.prompt_tokens // 32

    @property
    def hit_bytes(self) -> int:
        """KV of one prompt."""
        return self.prompt_tokens * self.model.kv_bytes_per_token

    def text(self, length: int, *what: object) -> list[int]:
        """Token ids, the same for the same ``what``."""
        source = random.Random(f"{self.seed} {' '.join(map(str, what))}")
        vocabulary = range(FIRST_TEXT_TOKEN, self.model.vocab_size)
        return source.choices(vocabulary, k=length)

    def with_other_texts(self, number: int) -> "Plan":
        """The same work with other prompts, the same for the same ``number``; 0: this plan's."""
        return replace(self, seed=self.seed + number * 1_000_003)

    def with_prompts_of(self, num_tokens: int) -> "Plan":
        """The same work with prompts of ``num_tokens``, rounded up to whole blocks. The device has
        room for two of them, and for the requests that decode beside."""
        size = self.block_size
        plan = replace(self, prompt_tokens=-(-num_tokens // size) * size)
        decodes = self.mix_decodes * (plan.mix_prompt_tokens + self.mix_answer_tokens)
        room = 2 * (plan.prompt_tokens + max(self.new_tokens)) + decodes
        return replace(plan, device_tokens=max(self.device_tokens, -(-room // size) * size))

    def history_length(self, user: int) -> int:
        """Length of the first message of ``user``, without the shared prefix."""
        return random.Random(f"{self.seed} history {user}").randint(*self.history_tokens)


H200 = Plan(
    model=LLAMA_8B,
    device="cuda",
    block_size=16,
    device_tokens=65536,
    host_bytes=40 << 30,
    prompt_tokens=8192,
    first_tokens=1,
    new_tokens=(1, 512, 2048),
    idle_prompts=48,
    idle_prompt_tokens=1024,
    idle_answer_tokens=64,
    mix_decodes=8,
    mix_answer_tokens=400,
    mix_hits=6,
    users=24,
    users_at_once=12,
    turns=5,
    system_tokens=512,
    history_tokens=(4000, 8000),
    message_tokens=200,
    turn_answer_tokens=64,
    agents=16,
    trace_requests=200,
    trace_scale=8,
    trace_pause=5.0,
    settle_seconds=0.5,
    think_seconds=0.05,
    compare_shapes=False,
    rounds=3,
    graphs=True,
)
"""8 billion parameters on one GPU, with prompts whose prefill takes 0.2 s."""
CPU = Plan(
    model=SMALL,
    device="cpu",
    block_size=32,
    device_tokens=4096,
    host_bytes=256 << 20,
    prompt_tokens=1024,
    first_tokens=4,
    new_tokens=(1, 64),
    idle_prompts=6,
    idle_prompt_tokens=256,
    idle_answer_tokens=16,
    mix_decodes=3,
    mix_answer_tokens=64,
    mix_hits=3,
    users=6,
    users_at_once=4,
    turns=3,
    system_tokens=128,
    history_tokens=(1000, 1500),
    message_tokens=64,
    turn_answer_tokens=16,
    agents=8,
    trace_requests=40,
    trace_scale=64,
    trace_pause=1.0,
    settle_seconds=0.2,
    think_seconds=0.05,
    compare_shapes=True,
    rounds=2,
)
"""A small Llama on two cores: shows that everything works, and the direction of ratios."""
PRESETS = {"h200": H200, "cpu": CPU}
