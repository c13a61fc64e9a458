"""What every contender has to do: the model, the sizes, the conversations and who holds them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from examples.engine_bench.contenders import Contender
from examples.multi_turn.conversations import Conversation
from examples.multi_turn.model import LLAMA_8B, QWEN3_14B, SMALL, Shape

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Plan:
    """One benchmark. Lengths are in tokens."""

    device: Device
    shape: Shape | None
    """Of a model that is made; None where ``model`` names one that exists."""
    model: str | None
    block_size: int
    device_tokens: int | None
    """What the device's KV space holds; None: all conversations at once."""
    host_bytes: int
    """Of the host tier, for all ranks together."""
    settings: Mapping[str, Any]
    """The conversations, as a file would have them."""
    clients: int
    """Who ask at the same time, each one thing at a time."""
    active: int
    """Conversations that have begun and not ended, of all clients together."""
    rounds: int
    """How often the conversations are replayed on one server, from empty caches each time."""
    seed: int = 0
    tensor_parallel: int = 1

    @property
    def compares_answers(self) -> bool:
        """Whether contenders have to say the same. With dummy weights in bfloat16, other shapes
        of a step decide ties another way."""
        return self.shape is not None and self.shape.dtype == "float32"

    @property
    def expects_hits(self) -> bool:
        """Whether a connector has to find something that the device has lost."""
        return self.device_tokens is not None

    def num_device_blocks(self, conversations: Sequence[Conversation]) -> int:
        """Of the KV space, vLLM's null block included. Never too few for one conversation."""
        each = [self._blocks(conversation.num_tokens) for conversation in conversations]
        if self.device_tokens is None:
            return sum(each) + 1
        return max(*each, self._blocks(self.device_tokens)) + 1

    def max_model_len(self, conversations: Sequence[Conversation]) -> int:
        longest = max(conversation.num_tokens for conversation in conversations)
        return self._blocks(longest) * self.block_size

    def server_arguments(
        self, contender: Contender, conversations: Sequence[Conversation]
    ) -> dict[str, Any]:
        """For vLLM's command line."""
        return {
            "dtype": self.shape.dtype if self.shape else "auto",
            "load_format": self.shape.load_format if self.shape else "auto",
            "block_size": self.block_size,
            "max_model_len": self.max_model_len(conversations),
            "num_gpu_blocks_override": self.num_device_blocks(conversations),
            "enable_prefix_caching": True,
            "tensor_parallel_size": self.tensor_parallel,
            "enforce_eager": self.device == "cpu",
            "enable_prompt_tokens_details": True,
            "disable_uvicorn_access_log": True,
            "kv_transfer_config": contender.transfer_config(self.host_bytes),
        }

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def cpu_plan() -> Plan:
    """A small model on two cores, whose device holds a third of what is talked about."""
    return Plan(
        device="cpu",
        shape=SMALL,
        model=None,
        block_size=32,
        device_tokens=6144,
        host_bytes=512 << 20,
        settings=generated(12, messages=8, common=64, prefix=(1000, 1600), question=64, answer=16),
        clients=2,
        active=12,
        rounds=1,
    )


def h200_plan() -> Plan:
    """8 billion parameters on one GPU that is given a quarter of the KV space it would need."""
    return Plan(
        device="cuda",
        shape=LLAMA_8B,
        model=None,
        block_size=16,
        device_tokens=65536,
        host_bytes=40 << 30,
        settings=generated(
            24, messages=10, common=512, prefix=(4000, 8000), question=200, answer=64
        ),
        clients=12,
        active=24,
        rounds=3,
    )


def fits_plan(device: Device) -> Plan:
    """The control: the device holds everything, so that no connector can help, and none should
    cost anything."""
    plan = h200_plan() if device == "cuda" else cpu_plan()
    return Plan(**{**vars(plan), "device_tokens": None})


def seed_plan() -> Plan:
    """Qwen3-14B's shape, and the conversations of vLLM's own example file, as in
    vllm-ascend#7819. They are small: the device is given room for a third of them."""
    settings = {
        "filetype": "generate_conversations",
        "num_conversations": 24,
        "prompt_input": {
            "num_turns": _uniform(12, 18),
            "common_prefix_num_tokens": _constant(500),
            "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
            "num_tokens": _uniform(120, 160),
        },
        "prompt_output": {"num_tokens": _uniform(80, 120)},
    }
    return Plan(
        device="cuda",
        shape=QWEN3_14B,
        model=None,
        block_size=128,
        device_tokens=24576,
        host_bytes=40 << 30,
        settings=settings,
        clients=8,
        active=24,
        rounds=3,
        seed=1234,
    )


PRESETS: Mapping[str, Callable[[Device], Plan]] = {
    "cpu": lambda _: cpu_plan(),
    "h200": lambda _: h200_plan(),
    "fits": fits_plan,
    "seed": lambda _: seed_plan(),
}
"""By name; each is told which device this machine has."""


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
        "filetype": "generate_conversations",
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
