"""LiveEngine: a vLLM engine in this process, driven step by step."""

import gc
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from simple_offload import SimpleCPUOffloadConnector
from simple_offload.scheduler.manager import OffloadScheduler
from tests.engine.spec import THIS_CONNECTOR, Answer, Ask, EngineSpec
from tests.simulation import integrity

STEP_LIMIT = 20_000
"""Steps after which a condition counts as one that never holds."""


def let_copies_go_on() -> None:
    """Pause as vLLM's EngineCoreProc does where a step computes nothing: a loop that never lets go
    of Python's lock for long keeps the copies' threads from it for seconds."""
    time.sleep(0.001)


class LiveEngine:
    """One engine and its requests. The engine core is in this process, so tests can read it."""

    def __init__(self, spec: EngineSpec) -> None:
        transfer = None
        if spec.connector is not None:
            extra = {"kv_connector_extra_config": spec.connector}
            transfer = KVTransferConfig(**THIS_CONNECTOR | extra | spec.transfer_arguments)
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(model=str(spec.model), kv_transfer_config=transfer, **spec.arguments)
        )
        client = self.llm.engine_core
        assert isinstance(client, InprocClient), "the engine core runs in another process"
        self.core = client.engine_core
        scheduler: Any = self.core.scheduler
        self.scheduler = scheduler
        self.offload = _scheduler_side(self.scheduler.connector)
        self.answers: dict[str, Answer] = {}
        """The last answer to each request that ended by itself."""
        self.errors: list[str] = []
        """Ids of requests that ended in an error."""
        self._open: dict[str, Ask] = {}  # by vLLM's id
        self._dialogs: dict[str, tuple[int, ...]] = {}  # ask id -> prompt and answer
        self._numbers = count()

    # Requests

    def submit(self, asks: Iterable[Ask]) -> None:
        """Add requests."""
        for ask in asks:
            prompt = ask.prompt if ask.follows is None else self._dialogs[ask.follows] + ask.prompt
            request_id = f"{next(self._numbers)}/{ask.id}"
            self._open[request_id] = ask._replace(prompt=prompt)
            inputs = TokensPrompt(prompt_token_ids=list(prompt))
            if ask.cache_salt is not None:
                inputs["cache_salt"] = ask.cache_salt
            self.llm.add_request(request_id, inputs, _sampling_of(ask))

    def step(self) -> int:
        """One engine step; the number of its outputs."""
        outputs = self.llm.step()
        if not outputs:
            let_copies_go_on()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            ask = self._open.get(output.request_id)
            if ask is None:
                continue  # aborted while this step ran
            if output.finished:
                del self._open[output.request_id]
                self._end(ask, output)
            elif ask.abort_after is not None and (
                len(output.outputs[0].token_ids) >= ask.abort_after
            ):
                del self._open[output.request_id]
                self.llm.abort_request([output.request_id])
        return len(outputs)

    def step_until(self, condition: Callable[[], object]) -> None:
        """Step until ``condition`` holds; AssertionError if it never does."""
        for _ in range(STEP_LIMIT):
            if condition():
                return
            assert self.scheduler.has_requests(), f"the engine is at rest; open: {[*self._open]}"
            self.step()
        raise AssertionError(f"not reached within {STEP_LIMIT} steps; open: {[*self._open]}")

    def play(self, asks: Iterable[Ask]) -> None:
        """Add requests, and step until every request has ended. Transfers may go on."""
        self.submit(asks)
        self.step_until(lambda: not self._open)

    def drain(self) -> None:
        """Step until the engine is at rest."""
        self.step_until(lambda: not self.scheduler.has_requests())

    # Resets

    def reset(self, *, both: bool = False, running: bool = False) -> bool:
        """Whether vLLM reset the device's prefix cache, with ``both`` the host tier too."""
        return bool(self.llm.reset_prefix_cache(running, both))

    def reset_device(self, *, both: bool = False) -> None:
        """Drain, and reset: with the device's cache empty, the next hits come from the host."""
        self.drain()
        assert self.reset(both=both)

    # State

    def left(self) -> list[str]:
        """What the engine holds, in words; at rest that has to be nothing."""
        pool = self.scheduler.kv_cache_manager.block_pool
        held = {"device": pool.num_gpu_blocks - pool.get_num_free_blocks()}
        found = []
        if self.offload is not None:
            tier = self.offload.tier
            held["host"] = tier.max_contents + 1 - tier.num_free
            try:
                integrity.check_at_rest(self.offload)
            except AssertionError as problem:
                found.append(str(problem))
        found += [
            f"{count - 1} {name} blocks are not free"
            for name, count in held.items()
            if count > 1  # the null block
        ]
        return found

    def shut_down(self) -> None:
        """Shut the engine down, as vLLM does."""
        self.llm.engine_core.shutdown()

    def _end(self, ask: Ask, output: RequestOutput) -> None:
        if output.outputs[0].finish_reason == "error":
            self.errors.append(ask.id)
            return
        self.answers[ask.id] = _answer_of(output)
        self._dialogs[ask.id] = (*ask.prompt, *self.answers[ask.id].tokens)


def _scheduler_side(connector: Any) -> OffloadScheduler | None:
    """The connector's scheduler side, also inside a MultiConnector."""
    for each in getattr(connector, "sub_connectors", [connector]):
        if isinstance(each, SimpleCPUOffloadConnector):
            return each.scheduler
    return None


def _sampling_of(ask: Ask) -> SamplingParams:
    """Always the best token, with the logprobs of the two best."""
    usual: dict[str, Any] = {
        "max_tokens": ask.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 2,
        "detokenize": False,
    }
    others = ask.sampling or {}
    if others.get("n", 1) > 1:
        usual["output_kind"] = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**usual | others)


def _answer_of(output: RequestOutput) -> Answer:
    """The answer so far; several completions of one prompt are concatenated."""
    tokens = [token for completion in output.outputs for token in completion.token_ids]
    logprobs = [
        {token: entry.logprob for token, entry in (at or {}).items()}
        for completion in output.outputs
        for at in completion.logprobs or ()
    ]
    ranked = [sorted(at.values(), reverse=True) for at in logprobs]
    return Answer(
        tokens,
        [at[token] for at, token in zip(logprobs, tokens, strict=True)],
        [best - second for best, second, *_ in ranked],
        output.num_cached_tokens or 0,
    )


def clean_up_process() -> None:
    """Remove the state that an engine leaves in its process, so that another can start."""
    gc.collect()
    ensure_kv_transfer_shutdown()  # a start that failed half-way leaves its connector
    cleanup_dist_env_and_memory()
