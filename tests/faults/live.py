"""LiveEngine: a vLLM engine in this process, driven step by step while copies fail."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from simple_offload.scheduler.manager import OffloadScheduler
from tests.engine.requests import answer_of, engine_args, greedy, prompt_of
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.faults.backend import FaultyBackend
from tests.faults.connector import FAULTS_KEY, SimpleCPUOffloadConnector
from tests.faults.plan import Fault, FaultPlan
from tests.simulation import integrity

STEP_LIMIT = 20_000
"""Limit of a round's steps; a longer round never ends."""


class Phase(BaseModel):
    """A part of an engine's life, which ends at rest."""

    model_config = ConfigDict(frozen=True)

    answers: dict[str, Answer]
    errors: list[str]
    """Ids of requests that ended in an error."""
    log: list[str]
    """The connector's log messages, from level WARNING on."""
    injected: dict[str, int]
    held: dict[str, int]
    """Number of referenced blocks at its end, by pool."""
    num_cached: int
    """Number of host blocks at its end that a lookup can find."""
    integrity_problem: str | None
    facts: dict[str, Any]


class ScenarioResult(BaseModel):
    """The phases of an engine, and its end."""

    phases: dict[str, Phase] = {}
    last_facts: dict[str, Any] = {}
    """Facts at a shutdown with work in flight."""
    num_open_copies: int = 0
    """Late copies that the shutdown did not wait for."""
    surviving_threads: list[str] = []
    error: str | None = None
    """Traceback of the exception that ended the scenario."""


class LiveEngine:
    """One engine. ``end_phase`` ends a phase, to which the calls before it belong."""

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
        """The worker's connector; None without one, or with the worker in another process."""
        if not has_kv_transfer_group():
            return None
        connector: object = get_kv_transfer_group()
        assert isinstance(connector, SimpleCPUOffloadConnector)
        return connector

    @property
    def backend(self) -> FaultyBackend:
        """The worker's backend."""
        assert self.connector is not None
        assert self.connector.faults is not None
        return self.connector.faults

    def inject(self, *faults: Fault) -> None:
        """Inject these faults, and no others, from now on."""
        self.backend.set_plan(FaultPlan(faults=faults))

    # Requests

    def submit(self, asks: Iterable[Ask]) -> None:
        """Add requests."""
        for ask in asks:
            request_id = f"{self._num_phases}/{ask.id}"
            self._open[request_id] = ask
            self.llm.add_request(request_id, prompt_of(ask.prompt), greedy(ask.max_tokens))

    def step(self) -> int:
        """One engine step; the number of its outputs."""
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
        """Step until the engine is at rest."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def play(self, asks: Iterable[Ask]) -> None:
        """Submit and finish."""
        self.submit(asks)
        self.finish()

    def abort_all(self) -> None:
        """Abort every open request."""
        self.llm.abort_request(list(self._open))
        self._open.clear()

    # Resets

    def reset(self, *, both: bool = False, running: bool = False) -> bool | str:
        """Whether vLLM reset its prefix cache, or the message of its exception."""
        try:
            return bool(self.llm.reset_prefix_cache(running, both))
        except RuntimeError as error:
            return str(error)

    def reset_device(self) -> None:
        """Drain, and reset the device's prefix cache: the next hits come from the host."""
        self.drain()
        assert self.reset() is True

    # State

    @property
    def num_in_flight(self) -> int:
        """Number of transfers that some rank has not reported."""
        assert self.offload is not None
        return len(integrity.ids_in_flight(self.offload))

    def num_loading(self) -> int:
        """Number of loads that are planned or in flight."""
        return self._num_pending("_loads")

    def num_storing(self) -> int:
        """Number of stores in flight."""
        return self._num_pending("_stores")

    def num_cached(self) -> int:
        """Number of host blocks that a lookup can find."""
        assert self.offload is not None
        return self.offload.tier.num_used

    def end_phase(self, name: str, **facts: Any) -> None:
        """Come to rest, record the state, and begin another phase."""
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
            log=self._log.drain_messages(),
            injected=injected,
            held=self._held(),
            num_cached=0 if offload is None else self.num_cached(),
            integrity_problem=None if offload is None else _integrity_problem(offload),
            facts=facts,
        )
        self._answers, self._errors = {}, []
        self._num_phases += 1

    def set_last_facts(self, **facts: Any) -> None:
        """Record the facts at the end of a scenario that leaves work in flight."""
        self._result.last_facts = facts

    def shut_down(self) -> None:
        """Shut the engine down, as vLLM does."""
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
            pools["host"] = integrity.pool_of(self.offload.tier)
        # The null block is always referenced.
        return {
            name: pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            for name, pool in pools.items()
        }


class _ConnectorLog(logging.Handler):
    """Collects the connector's log messages in this process, from WARNING on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        self._logger = logging.getLogger("vllm")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("vllm.simple_offload"):
            self._messages.append(record.getMessage())

    def drain_messages(self) -> list[str]:
        """The messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()


def with_faults(num_host_blocks: int, faults: Sequence[Fault]) -> dict[str, Any]:
    """``kv_connector_extra_config`` of the connector with faults."""
    plan = FaultPlan(faults=tuple(faults)).model_dump(mode="json")
    return {"num_cpu_blocks": num_host_blocks, FAULTS_KEY: plan}


def _integrity_problem(offload: OffloadScheduler) -> str | None:
    try:
        integrity.check_at_rest(offload)
    except AssertionError as problem:
        return str(problem)
    return None
