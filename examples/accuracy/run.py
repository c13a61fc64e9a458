"""One model: served without the connector and with it, evaluated once and twice."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.accuracy.evaluation import OUR_TASK, Request, evaluate
from examples.accuracy.recall import make_questions, write_questions
from examples.accuracy.results import LEAST_ACCURACY, Outcome, Pass
from examples.accuracy.usage import MIDDLEWARE, VARIABLE, read_usage
from examples.bench.child import Device
from examples.bench.connectors import NONE, OURS, SIMPLE, Contender
from examples.serving import Server, command_line, server_environment, serving

CORRUPTED = Contender("corrupted", SIMPLE, "examples.accuracy.corrupt")

QUESTIONS = f"{OUR_TASK}.jsonl"
USAGE = "usage.jsonl"

Show = Callable[[str, int, int], None]
"""Gets the pass under way, and the number of requests: done, and of all."""


@dataclass(frozen=True)
class Plan:
    """The runs of one model."""

    model: str
    """A folder, or a name that vLLM downloads."""
    request: Request
    output: Path
    device: Device
    block_size: int
    device_tokens: int
    """Capacity of the device's KV space: too small for prompts that come far apart."""
    max_model_len: int
    host_bytes: int
    corrupt: bool = False
    samples: int = 512
    """Questions of our own task."""
    seed: int = 0
    dtype: str = "auto"
    serve_arguments: Sequence[str] = ()
    """For vLLM's command line, after ours."""
    lm_eval: Sequence[str] = field(default=(), kw_only=True)
    """The command that runs lm_eval."""

    @property
    def is_recall(self) -> bool:
        """True if our task is among the tasks."""
        return OUR_TASK in self.request.tasks


def run(plan: Plan, show: Show) -> Outcome:
    """Evaluate three times. Raises RunFailed; however it returns, no process is left."""
    plan.output.mkdir(parents=True, exist_ok=True)
    with _serving(plan, "without", NONE) as server:
        without = _pass(plan, "without", server, show)
    with _serving(plan, "with", CORRUPTED if plan.corrupt else OURS) as server:
        first = _pass(plan, "first pass", server, show)
        server.reset_prefix_cache(external=False)
        second = _pass(plan, "second pass", server, show)
    return Outcome(without, first, second, LEAST_ACCURACY if plan.is_recall else 0.0)


def serve_arguments(plan: Plan, contender: Contender) -> list[str]:
    """vLLM's command line."""
    ours: dict[str, Any] = {
        "block_size": plan.block_size,
        "num_gpu_blocks_override": plan.device_tokens // plan.block_size,
        "max_model_len": plan.max_model_len,
        "dtype": plan.dtype,
        "seed": 0,
        "enable_prefix_caching": True,
        "enforce_eager": plan.device == "cpu",
        "enable_prompt_tokens_details": True,
        "middleware": MIDDLEWARE,
        "kv_transfer_config": contender.transfer_config(plan.host_bytes),
    }
    return [*command_line(ours), *plan.serve_arguments]


@contextmanager
def _serving(plan: Plan, name: str, contender: Contender) -> Iterator[Server]:
    """A server whose log and usage lie in the output folder under ``name``."""
    usage = _usage_path(plan, name)
    usage.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="offload-accuracy-") as scratch:
        extra: Mapping[str, str] = {
            VARIABLE: str(usage.absolute()),
            "HF_HUB_OFFLINE": str(int(plan.request.offline)),
        }
        environment = server_environment(plan.device, Path(scratch), **extra)
        arguments = serve_arguments(plan, contender)
        log = plan.output / f"serve-{name}.log"
        with serving(plan.model, arguments, environment, log) as server:
            yield server


def _pass(plan: Plan, name: str, server: Server, show: Show) -> Pass:
    """All samples once."""
    folder = plan.output / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if plan.is_recall:
        write_questions(make_questions(plan.samples, plan.seed), folder / QUESTIONS)
    usage = _usage_path(plan, "without" if name == "without" else "with")
    known = len(read_usage(usage))
    before = _hit_tokens(server)
    begin = time.monotonic()
    show(name, 0, 0)
    evaluation = evaluate(
        plan.lm_eval,
        plan.request,
        server,
        folder,
        lambda done, total: show(name, done, total),
    )
    seconds = time.monotonic() - begin
    after = _hit_tokens(server)
    return Pass(
        name,
        evaluation,
        read_usage(usage, skip=known),
        host_hit_tokens=after["host"] - before["host"],
        device_hit_tokens=after["device"] - before["device"],
        seconds=seconds,
        tail_tokens=2 * plan.block_size,
    )


def _usage_path(plan: Plan, name: str) -> Path:
    return plan.output / f"{name}-{USAGE}"


def _hit_tokens(server: Server) -> dict[str, int]:
    """Prompt tokens found so far in the host tier and on the device."""
    names = {
        "host": "vllm:external_prefix_cache_hits_total",
        "device": "vllm:prefix_cache_hits_total",
    }
    return {tier: int(server.metric(name)) for tier, name in names.items()}
