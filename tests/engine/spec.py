"""What an engine is asked to do in a child process, and what it answered: both travel as JSON."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Ask(BaseModel):
    """One request of a round."""

    model_config = ConfigDict(frozen=True)

    id: str
    prompt: tuple[int, ...]
    follows: str | None = None
    """Id of an earlier request; its whole prompt and answer come before ``prompt``."""
    max_tokens: int
    cache_salt: str | None = None
    """Only requests of the same salt may share cached blocks."""
    sampling: dict[str, Any] = {}
    """SamplingParams other than the usual. Of several answers, one comes behind the other."""
    abort_after: int | None = None
    """Abort the request once it has this many tokens; its answer is then not reported."""


class Round(BaseModel):
    """Requests that the engine finishes before the next round begins."""

    model_config = ConfigDict(frozen=True)

    asks: tuple[Ask, ...]
    together: bool
    """Whether all requests are handed over at once, or each after the one before has ended."""
    reset: Literal["none", "device", "both"] = "none"
    """Prefix caches to empty before the round."""
    corrupt_a_block: bool = False
    """Overwrite one host block just before the first load of this round copies it."""
    failing_copies: int | None = None
    """From this round on, every so many-th copy raises an exception."""


class EngineSpec(BaseModel):
    """One engine, from its start over its rounds to its end."""

    model_config = ConfigDict(frozen=True)

    model: Path
    arguments: dict[str, Any]
    """For vLLM's EngineArgs."""
    connector: dict[str, Any] | None
    """``kv_connector_extra_config``; None runs without a connector."""
    transfer_arguments: dict[str, Any] = {}
    """For vLLM's KVTransferConfig, beyond what selects the connector."""
    rounds: tuple[Round, ...]


class Answer(BaseModel):
    """What one request got. One entry a token in the three lists."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # of a model that reads a wrong block

    tokens: list[int]
    logprobs: list[float]
    leads: list[float]
    """How far the best token's logprob lay before the second best's."""
    num_cached_tokens: int


class PoolState(BaseModel):
    """Blocks of one pool once nothing runs. The null block counts in neither."""

    free: int
    total: int


class EngineResult(BaseModel):
    """What one engine did. Counts cover its whole life."""

    rounds: list[dict[str, Answer]] = []
    """Answers by request id, one dict for each round."""
    metrics: dict[str, float] = {}
    """vLLM's counters, and ours, without the "vllm:" and without "_total"."""
    device_pool: PoolState | None = None
    host_pool: PoolState | None = None
    integrity_problem: str | None = None
    """What the connector's own check of its books had to say against them."""
    loads: list[tuple[int, int]] = []
    """The first and the last host block of each load, as the ranks number them."""
    corrupted_blocks: int = 0
    failed_copies: int = 0
    surviving_threads: list[str] = []
    """Names of threads that the engine started and its shutdown left alive."""
    warnings: list[str] = []
    """What the connector logged in this process, of level WARNING and above."""
    started: bool = False
    error: str | None = None
    """Traceback of what ended the start or the rounds early."""
    log: Path | None = None
    """What the child process printed, other engines' lines included."""


class Job(BaseModel):
    """What one child process does: its engines run one after another."""

    model_config = ConfigDict(frozen=True)

    engines: tuple[EngineSpec, ...]


class JobResult(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")

    results: list[EngineResult]
