"""The work of every contender: the model, the sizes, the conversations and their clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from examples.bench.child import Device
from examples.bench.connectors import Contender
from examples.bench.models import LLAMA_8B, QWEN3_14B, SMALL
from examples.bench.served import ServedPlan
from examples.multi_turn.conversations import FILETYPE, Conversation


@dataclass(frozen=True, kw_only=True)
class Plan(ServedPlan):
    """One benchmark. Lengths are in tokens."""

    device_tokens: int | None
    """Capacity of the device's KV space; None: all conversations at once."""
    settings: Mapping[str, Any]
    """The conversations, in the form of an input file."""
    clients: int
    """Number of clients, each of which sends one request at a time."""
    active: int
    """Conversations that have begun and not ended, of all clients together."""
    rounds: int
    """Replays of the conversations on one server, from empty caches each time."""

    @property
    def compares_answers(self) -> bool:
        """True if contenders have to give the same answers. With dummy weights in bfloat16, other
        shapes of a step decide ties another way."""
        return self.shape is not None and self.shape.dtype == "float32"

    @property
    def expects_hits(self) -> bool:
        """True if the device evicts blocks that a connector has to find."""
        return self.device_tokens is not None

    def num_device_blocks(self, conversations: Sequence[Conversation]) -> int:
        """Blocks of the KV space, vLLM's null block included; enough for any one conversation."""
        each = [self.num_blocks(conversation.num_tokens) for conversation in conversations]
        if self.device_tokens is None:
            return sum(each) + 1
        return max(*each, self.num_blocks(self.device_tokens)) + 1

    def max_model_len(self, conversations: Sequence[Conversation]) -> int:
        longest = max(conversation.num_tokens for conversation in conversations)
        return self.num_blocks(longest) * self.block_size

    def server_arguments(
        self, contender: Contender, conversations: Sequence[Conversation]
    ) -> dict[str, Any]:
        """For vLLM's command line."""
        return self.vllm_arguments(
            contender,
            max_model_len=self.max_model_len(conversations),
            num_device_blocks=self.num_device_blocks(conversations),
        )


def generated(
    conversations: int,
    *,
    messages: int,
    common: int,
    prefix: tuple[int, int],
    question: int,
    answer: int,
) -> dict[str, Any]:
    """Settings of conversations which differ in the length of their first message alone."""
    return {
        "filetype": FILETYPE,
        "num_conversations": conversations,
        "prompt_input": {
            "num_turns": _constant(messages),
            "common_prefix_num_tokens": _constant(common),
            "prefix_num_tokens": _uniform(*prefix),
            "num_tokens": _constant(question),
        },
        "prompt_output": {"num_tokens": _constant(answer)},
    }


def _constant(value: int) -> dict[str, Any]:
    return {"distribution": "constant", "value": value}


def _uniform(least: int, most: int) -> dict[str, Any]:
    return {"distribution": "uniform", "min": least, "max": most}


CPU = Plan(
    device="cpu",
    shape=SMALL,
    block_size=32,
    device_tokens=6144,
    host_bytes=512 << 20,
    settings=generated(12, messages=8, common=64, prefix=(1000, 1600), question=64, answer=16),
    clients=2,
    active=12,
    rounds=1,
)
"""A small model on two cores, whose device holds a third of all conversations."""
H200 = Plan(
    device="cuda",
    shape=LLAMA_8B,
    block_size=16,
    device_tokens=65536,
    host_bytes=40 << 30,
    settings=generated(24, messages=10, common=512, prefix=(4000, 8000), question=200, answer=64),
    clients=12,
    active=24,
    rounds=3,
)
"""8 billion parameters on one GPU with a quarter of the KV space for all conversations."""
SEED = Plan(
    device="cuda",
    shape=QWEN3_14B,
    block_size=128,
    device_tokens=24576,
    host_bytes=40 << 30,
    settings={
        "filetype": FILETYPE,
        "num_conversations": 24,
        "prompt_input": {
            "num_turns": _uniform(12, 18),
            "common_prefix_num_tokens": _constant(500),
            "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
            "num_tokens": _uniform(120, 160),
        },
        "prompt_output": {"num_tokens": _uniform(80, 120)},
    },
    clients=8,
    active=24,
    rounds=3,
    seed=1234,
)
"""Qwen3-14B's shape, and the conversations of vLLM's own example file, as in vllm-ascend#7819. They
are small: the device has room for a third of them."""

PRESETS: Mapping[str, Callable[[Device], Plan]] = {
    "cpu": lambda _: CPU,
    "h200": lambda _: H200,
    # The control: the device holds everything, so that no connector can help or should cost.
    "fits": lambda device: replace(H200 if device == "cuda" else CPU, device_tokens=None),
    "seed": lambda _: SEED,
}
"""By name, for this machine's device."""
