"""The work of all contenders: model, sizes and workloads.

A plan is plain data, which travels to each engine's process as JSON. All prompts follow from its
seed, so all contenders get the same.
"""

import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from examples.bench.arguments import MAX_SEED, option, whole
from examples.bench.child import Device
from examples.bench.connectors import Contender
from examples.bench.models import LLAMA_8B, QWEN3_14B, SMALL, ModelShape
from examples.serve_bench.conversations import (
    FILETYPE,
    Conversation,
    make_conversations,
    read_input,
)
from examples.serve_bench.tokens import ModelVocabulary, Vocabulary, WordVocabulary

Transport = Literal["engine", "http"]
Workload = Literal["ttft", "grown", "idle", "mix", "stores", "turns", "traces", "restart"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
Length = int | tuple[int, int] | Mapping[str, Any]
"""Of a message: always the same, drawn from both limits alike, or as the input file says."""


def generated(
    conversations: int,
    *,
    messages: Length,
    common: Length,
    prefix: Length,
    question: Length,
    answer: Length,
) -> dict[str, Any]:
    """Settings of conversations, in the form of an input file."""
    return {
        "filetype": FILETYPE,
        "num_conversations": conversations,
        "prompt_input": {
            "num_turns": _drawn(messages),
            "common_prefix_num_tokens": _drawn(common),
            "prefix_num_tokens": _drawn(prefix),
            "num_tokens": _drawn(question),
        },
        "prompt_output": {"num_tokens": _drawn(answer)},
    }


def _drawn(length: Length) -> Mapping[str, Any]:
    if isinstance(length, int):
        return {"distribution": "constant", "value": length}
    if isinstance(length, tuple):
        return {"distribution": "uniform", "min": length[0], "max": length[1]}
    return length


SETTINGS = generated(12, messages=8, common=64, prefix=(1000, 1600), question=64, answer=16)
"""Of the preset cpu."""


def _file(text: str) -> str:
    return str(Path(text).resolve())


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ArgumentTypeError(
            f"{text!r} is no address such as http://127.0.0.1:8000, with http or https"
        )
    return text.rstrip("/").removesuffix("/v1")


def _gib(text: str) -> int:
    return whole()(text) << 30


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"{text!r} is no JSON object")
    return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One benchmark. Lengths are in tokens, times in seconds. The defaults are the preset cpu."""

    workloads: tuple[Workload, ...] = ("turns",)
    transport: Transport = option(  # noqa: RUF009 - a string
        "http",
        "engine: in the engine's process. http: `vllm serve` and its clients",
        str,
        metavar=None,
        choices=get_args(Transport),
    )
    rounds: int = option(1, "engines of each contender")
    repeats: int = option(1, "of the work by each engine, with other prompts each time")
    seed: int = option(0, "of all prompts", whole(0, MAX_SEED))
    most_client_busy: float = 0.8
    """A client that computes for a larger share of the time measures itself."""
    settle_seconds: float = 0.2
    """Pause before and after a workload. Contenders go on storing after the last answer, none
    reports the end, and their stores would disturb the next measurement."""

    device: Device = "cpu"
    shape: ModelShape | None = SMALL
    """Of a model that is made; None for ``model``, or for that of a server that runs."""
    model: str | None = option(None, "an existing one, by folder or name", str, metavar="NAME")
    mla: bool = option(False, "a model of latent attention (GPU only)", None, action="store_true")
    kv_heads: int | None = option(None, "of a made model; 1 is the share of a rank of 8")
    url: str | None = option(None, "measure this server, which runs already", _url, metavar="URL")
    port: int | None = option(None, "where to serve, by default a free one", whole(1, 65535))
    files: str | None = option(
        None, "for files of contenders, removed at the end", metavar="DIR", parse=str
    )
    vocab_size: int = option(30_000, "tokens of the model at --url", whole(16))
    longest_request: int | None = None
    """Longest request with its answer that this server takes; None if not known."""
    block_size: int = 32
    device_tokens: int = option(6144, "capacity of the device's KV space")
    fits: bool = False
    """True if it holds everything: no connector can help, or should cost."""
    host_bytes: int = option(512 << 20, "host tier of all ranks together", _gib, name="host-gib")
    tensor_parallel: int = option(1, "ranks")
    graphs: bool = option(
        False, "no CUDA graphs", None, name="eager", action="store_const", const=False
    )
    compilation_config: Mapping[str, Any] | None = option(None, "vLLM's", _json, metavar="JSON")

    prompt_tokens: int = option(1024, "of prompts that come back as hits")
    first_tokens: int = 4
    """Of the answer to such a prompt."""
    new_tokens: tuple[int, ...] = (1, 64)
    """By how much such prompts have grown when they come back."""
    idle_prompts: int = 6
    idle_prompt_tokens: int = 256
    idle_answer_tokens: int = 16
    mix_decodes: int = 3
    """Requests that decode while others hit."""
    mix_answer_tokens: int = 64
    mix_hits: int = 3

    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    """The conversations, in the form of an input file."""
    input_file: str | None = option(None, "other conversations", _file, metavar="FILE")
    clients: int = 2
    """Each sends one request at a time."""
    active: int = 12
    """Conversations that have begun and not ended, of all clients together."""
    longest_conversation: int = 0
    own_answers: bool = False
    """True: the history has the engine's answers, not the recorded ones. For an engine in this
    process, and one client."""

    traces: str | None = option(None, "of Claude Code or Mooncake, also .xz", _file, metavar="FILE")
    agents: tuple[int, ...] = option((4, 8), "numbers of them, in turn", whole(1, 4096), nargs="+")
    seconds: int | None = option(20, "of a measurement of agents; no limit with --requests")
    requests: int | None = option(None, "of each measurement, the agents' first ones included")
    scale: int = option(64, "recorded tokens for each one that is sent")
    think_scale: int | None = option(None, "recorded seconds for each one of a pause, or --scale")
    max_pause: int = option(2, "longest pause of an agent, s", whole(0))

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV of all layers, what ranks have alike once; None if not known."""
        return self.shape.kv_bytes_per_token() if self.shape else None

    @property
    def rank_bytes_per_token(self) -> int | None:
        """The same on each rank."""
        return self.shape.kv_bytes_per_token(self.tensor_parallel) if self.shape else None

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
    def num_mix_hits(self) -> int:
        """Hits while others decode: prompts that the device has evicted."""
        return min(self.mix_hits, self.num_hits // 2)

    @property
    def mix_prompt_tokens(self) -> int:
        """Of the prompts that decode: short, so that they decode most of the time."""
        return max(1, self.prompt_tokens // 32)

    @property
    def pause_scale(self) -> int:
        """Recorded seconds for each second of a pause."""
        return self.think_scale or self.scale

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
            "stores": (max(self.idle_prompt_tokens + self.first_tokens, decode), beside),
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

        Raises CannotStart.
        """
        data = self.settings if self.input_file is None else read_input(Path(self.input_file))
        return make_conversations(data, vocabulary, self.seed, repeat)

    def with_conversations(self) -> "Plan":
        """The same with the numbers that follow from the conversations: no more clients than they
        keep busy. Raises CannotStart."""
        lengths = [each.num_tokens for each in self.conversations(self.vocabulary())]
        active = min(self.active, len(lengths))
        plan = replace(
            self,
            active=active,
            clients=min(self.clients, active),
            longest_conversation=max(lengths),
        )
        return replace(plan, device_tokens=sum(map(plan.in_blocks, lengths))) if self.fits else plan

    def engine_arguments(self, contender: Contender) -> dict[str, Any]:
        """vLLM's, by their names in Python."""
        room = self.in_blocks(max(self.device_tokens, self.max_model_len))
        return {
            "dtype": self.shape.dtype if self.shape else "auto",
            "load_format": "auto" if self.exact or self.shape is None else "dummy",
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
            "compilation_config": self.compilation_config,
            "kv_transfer_config": contender.transfer_config(cpu_bytes_to_use=self.host_bytes),
        }


CPU = Plan()
"""A small Llama on two cores, whose device holds a third of all conversations: shows that
everything works, and the direction of ratios."""
H200 = replace(
    CPU,
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
    settings=generated(
        24,
        messages=(12, 18),
        common=500,
        prefix={"distribution": "lognormal", "average": 1000, "max": 5000},
        question=(120, 160),
        answer=(80, 120),
    ),
    clients=8,
)
"""Qwen3-14B's shape, and the conversations of vLLM's own example file, as in vllm-ascend#7819. They
are small: the device has room for a third of them."""
PRESETS: Mapping[str, Plan] = {
    "cpu": CPU,
    "h200": H200,
    "fits": replace(CPU, fits=True),
    "seed": SEED,
}
"""With a GPU, "fits" has the sizes of "h200"."""
