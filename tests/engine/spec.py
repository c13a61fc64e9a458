"""The work of an engine in a child process, and its results."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

THIS_CONNECTOR: dict[str, Any] = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_connector_module_path": "simple_offload",
    "kv_role": "kv_both",
}
"""For vLLM's KVTransferConfig."""


class Ask(NamedTuple):
    """One request of a round."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    follows: str | None = None
    """Id of an earlier request, whose prompt and answer precede ``prompt``."""
    cache_salt: str | None = None
    """Only requests of the same salt may share cached blocks."""
    sampling: dict[str, Any] | None = None
    """SamplingParams that override the greedy ones. Several completions are concatenated."""
    abort_after: int | None = None
    """Abort the request once its answer has this many tokens; the answer is then not reported."""


class Round(NamedTuple):
    """Requests that finish before the next round begins."""

    asks: tuple[Ask, ...]
    together: bool
    """True adds all requests at once; False adds each when the one before has ended."""
    reset: Literal["none", "device", "both"] = "none"
    """Prefix caches to reset before the round."""
    corrupt_a_block: bool = False
    """Overwrite one host block just before this round's first load copies it."""


class EngineSpec(NamedTuple):
    """One engine: its start, its rounds, its shutdown."""

    model: Path
    arguments: dict[str, Any]
    """For vLLM's EngineArgs."""
    connector: dict[str, Any] | None
    """``kv_connector_extra_config``; None: no connector."""
    transfer_arguments: dict[str, Any]
    """For vLLM's KVTransferConfig; they override those that select the connector."""
    rounds: tuple[Round, ...]
    waits_too_little: bool = False
    """Whether each layer waits for one layer group less than it needs."""


class Answer(NamedTuple):
    """The answer to one request; the three lists have one entry per token."""

    tokens: list[int]
    logprobs: list[float]
    leads: list[float]
    """Logprob of the best token less that of the second best."""
    num_cached_tokens: int = 0

    def beginning(self, length: int) -> "Answer":
        """The answer as far as its first ``length`` tokens."""
        return self._replace(
            tokens=self.tokens[:length],
            logprobs=self.logprobs[:length],
            leads=self.leads[:length],
        )


@dataclass
class EngineResult:
    """The results of one engine, over its whole life."""

    rounds: list[dict[str, Answer]] = field(default_factory=list)
    """Per round: request id -> answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """vLLM's counters and ours, without the prefix "vllm:" and the suffix "_total"."""
    num_host_blocks: int | None = None
    """Host blocks without the null block; None without a host tier."""
    left: list[str] = field(default_factory=list)
    """What the engine held at rest, in words."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """The first and the last host block of each load, in the ranks' numbering."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of the engine's processes, each page once, by the kernel's kind ("Pss_Shmem", ...)."""
    num_corrupted_blocks: int = 0
    surviving_threads: list[str] = field(default_factory=list)
    """Names of the engine's threads that outlived its shutdown."""
    started: bool = False
    error: str | None = None
    """Traceback of the exception that ended the start or the rounds."""
    log: Path | None = None
    """Output of the child process, which includes that of other engines."""
