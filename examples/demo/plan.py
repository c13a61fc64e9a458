"""The plan of the demo: the model's shape, the KV space, and the users' messages.

A plan is plain data that follows from the command line alone, so that both runs, each in a
process of its own, work on the same one.
"""

from dataclasses import dataclass

from examples.bench.models import ModelShape
from examples.serve_bench.tokens import WordVocabulary


@dataclass(frozen=True)
class Plan:
    """One demo. Every length is in tokens.

    All users share the first ``shared_tokens`` of their first message, as they would share a
    system prompt; the rest is their own.
    """

    model: ModelShape
    users: int
    turns: int
    shared_tokens: int
    first_message_tokens: int
    message_tokens: int
    answer_tokens: int
    block_size: int = 32
    seed: int = 0

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
        """Capacity of the engine's KV space."""
        return (self.device_blocks - 1) * self.block_size

    @property
    def conversation_tokens(self) -> int:
        """All conversations after their last answers, the shared part counted once."""
        own = self.longest_context - self.shared_tokens
        return self.shared_tokens + self.users * own

    @property
    def host_bytes(self) -> int:
        """Room for every conversation in full, in the host tier."""
        tokens = self.users * (self.max_model_len + self.block_size)
        return _round_up(tokens * self.model.kv_bytes_per_token, 1 << 20)

    def first_messages(self) -> list[list[int]]:
        """The opening message of every user."""
        shared = self._text(self.shared_tokens, "shared")
        own = self.first_message_tokens - self.shared_tokens
        return [shared + self._text(own, f"user {user}") for user in range(self.users)]

    def message(self, user: int, turn: int) -> list[int]:
        """The message of ``user`` in ``turn``, which counts from 0 and is not the first one."""
        return self._text(self.message_tokens, f"user {user} turn {turn}")

    def _text(self, length: int, who: str) -> list[int]:
        return WordVocabulary(self.model.vocab_size).random(length, self.seed, who)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


FULL = Plan(
    model=ModelShape(2048, 1024, num_layers=6, num_heads=16, num_kv_heads=4),
    users=4,
    turns=5,
    shared_tokens=256,
    first_message_tokens=1792,
    message_tokens=448,
    answer_tokens=24,
)
"""Prompts whose prefill takes seconds on two cores."""
QUICK = Plan(
    model=ModelShape(512, 128, num_layers=3, num_heads=4, num_kv_heads=2),
    users=3,
    turns=3,
    shared_tokens=64,
    first_message_tokens=256,
    message_tokens=64,
    answer_tokens=8,
)
"""Shows that everything works: no prefill takes long."""
