"""The work of all contenders: model, sizes and workloads.

A plan is plain data, which travels to each engine's process as JSON. All prompts follow from its
seed, so all contenders get the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from examples.bench.child import Device
from examples.bench.command import CannotStart
from examples.bench.connectors import Contender
from examples.bench.models import LLAMA_8B, QWEN3_14B, SMALL, ModelShape
from examples.serve_bench.agents import AgentPlan
from examples.serve_bench.conversations import (
    FILETYPE,
    Conversation,
    make_conversations,
    read_input,
)
from examples.serve_bench.tokens import ModelVocabulary, Vocabulary, WordVocabulary

Transport = Literal["engine", "http"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
Workload = Literal["ttft", "grown", "idle", "mix", "turns", "traces", "restart"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One benchmark. Lengths are in tokens, times in seconds."""

    workloads: tuple[Workload, ...] = ("turns",)
    transport: Transport = "http"
    """An engine in a process of its own, or ``vllm serve`` and its clients."""
    rounds: int = 1
    """Engines of each contender."""
    repeats: int
    """Times that an engine does the work, with other prompts each time."""
    seed: int = 0
    settle_seconds: float
    """Pause before and after a workload. Contenders go on storing after the last answer, none
    reports the end, and their stores would disturb the next measurement."""

    device: Device
    shape: ModelShape | None
    """Of a model that is made; None for ``model``, or for that of a server that runs."""
    model: str | None = None
    vocab_size: int = 0
    """Of the model of a server that runs."""
    longest_request: int | None = None
    """Longest request with its answer that this server takes; None if not known."""
    block_size: int
    device_tokens: int
    """Capacity of the device's KV space."""
    fits: bool = False
    """True if it holds everything: no connector can help, or should cost."""
    host_bytes: int
    """Size of the host tier, for all ranks together."""
    tensor_parallel: int = 1
    graphs: bool
    compilation: Mapping[str, Any] | None = None
    """vLLM's ``compilation_config``; None: vLLM's default."""

    prompt_tokens: int
    """Of a prompt that comes back as a hit."""
    first_tokens: int
    """Of its answer."""
    new_tokens: tuple[int, ...]
    """By how much such prompts have grown when they come back."""
    idle_prompts: int
    idle_prompt_tokens: int
    idle_answer_tokens: int
    mix_decodes: int
    """Requests that decode while others hit."""
    mix_answer_tokens: int
    mix_hits: int

    settings: Mapping[str, Any]
    """The conversations, in the form of an input file."""
    input_file: str | None = None
    """A file with other ones."""
    clients: int
    """Each sends one request at a time."""
    active: int
    """Conversations that have begun and not ended, of all clients together."""
    longest_conversation: int = 0

    trace: str | None = None
    """File with recorded requests; None without the workload ``traces``."""
    agents: tuple[int, ...]
    """Numbers of agents, measured one after another."""
    seconds: int | None
    """Time of each of these measurements, after every agent's first answer; None: no limit."""
    requests: int | None = None
    """Of each measurement at most, the agents' first ones included."""
    scale: int
    """Recorded tokens for each token that is sent."""
    think_scale: int | None = None
    """Recorded seconds for each second of a pause; None: as many as ``scale`` says."""
    max_pause: int
    """Longest pause of an agent."""

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV of all layers; None if not known."""
        return self.shape.kv_bytes_per_token if self.shape else None

    @property
    def exact(self) -> bool:
        """True if answers must be the same even where contenders had other numbers of cached
        tokens. With dummy weights in bfloat16, other shapes of a step decide ties another way."""
        return self.shape is not None and self.shape.dtype == "float32"

    @property
    def num_hits(self) -> int:
        """Prompts that fill the device one and a half times."""
        return max(4, 3 * self.device_tokens // (2 * self.prompt_tokens))

    @property
    def mix_prompt_tokens(self) -> int:
        """Of the prompts that decode: short, so that they decode most of the time."""
        return max(1, self.prompt_tokens // 32)

    @property
    def max_trace_tokens(self) -> int:
        """Longest request of an agent with its answer: the device holds two of them."""
        return min(self.device_tokens // 2, self.longest_request or self.device_tokens)

    @property
    def longest(self) -> int:
        """Longest request of all workloads with its answer."""
        return max(longest for longest, _ in self._requests)

    @property
    def max_model_len(self) -> int:
        """The same in whole blocks."""
        return self.in_blocks(self.longest)

    @property
    def _requests(self) -> list[tuple[int, int]]:
        """By workload, the length of the longest request, and the number of requests at once."""
        hit = self.prompt_tokens + self.first_tokens
        decode = self.mix_prompt_tokens + self.mix_answer_tokens
        beside = self.mix_decodes + 1
        found: Mapping[Workload, tuple[int, int]] = {
            "ttft": (hit, self.num_hits),
            "grown": (max(hit + max(self.new_tokens), decode), beside),
            "idle": (self.idle_prompt_tokens + self.idle_answer_tokens, self.idle_prompts),
            "mix": (max(hit, decode), beside),
            "turns": (self.longest_conversation, self.clients),
            "traces": (self.max_trace_tokens, max(self.agents)),
            "restart": (hit, 1),
        }
        return [found[workload] for workload in self.workloads]

    def in_blocks(self, tokens: int) -> int:
        """``tokens``, rounded up to whole blocks."""
        return -(-tokens // self.block_size) * self.block_size

    def with_prompts_of(self, tokens: int) -> "Plan":
        """The same work with prompts of ``tokens``, rounded up to whole blocks. The device has
        room for two of them, and for the requests that decode beside."""
        plan = replace(self, prompt_tokens=self.in_blocks(tokens))
        decodes = self.mix_decodes * (plan.mix_prompt_tokens + self.mix_answer_tokens)
        room = 2 * (plan.prompt_tokens + max(self.new_tokens)) + decodes
        return replace(plan, device_tokens=max(self.device_tokens, self.in_blocks(room)))

    def vocabulary(self) -> Vocabulary:
        """Raises OSError or ValueError if the model that the plan names has none."""
        if self.model is None:
            return WordVocabulary(self.shape.vocab_size if self.shape else self.vocab_size)
        folder = Path(self.model)
        # transformers takes a folder that does not exist for a name to download.
        if (folder.is_absolute() or folder.exists()) and not (folder / "config.json").is_file():
            raise FileNotFoundError(f"there is no {folder / 'config.json'}")
        return ModelVocabulary(self.model)

    def conversations(self, vocabulary: Vocabulary, repeat: int = 0) -> list[Conversation]:
        """Of the same lengths for each ``repeat``; generated ones have other words.

        Raises InputError.
        """
        data = self.settings if self.input_file is None else read_input(Path(self.input_file))
        return make_conversations(data, vocabulary, self.seed, repeat)

    def replay(self, agents: int) -> AgentPlan:
        """The agents of one measurement. Raises CannotStart without a trace."""
        if self.trace is None:
            raise CannotStart("--traces: the workload traces needs a file")
        return AgentPlan(
            trace=Path(self.trace),
            agents=agents,
            requests=self.requests,
            scale=self.scale,
            pause_scale=self.think_scale or self.scale,
            max_pause=self.max_pause,
            max_tokens=self.max_trace_tokens,
            seed=self.seed,
        )

    def engine_arguments(self, contender: Contender) -> dict[str, Any]:
        """vLLM's, by their names in Python."""
        room = self.in_blocks(max(self.device_tokens, self.max_model_len))
        return {
            "dtype": self.shape.dtype if self.shape else "auto",
            "load_format": self.shape.load_format if self.shape else "auto",
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "num_gpu_blocks_override": room // self.block_size + 1,  # vLLM's null block
            # The server's default, or a whole prompt.
            "max_num_batched_tokens": max(
                self.prompt_tokens, 2048 if self.device == "cpu" else 8192
            ),
            # vLLM captures no graphs for more requests, so that it starts sooner.
            "max_num_seqs": max(at_once for _, at_once in self._requests),
            "enable_prefix_caching": True,
            "enforce_eager": not self.graphs,
            "tensor_parallel_size": self.tensor_parallel,
            "compilation_config": self.compilation,
            "kv_transfer_config": contender.transfer_config(self.host_bytes),
        }


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
    repeats=1,
    settle_seconds=0.2,
    device="cpu",
    shape=SMALL,
    block_size=32,
    device_tokens=6144,
    host_bytes=512 << 20,
    graphs=False,
    prompt_tokens=1024,
    first_tokens=4,
    new_tokens=(1, 64),
    idle_prompts=6,
    idle_prompt_tokens=256,
    idle_answer_tokens=16,
    mix_decodes=3,
    mix_answer_tokens=64,
    mix_hits=3,
    settings=generated(12, messages=8, common=64, prefix=(1000, 1600), question=64, answer=16),
    clients=2,
    active=12,
    agents=(4, 8),
    seconds=20,
    scale=64,
    max_pause=2,
)
"""A small Llama on two cores, whose device holds a third of all conversations: shows that
everything works, and the direction of ratios."""
H200 = Plan(
    repeats=3,
    settle_seconds=0.5,
    device="cuda",
    shape=LLAMA_8B,
    block_size=16,
    device_tokens=65536,
    host_bytes=40 << 30,
    graphs=True,
    prompt_tokens=8192,
    first_tokens=1,
    new_tokens=(1, 512, 2048),
    idle_prompts=48,
    idle_prompt_tokens=1024,
    idle_answer_tokens=64,
    mix_decodes=8,
    mix_answer_tokens=400,
    mix_hits=6,
    settings=generated(24, messages=10, common=512, prefix=(4000, 8000), question=200, answer=64),
    clients=12,
    active=24,
    agents=(8, 16, 32),
    seconds=60,
    scale=8,
    max_pause=5,
)
"""8 billion parameters on one GPU, with prompts whose prefill takes 0.2 s. The device holds a
third of all conversations."""
SEED = replace(
    H200,
    seed=1234,
    shape=QWEN3_14B,
    block_size=128,
    device_tokens=24576,
    prompt_tokens=4096,
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
)
"""Qwen3-14B's shape, and the conversations of vLLM's own example file, as in vllm-ascend#7819. They
are small: the device has room for a third of them."""
PRESETS: Mapping[str, Mapping[Device, Plan]] = {
    "cpu": {"cpu": CPU, "cuda": CPU},
    "h200": {"cpu": H200, "cuda": H200},
    "fits": {"cpu": replace(CPU, fits=True), "cuda": replace(H200, fits=True)},
    "seed": {"cpu": SEED, "cuda": SEED},
}
"""By name and by this machine's device."""
