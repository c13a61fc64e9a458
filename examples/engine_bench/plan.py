"""What every contender has to do: the model's shape, the sizes, and what is asked.

A plan is plain data, which travels to each engine's process as JSON; all prompts follow from
its seed, so each contender is asked the same.
"""

import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from examples.random_model import save_random_model

Part = Literal["ttft", "idle", "mix", "turns"]
PARTS: tuple[Part, ...] = get_args(Part)

FIRST_TEXT_TOKEN = 10
"""Ids below this one are left to the model's special tokens."""


@dataclass(frozen=True)
class ModelShape:
    """A Llama."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dtype: Literal["float32", "bfloat16"]

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        element = 4 if self.dtype == "float32" else 2
        head_dim = self.hidden_size // self.num_heads
        return 2 * self.num_layers * self.num_kv_heads * head_dim * element


@dataclass(frozen=True)
class Plan:
    """One bench. Lengths are in tokens, answers included where the name says so."""

    model: ModelShape
    device: Literal["cuda", "cpu"]
    block_size: int
    device_tokens: int
    """What the device's KV space holds."""
    host_bytes: int
    """Of the host tier, for all ranks together."""
    prompt_tokens: int
    """Of a prompt that comes back as a hit."""
    first_tokens: int
    """Answered to each of those; contenders must agree on them."""
    idle_prompts: int
    idle_prompt_tokens: int
    idle_answer_tokens: int
    mix_decodes: int
    """Requests that decode while others hit."""
    mix_answer_tokens: int
    mix_hits: int
    users: int
    users_at_once: int
    """Whose conversations the device cannot hold together."""
    turns: int
    system_tokens: int
    """Which all users share."""
    history_tokens: tuple[int, int]
    """A user's first message: at least and at most."""
    message_tokens: int
    turn_answer_tokens: int
    settle_seconds: float
    """Pause before a part. Contenders go on storing after the last answer, none says until
    when, and what they store would disturb what is measured next."""
    think_seconds: float
    """Between an answer and the user's next message."""
    compare_shapes: bool
    """Whether answers must be the same even where contenders had other numbers of cached
    tokens. With dummy weights in bfloat16, other shapes of a step decide ties another way."""
    graphs: bool = False
    tensor_parallel: int = 1
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
            self.prompt_tokens + self.first_tokens,
            self.idle_prompt_tokens + self.idle_answer_tokens,
            self.mix_prompt_tokens + self.mix_answer_tokens,
            longest_chat,
        )
        return -(-longest // self.block_size) * self.block_size

    @property
    def mix_prompt_tokens(self) -> int:
        """Of the requests that decode: short, so that they decode most of the time."""
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

    def history_length(self, user: int) -> int:
        """Of the first message of ``user``, without what all share."""
        return random.Random(f"{self.seed} history {user}").randint(*self.history_tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        low, high = data["history_tokens"]
        return cls(**{**data, "model": ModelShape(**data["model"]), "history_tokens": (low, high)})


def h200_plan() -> Plan:
    """A Llama of 8 billion parameters on one GPU, with prompts whose prefill takes 0.2 s."""
    return Plan(
        model=ModelShape(
            vocab_size=32000,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            dtype="bfloat16",
        ),
        device="cuda",
        block_size=16,
        device_tokens=65536,
        host_bytes=40 << 30,
        prompt_tokens=8192,
        first_tokens=1,
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
        settle_seconds=0.5,
        think_seconds=0.05,
        compare_shapes=False,
        graphs=True,
    )


def cpu_plan() -> Plan:
    """A small Llama on two cores: shows that everything works, and which way times go."""
    return Plan(
        model=ModelShape(
            vocab_size=2048,
            hidden_size=512,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            dtype="float32",
        ),
        device="cpu",
        block_size=32,
        device_tokens=4096,
        host_bytes=256 << 20,
        prompt_tokens=1024,
        first_tokens=4,
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
        settle_seconds=0.2,
        think_seconds=0.05,
        compare_shapes=True,
    )


PRESETS = {"h200": h200_plan, "cpu": cpu_plan}
ROUNDS = {"h200": 3, "cpu": 2}
"""Of each contender, unless told otherwise."""


def save_model(plan: Plan, directory: Path) -> None:
    """Write what vLLM needs of the model: on a GPU a configuration, which vLLM fills with dummy
    weights; on the CPU small random weights, on which what the model says depends."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shape = plan.model
    if plan.device == "cpu":
        save_random_model(
            directory,
            "llama",
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            max_model_len=plan.max_model_len,
            seed=plan.seed,
        )
        return
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 7 // 2,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=plan.max_model_len,
        dtype=shape.dtype,
        tie_word_embeddings=False,
    ).save_pretrained(directory)
