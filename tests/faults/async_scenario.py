"""Pauses, sleep, resets and a shutdown of vLLM's server engine, with copies in flight:
``python -m tests.faults.async_scenario SPEC RESULT``.

The engine core and its worker are separate processes, as under ``vllm serve``. Every copy is late,
so that one is always in flight.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine import PauseMode
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.harness import prepare_child
from tests.engine.requests import answer_of, engine_args, greedy, prompt_of
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.faults.plan import Fault
from tests.faults.scenarios import OLD, new_asks

RESET_SECONDS = 60.0
ASKED = OLD[:5]

ALL_LATE = (
    Fault(direction="load", action="fail", first=3, every=5, polls=6),
    Fault(direction="load", action="delay", every=1, polls=6),
    Fault(direction="store", action="fail", first=2, every=5, polls=12),
    Fault(direction="store", action="delay", every=1, polls=12),
)


class AsyncPhase(BaseModel):
    """The requests around one call to the engine."""

    answers: dict[str, Answer] = {}
    """Answers of the requests that were not aborted."""
    reasons: dict[str, str | None] = {}
    """The finish reason of each request."""
    free: bool
    """Whether every device block was free at the end."""
    facts: dict[str, Any] = {}


class AsyncResult(BaseModel):
    """The phases of the scenario."""

    phases: dict[str, AsyncPhase] = {}


class Requests:
    """Running requests of one engine."""

    def __init__(self, engine: AsyncLLM, phase: str, asks: Sequence[Ask]) -> None:
        self._engine = engine
        self._phase = phase
        self.outputs: dict[str, RequestOutput] = {}
        self._progress = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(ask)) for ask in asks]

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs.values())

    async def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until ``num_tokens`` tokens have arrived."""
        while self.num_tokens < num_tokens:
            self._progress.clear()
            await self._progress.wait()

    async def wait_until_finished(self) -> None:
        """Wait for the end of all requests."""
        await asyncio.gather(*self._tasks)

    async def _ask(self, ask: Ask) -> None:
        prompt, sampling = prompt_of(ask.prompt), greedy(ask.max_tokens)
        request_id = f"{self._phase}/{ask.id}"
        async for output in self._engine.generate(prompt, sampling, request_id):
            self.outputs[ask.id] = output
            self._progress.set()


class Scenario:
    """One engine, one phase after another."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.result = AsyncResult()

    async def play(self) -> None:
        """Play all phases, then leave a few requests running for the shutdown."""
        calls: dict[str, Callable[[Requests], Awaitable[dict[str, Any]]]] = {
            "paused, requests kept": self._pause_keeping,
            # vLLM clears the caches as soon as nothing is in flight.
            "paused, requests awaited": partial(self._pause, mode="wait"),
            "paused, requests aborted": partial(self._pause, mode="abort"),
            "asleep": self._sleep,
            "both reset": partial(self._reset, reset_connector=True),
            "running requests reset": partial(
                self._reset, reset_running_requests=True, reset_connector=True
            ),
        }
        for name, call in calls.items():
            await self._around(name, call)
        name = "paused, requests kept, caches cleared"
        await self._around(name, self._pause_clearing, loading=True)
        last = Requests(self._engine, "shutdown", ASKED)
        await last.wait_for_tokens(num_tokens=1)

    async def _around(
        self,
        name: str,
        call: Callable[[Requests], Awaitable[dict[str, Any]]],
        loading: bool = False,
    ) -> None:
        """Store ASKED in the host tier, reset the device, and make the call during a round. With
        ``loading``, the call comes while ASKED are being loaded, which takes a few steps."""
        await Requests(self._engine, f"{name}, before", ASKED).wait_until_finished()
        await self._reset_device()
        number = len(self.result.phases) + 1
        new = new_asks(number)
        requests = Requests(self._engine, name, (*ASKED, *new) if loading else (*new, *ASKED))
        await requests.wait_for_tokens(num_tokens=1 if loading else 15)
        facts = await call(requests)
        await requests.wait_until_finished()
        finished = {
            ask_id: output.outputs[0].finish_reason for ask_id, output in requests.outputs.items()
        }
        self.result.phases[name] = AsyncPhase(
            answers={
                ask_id: answer_of(requests.outputs[ask_id])
                for ask_id, reason in finished.items()
                if reason == "length"
            },
            reasons=finished,
            free=await self._reset_device(),
            facts=facts,
        )

    async def _pause_keeping(self, requests: Requests) -> dict[str, Any]:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        tokens_before, paused = requests.num_tokens, await self._engine.is_paused()
        tokens_after = requests.num_tokens
        await self._engine.resume_generation()
        return {"tokens_while_paused": tokens_after - tokens_before, "paused": paused}

    async def _pause_clearing(self, _: Requests) -> dict[str, Any]:
        """vLLM refuses to clear the cache while requests that load keep their blocks."""
        refused = ""
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=True)
        except Exception as error:  # noqa: BLE001 - of the engine's error only the text arrives
            refused = str(error)
        paused = await self._engine.is_paused()
        await self._engine.resume_generation()
        return {"refused": refused, "paused": paused}

    async def _pause(self, _: Requests, *, mode: PauseMode) -> dict[str, Any]:
        await self._engine.pause_generation(mode=mode, clear_cache=True)
        late = Requests(self._engine, f"late {mode}", ASKED[:1])
        paused = await self._engine.is_paused()
        tokens_while_paused = late.num_tokens
        await self._engine.resume_generation()
        await late.wait_until_finished()
        (output,) = late.outputs.values()
        return {
            "paused": paused,
            "tokens_while_paused": tokens_while_paused,
            "late_answer": answer_of(output).model_dump(),
        }

    async def _sleep(self, _: Requests) -> dict[str, Any]:
        """Level 0, the only one on CPUs: only the scheduler sleeps."""
        await self._engine.sleep(level=0, mode="wait")
        asleep = await self._engine.is_sleeping()
        await self._engine.wake_up(["scheduling"])
        return {"asleep": asleep, "still_asleep": await self._engine.is_sleeping()}

    async def _reset(self, _: Requests, **how: bool) -> dict[str, Any]:
        try:
            return {"reset": await self._engine.reset_prefix_cache(**how)}
        except Exception as error:  # noqa: BLE001 - of the engine's error only the text arrives
            return {"reset": str(error)}

    async def _reset_device(self) -> bool:
        """Reset the device's cache as soon as every block is free; False if that never happens."""
        deadline = time.monotonic() + RESET_SECONDS
        while not await self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True


async def run(spec: EngineSpec) -> AsyncResult:
    """Start, play, and shut down twice during a round."""
    engine = AsyncLLM.from_engine_args(engine_args(spec, AsyncEngineArgs))
    scenario = Scenario(engine)
    try:
        await scenario.play()
    finally:
        engine.shutdown()
        engine.shutdown()
    return scenario.result


def main(spec_path: Path, result_path: Path) -> None:
    """Run the scenario of the specification file SPEC; write RESULT."""
    prepare_child()
    spec = EngineSpec.model_validate_json(spec_path.read_text())
    result = asyncio.run(run(spec))
    result_path.write_text(result.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
