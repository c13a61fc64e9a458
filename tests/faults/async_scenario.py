"""Pauses, sleep, resets and a shutdown of vLLM's server engine, with copies under way:
``python -m tests.faults.async_scenario SPEC RESULT``.

The engine core and its worker are processes of their own here, as under ``vllm serve``. Every
copy is late, so that there is always one in flight.
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
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine import PauseMode
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.harness import tell_stacks_when_asked
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.faults.live import answer_of, engine_args, greedy
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
    """What happened around one call from outside."""

    answers: dict[str, Answer] = {}
    """Of requests that were answered to their end."""
    reasons: dict[str, str | None] = {}
    """Why each request ended."""
    free: bool
    """Whether, at the end, vLLM found every device block free."""
    facts: dict[str, Any] = {}


class AsyncResult(BaseModel):
    """By phase."""

    phases: dict[str, AsyncPhase] = {}


class Requests:
    """Requests under way on one engine."""

    def __init__(self, engine: AsyncLLM, phase: str, asks: Sequence[Ask]) -> None:
        self._engine = engine
        self._phase = phase
        self.outputs: dict[str, RequestOutput] = {}
        self._progress = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(ask)) for ask in asks]

    @property
    def num_tokens(self) -> int:
        """Tokens that have come so far."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs.values())

    async def under_way(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        while self.num_tokens < num_tokens:
            self._progress.clear()
            await self._progress.wait()

    async def ended(self) -> None:
        """Wait for all of them."""
        await asyncio.gather(*self._tasks)

    async def _ask(self, ask: Ask) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(ask.prompt))
        request_id = f"{self._phase}/{ask.id}"
        async for output in self._engine.generate(prompt, greedy(ask.max_tokens), request_id):
            self.outputs[ask.id] = output
            self._progress.set()


class Scenario:
    """One engine, one phase after another."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.result = AsyncResult()

    async def play(self) -> None:
        """All phases, and then a few requests that the shutdown finds."""
        calls: dict[str, Callable[[Requests], Awaitable[dict[str, Any]]]] = {
            "paused, requests kept": self._pause_keeping,
            # The caches are cleared as soon as nothing is in flight.
            "paused, requests awaited": partial(self._pause, mode="wait"),
            "paused, requests aborted": partial(self._pause, mode="abort"),
            "asleep": self._sleep,
            "both reset": partial(self._reset, reset_connector=True),
            "what runs reset": partial(
                self._reset, reset_running_requests=True, reset_connector=True
            ),
        }
        for name, call in calls.items():
            await self._around(name, call)
        name = "paused, requests kept, caches cleared"
        await self._around(name, self._pause_clearing, loading=True)
        last = Requests(self._engine, "shutdown", ASKED)
        await last.under_way(num_tokens=1)

    async def _around(
        self,
        name: str,
        call: Callable[[Requests], Awaitable[dict[str, Any]]],
        loading: bool = False,
    ) -> None:
        """Make the host tier hold ASKED and the device nothing; call in the midst of a round.
        ``loading``: while ASKED are loaded, which takes a few steps here."""
        await Requests(self._engine, f"{name}, before", ASKED).ended()
        await self._forget_device()
        number = len(self.result.phases) + 1
        new = new_asks(number)
        requests = Requests(self._engine, name, (*ASKED, *new) if loading else (*new, *ASKED))
        await requests.under_way(num_tokens=1 if loading else 15)
        facts = await call(requests)
        await requests.ended()
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
            free=await self._forget_device(),
            facts=facts,
        )

    async def _pause_keeping(self, requests: Requests) -> dict[str, Any]:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        tokens_before, paused = requests.num_tokens, await self._engine.is_paused()
        tokens_after = requests.num_tokens
        await self._engine.resume_generation()
        return {"tokens_while_paused": tokens_after - tokens_before, "paused": paused}

    async def _pause_clearing(self, _: Requests) -> dict[str, Any]:
        """Requests that load keep their blocks, which vLLM then refuses to clear."""
        refused = ""
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=True)
        except Exception as error:  # noqa: BLE001 - the engine's process tells nothing but the text
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
        await late.ended()
        (output,) = late.outputs.values()
        return {
            "paused": paused,
            "tokens_while_paused": tokens_while_paused,
            "late_answer": answer_of(output).model_dump(),
        }

    async def _sleep(self, _: Requests) -> dict[str, Any]:
        """Level 0, the only one that a CPU has: the scheduler alone sleeps."""
        await self._engine.sleep(level=0, mode="wait")
        asleep = await self._engine.is_sleeping()
        await self._engine.wake_up(["scheduling"])
        return {"asleep": asleep, "still_asleep": await self._engine.is_sleeping()}

    async def _reset(self, _: Requests, **how: bool) -> dict[str, Any]:
        try:
            return {"reset": await self._engine.reset_prefix_cache(**how)}
        except Exception as error:  # noqa: BLE001 - the engine's process tells nothing but the text
            return {"reset": str(error)}

    async def _forget_device(self) -> bool:
        """Empty the device's cache as soon as every block is free."""
        deadline = time.monotonic() + RESET_SECONDS
        while not await self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True


async def run(spec: EngineSpec) -> AsyncResult:
    """Start, play, shut down twice in the midst of a round."""
    engine = AsyncLLM.from_engine_args(engine_args(spec, AsyncEngineArgs))
    scenario = Scenario(engine)
    try:
        await scenario.play()
    finally:
        engine.shutdown()
        engine.shutdown()
    return scenario.result


def main(spec_path: Path, result_path: Path) -> None:
    """Run it."""
    tell_stacks_when_asked()
    spec = EngineSpec.model_validate_json(spec_path.read_text())
    result = asyncio.run(run(spec))
    result_path.write_text(result.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
