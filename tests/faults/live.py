"""LiveEngine: a vLLM engine in this process, driven step by step while copies go wrong."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from simple_offload.scheduler.manager import OffloadScheduler
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.faults.backend import FaultyBackend
from tests.faults.connector import FAULTS_KEY, SimpleCPUOffloadConnector
from tests.faults.plan import Fault, FaultPlan

STEP_LIMIT = 20_000
"""An engine that takes more steps for a round never ends it."""


AnyArgs = TypeVar("AnyArgs", bound=EngineArgs)


class Phase(BaseModel):
    """What happened from one point in an engine's life to another, at which it was at rest."""

    model_config = ConfigDict(frozen=True)

    answers: dict[str, Answer]
    errors: list[str]
    """Requests that ended in an error."""
    log: list[str]
    """What the connector logged, of level WARNING and above."""
    injected: dict[str, int]
    held: dict[str, int]
    """Blocks of each pool that somebody still refers to."""
    num_cached: int
    """Host blocks that can be found."""
    integrity_problem: str | None
    facts: dict[str, Any]


class ScenarioResult(BaseModel):
    """What an engine did, in phases, and how it ended."""

    phases: dict[str, Phase] = {}
    last_facts: dict[str, Any] = {}
    """How things stood when the engine was shut down in the midst of its work."""
    num_open_copies: int = 0
    """Late copies that the shutdown has not waited for."""
    surviving_threads: list[str] = []
    error: str | None = None
    """Traceback of what ended the scenario early."""


class LiveEngine:
    """One engine. ``phase`` ends a phase; the calls before it belong to it."""

    def __init__(self, spec: EngineSpec, result: ScenarioResult) -> None:
        self._result = result
        self._log = _ConnectorLog()
        self._answers: dict[str, Answer] = {}
        self._errors: list[str] = []
        self._open: dict[str, Ask] = {}
        self._num_phases = 0
        self.llm = LLMEngine.from_engine_args(engine_args(spec, EngineArgs))
        core: Any = self.llm.engine_core
        self.core = core.engine_core
        self.scheduler = self.core.scheduler
        self.offload: OffloadScheduler | None = None
        if self.scheduler.connector is not None:
            self.offload = self.scheduler.connector.scheduler

    @property
    def connector(self) -> SimpleCPUOffloadConnector | None:
        """The connector of the worker, if that is in this process and has one."""
        if not has_kv_transfer_group():
            return None
        connector: object = get_kv_transfer_group()
        assert isinstance(connector, SimpleCPUOffloadConnector)
        return connector

    @property
    def backend(self) -> FaultyBackend:
        """What the worker copies with."""
        assert self.connector is not None
        assert self.connector.faults is not None
        return self.connector.faults

    def follow(self, *faults: Fault) -> None:
        """Let these faults, and no others, happen from now on."""
        self.backend.follow(FaultPlan.of(*faults))

    # Requests

    def submit(self, asks: Iterable[Ask]) -> None:
        """Hand requests over."""
        for ask in asks:
            request_id = f"{self._num_phases}/{ask.id}"
            self._open[request_id] = ask
            prompt = TokensPrompt(prompt_token_ids=list(ask.prompt))
            self.llm.add_request(request_id, prompt, greedy(ask.max_tokens))

    def step(self) -> int:
        """One engine step; how many outputs came of it."""
        outputs = self.llm.step()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            if not output.finished or (ask := self._open.pop(output.request_id, None)) is None:
                continue
            if output.outputs[0].finish_reason == "error":
                self._errors.append(ask.id)
            else:
                self._answers[ask.id] = answer_of(output)
        return len(outputs)

    def step_until(self, condition: Callable[[], object]) -> None:
        """Step until ``condition`` holds; RuntimeError if it never does."""
        for _ in range(STEP_LIMIT):
            if condition():
                return
            if not self.scheduler.has_requests():
                raise RuntimeError(f"the engine is at rest; open: {list(self._open)}")
            self.step()
        raise RuntimeError(f"not reached within {STEP_LIMIT} steps; open: {list(self._open)}")

    def finish(self) -> None:
        """Step until every request has ended. Transfers may go on."""
        self.step_until(lambda: not self._open)

    def drain(self) -> None:
        """Step until the engine has nothing left to do."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def play(self, asks: Iterable[Ask]) -> None:
        """Submit and finish."""
        self.submit(asks)
        self.finish()

    def abort_all(self) -> None:
        """Give up every request that is open."""
        self.llm.abort_request(list(self._open))
        self._open.clear()

    # Resets

    def reset(self, *, both: bool = False, running: bool = False) -> bool | str:
        """Whether vLLM could empty its prefix cache, or what it raised."""
        try:
            return bool(self.llm.reset_prefix_cache(running, both))
        except RuntimeError as error:
            return str(error)

    def forget_device(self) -> None:
        """Drain, and empty the device's prefix cache: what is asked next comes from the host."""
        self.drain()
        assert self.reset() is True

    # Books

    @property
    def num_in_flight(self) -> int:
        """Transfers that some rank has not reported."""
        assert self.offload is not None
        return self.offload.num_in_flight

    def num_loading(self) -> int:
        """Loads that are planned or in flight."""
        return self._num_pending("_loads")

    def num_storing(self) -> int:
        """Stores in flight."""
        return self._num_pending("_stores")

    def num_cached(self) -> int:
        """Host blocks that can be found."""
        assert self.offload is not None
        return sum(block.block_hash is not None for block in self.offload.tier.pool.blocks)

    def phase(self, name: str, **facts: Any) -> None:
        """Come to rest, look at the books, and begin another phase."""
        self.finish()
        self.drain()
        offload = self.offload
        injected: dict[str, int] = {}
        if self.connector is not None:
            injected = dict(self.backend.injected)
            self.backend.injected.clear()
        self._result.phases[name] = Phase(
            answers=self._answers,
            errors=self._errors,
            log=self._log.take(),
            injected=injected,
            held=self._held(),
            num_cached=0 if offload is None else self.num_cached(),
            integrity_problem=None if offload is None else _integrity_problem(offload),
            facts=facts,
        )
        self._answers, self._errors = {}, []
        self._num_phases += 1

    def end_here(self, **facts: Any) -> None:
        """The scenario ends in the midst of things."""
        self._result.last_facts = facts

    def shut_down(self) -> None:
        """End the engine, as vLLM does."""
        try:
            self.llm.engine_core.shutdown()
        finally:
            self._log.close()

    def _num_pending(self, side: str) -> int:
        pending: dict[int, object] = getattr(self.offload, side)._in_flight
        return len(pending)

    def _held(self) -> dict[str, int]:
        pools = {"device": self.scheduler.kv_cache_manager.block_pool}
        if self.offload is not None:
            pools["host"] = self.offload.tier.pool
        # The null block is nobody's.
        return {
            name: pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            for name, pool in pools.items()
        }


class _ConnectorLog(logging.Handler):
    """Collects what the connector logs in this process, from WARNING on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        self._logger = logging.getLogger("vllm")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("vllm.simple_offload"):
            self._messages.append(record.getMessage())

    def take(self) -> list[str]:
        """What has been collected since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()


def engine_args(spec: EngineSpec, kind: type[AnyArgs]) -> AnyArgs:
    """As the engine tests have them, with the connector that can fail."""
    transfer = None
    if spec.connector is not None:
        transfer = KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_connector_module_path="tests.faults.connector",
            kv_connector_extra_config=spec.connector,
            **{"kv_role": "kv_both", **spec.transfer_arguments},
        )
    return kind(model=str(spec.model), kv_transfer_config=transfer, **spec.arguments)


def with_faults(num_host_blocks: int, faults: Sequence[Fault]) -> dict[str, Any]:
    """Extra configuration of the connector with faults."""
    plan = FaultPlan.of(*faults).model_dump(mode="json")
    return {"num_cpu_blocks": num_host_blocks, FAULTS_KEY: plan}


def greedy(max_tokens: int) -> SamplingParams:
    """The best token, always; with what it took to be the best."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2, detokenize=False
    )


def answer_of(output: RequestOutput) -> Answer:
    """A request's answer so far."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    at_each = [
        {token: entry.logprob for token, entry in (at or {}).items()}
        for at in completion.logprobs or ()
    ]
    ranked = [sorted(at.values(), reverse=True) for at in at_each]
    return Answer(
        tokens=tokens,
        logprobs=[at[token] for at, token in zip(at_each, tokens, strict=True)],
        leads=[best - second for best, second, *_ in ranked],
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _integrity_problem(offload: OffloadScheduler) -> str | None:
    try:
        offload.check_integrity()
    except AssertionError as problem:
        return str(problem)
    in_flight, followed = offload.num_in_flight, offload.num_followed
    if in_flight or followed:
        return f"{in_flight} transfers in flight, {followed} requests or hits followed, at rest"
    return None
