"""The work of an engine in a child process, and its results; both travel as JSON."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Ask(BaseModel):
    """One request of a round."""

    model_config = ConfigDict(frozen=True)

    id: str
    prompt: tuple[int, ...]
    follows: str | None = None
    """Id of an earlier request, whose prompt and answer precede ``prompt``."""
    max_tokens: int
    cache_salt: str | None = None
    """Only requests of the same salt may share cached blocks."""
    sampling: dict[str, Any] = {}
    """SamplingParams that override the greedy ones. Several completions are concatenated."""
    abort_after: int | None = None
    """Abort the request once its answer has this many tokens; the answer is then not reported."""


class Round(BaseModel):
    """Requests that finish before the next round begins."""

    model_config = ConfigDict(frozen=True)

    asks: tuple[Ask, ...]
    together: bool
    """True adds all requests at once; False adds each when the one before has ended."""
    reset: Literal["none", "device", "both"] = "none"
    """Prefix caches to reset before the round."""
    corrupt_a_block: bool = False
    """Overwrite one host block just before this round's first load copies it."""


class EngineSpec(BaseModel):
    """One engine: its start, its rounds, its shutdown."""

    model_config = ConfigDict(frozen=True)

    model: Path
    arguments: dict[str, Any]
    """For vLLM's EngineArgs."""
    connector: dict[str, Any] | None
    """``kv_connector_extra_config``; None: no connector."""
    transfer_arguments: dict[str, Any] = {}
    """For vLLM's KVTransferConfig; they override those that select the connector."""
    rounds: tuple[Round, ...]


class Answer(BaseModel):
    """The answer to one request; the three lists have one entry per token."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # after a wrong block

    tokens: list[int]
    logprobs: list[float]
    leads: list[float]
    """Logprob of the best token less that of the second best."""
    num_cached_tokens: int


class PoolState(BaseModel):
    """Blocks of one pool at rest, without the null block."""

    free: int
    total: int


class EngineResult(BaseModel):
    """The results of one engine, over its whole life."""

    rounds: list[dict[str, Answer]] = []
    """Per round: request id -> answer."""
    metrics: dict[str, float] = {}
    """vLLM's counters and ours, without the prefix "vllm:" and the suffix "_total"."""
    device_pool: PoolState | None = None
    host_pool: PoolState | None = None
    integrity_problem: str | None = None
    """The failure of the connector's own check of its state at rest."""
    loads: list[tuple[int, int]] = []
    """The first and the last host block of each load, in the ranks' numbering."""
    corrupted_blocks: int = 0
    surviving_threads: list[str] = []
    """Names of the engine's threads that outlived its shutdown."""
    warnings: list[str] = []
    """The connector's log messages in this process, from level WARNING on."""
    started: bool = False
    error: str | None = None
    """Traceback of the exception that ended the start or the rounds."""
    log: Path | None = None
    """Output of the child process, which includes that of other engines."""


class Job(BaseModel):
    """The engines of one child process, which run one after another."""

    model_config = ConfigDict(frozen=True)

    engines: tuple[EngineSpec, ...]


class JobResult(BaseModel):
    """The results of a job, in the order of its engines."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    results: list[EngineResult]
