"""What the demo runs: the model's shape, the KV space, and what every user says.

A plan is plain data that follows from the command line alone, so that both runs, each in a
process of its own, work on the same one.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any

FIRST_TEXT_TOKEN = 3
"""Ids below this one are left to the model's special tokens; no user says them."""


@dataclass(frozen=True)
class ModelShape:
    """Arguments of ``save_random_model`` that decide how much a prefill costs."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, in float32."""
        head_dim = self.hidden_size // self.num_heads
        return 2 * self.num_layers * self.num_kv_heads * head_dim * 4


@dataclass(frozen=True)
class Plan:
    """One demo. Every length is in tokens.

    All users share the first ``shared_tokens`` of their first message, as they would share a
    system prompt; the rest is their own.
    """

    model: ModelShape
    users: int
    turns: int
    seed: int
    shared_tokens: int
    first_message_tokens: int
    message_tokens: int
    answer_tokens: int
    block_size: int

    @property
    def requests(self) -> int:
        return self.users * self.turns

    @property
    def longest_context(self) -> int:
        """One conversation after its last answer."""
        later = (self.turns - 1) * (self.message_tokens + self.answer_tokens)
        return self.first_message_tokens + self.answer_tokens + later

    @property
    def max_model_len(self) -> int:
        return _round_up(self.longest_context, self.block_size)

    @property
    def device_blocks(self) -> int:
        """KV space of the engine: the longest conversation and an eighth, and the null block."""
        return _round_up(self.max_model_len * 9 // 8, self.block_size) // self.block_size + 1

    @property
    def device_tokens(self) -> int:
        """What the engine's KV space holds."""
        return (self.device_blocks - 1) * self.block_size

    @property
    def conversation_tokens(self) -> int:
        """All conversations after their last answers, what they share counted once."""
        own = self.longest_context - self.shared_tokens
        return self.shared_tokens + self.users * own

    @property
    def host_bytes(self) -> int:
        """Room for every conversation in full, in the host tier."""
        tokens = self.users * (self.max_model_len + self.block_size)
        return _round_up(tokens * self.model.kv_bytes_per_token, 1 << 20)

    def first_messages(self) -> list[list[int]]:
        """The opening message of every user."""
        shared = self._say(self.shared_tokens, "shared")
        own = self.first_message_tokens - self.shared_tokens
        return [shared + self._say(own, f"user {user}") for user in range(self.users)]

    def message(self, user: int, turn: int) -> list[int]:
        """What ``user`` says in ``turn``, which counts from 0 and is not the first one."""
        return self._say(self.message_tokens, f"user {user} turn {turn}")

    def _say(self, length: int, who: str) -> list[int]:
        source = random.Random(f"{self.seed} {who}")
        return [source.randrange(FIRST_TEXT_TOKEN, self.model.vocab_size) for _ in range(length)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        return cls(**{**data, "model": ModelShape(**data["model"])})


def full_plan(users: int, turns: int, seed: int) -> Plan:
    """Prompts whose prefill takes seconds on two cores."""
    return Plan(
        model=ModelShape(
            vocab_size=2048, hidden_size=1024, num_layers=6, num_heads=16, num_kv_heads=4
        ),
        users=users,
        turns=turns,
        seed=seed,
        shared_tokens=256,
        first_message_tokens=1792,
        message_tokens=448,
        answer_tokens=24,
        block_size=32,
    )


def quick_plan(users: int, turns: int, seed: int) -> Plan:
    """The same on a tiny model, to see that everything works: no prefill takes long."""
    return Plan(
        model=ModelShape(
            vocab_size=512, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2
        ),
        users=users,
        turns=turns,
        seed=seed,
        shared_tokens=64,
        first_message_tokens=256,
        message_tokens=64,
        answer_tokens=8,
        block_size=32,
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
