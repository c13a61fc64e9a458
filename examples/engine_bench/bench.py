"""Bench: runs contenders in turn, keeps what they tell."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from examples.demo.child import ROOT, listen
from examples.engine_bench.contenders import LAYOUT, Contender
from examples.engine_bench.plan import Part, Plan, save_model
from examples.engine_bench.results import floor_seconds, medians, problems

NUMBERS = "result.json"
PEAK_DEADLINE = 120

Show = Callable[[str, str], None]
"""Is told who is at work, and on what."""


class Bench:
    """``rounds`` engines of each of ``contenders``, in turn, each with ``repeats`` times the work.
    Everything is written to ``output`` after each time, so that an early end costs the rest only.
    """

    def __init__(
        self,
        plan: Plan,
        contenders: Sequence[Contender],
        parts: Sequence[Part],
        rounds: int,
        output: Path,
        repeats: int = 1,
    ) -> None:
        self.plan = plan
        self.contenders = contenders
        self.parts = parts
        self.rounds = rounds
        self.output = output
        self.repeats = repeats
        self.runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        self.peak: float | None = None
        """Bytes a second of a contiguous copy to the device."""
        self._began = datetime.now(UTC)

    @property
    def medians(self) -> dict[str, dict[str, float]]:
        return medians(self.runs)

    @property
    def floor(self) -> float | None:
        return floor_seconds(self.medians, self.plan, self.peak)

    @property
    def problems(self) -> list[str]:
        return problems(self.runs, self.plan, self.parts, self.num_runs)

    @property
    def num_runs(self) -> int:
        """Of each contender."""
        return self.rounds * self.repeats

    def run(self, show: Show) -> None:
        """Raises RunFailed if a process fails. No process is left, however this ends."""
        with (
            tempfile.TemporaryDirectory(prefix="work-", dir=self.output) as work,
            tempfile.TemporaryDirectory(prefix="offload-bench-") as scratch,
        ):
            model = Path(work).absolute() / "model"
            show("bench", "making the model")
            save_model(self.plan, model)
            if self.plan.device == "cuda" and "ttft" in self.parts:
                show("bench", "measuring a contiguous copy")
                self.peak = measure_peak(environment("cuda", {}, Path(scratch)))
            for number in range(1, self.rounds + 1):
                for contender in self.contenders:
                    self._run_one(contender, number, model, Path(scratch), show)

    def save(self) -> None:
        """Write everything there is so far."""
        result = {
            "began": self._began.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "plan": self.plan.to_json(),
            "parts": self.parts,
            "rounds": self.rounds,
            "repeats": self.repeats,
            "peak_bytes_per_second": self.peak,
            "floor_seconds": self.floor,
            "medians": self.medians,
            "problems": self.problems,
            "runs": self.runs,
        }
        (self.output / NUMBERS).write_text(json.dumps(result, indent=1) + "\n")

    def _run_one(
        self, contender: Contender, number: int, model: Path, scratch: Path, show: Show
    ) -> None:
        who = f"round {number}/{self.rounds} {contender.name}"
        phase = "starting Python"
        show(who, phase)

        def on_event(event: dict[str, Any]) -> None:
            nonlocal phase
            if "run" in event:
                self.runs[contender.name].append({"round": number, **event["run"]})
                self.save()
            elif "phase" in event:
                phase = event["phase"]
                show(who, phase)
            else:
                show(who, f"{phase} {event['done']}/{event['of']}")

        listen(
            self._command(contender, model),
            environment(self.plan.device, contender.environment, scratch),
            self.output / f"{contender.name}-{number}.log",
            on_event,
        )
        show(who, "done")

    def _command(self, contender: Contender, model: Path) -> list[str]:
        command = [sys.executable, "-m", "examples.engine_bench.engine_run"]
        command += ["--plan", json.dumps(self.plan.to_json()), "--model", str(model)]
        command += ["--contender", contender.name, "--parts", ",".join(self.parts)]
        return [*command, "--repeats", str(self.repeats)]


def environment(
    device: Literal["cuda", "cpu"], extra: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """Environment of one engine; what it leaves in temporary files goes to ``scratch``."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **{name: value for name, value in os.environ.items() if name != LAYOUT},
        "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Greedy sampling needs none, and it comes with vLLM on some GPU hosts only.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **extra,
    }
    if device == "cpu":
        # GiB that must be free; the plan then takes only the blocks it names.
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # Threads that spin on cores which other processes want slow everything down.
        variables.setdefault("OMP_WAIT_POLICY", "passive")
        variables.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return variables


def measure_peak(child_environment: Mapping[str, str]) -> float:
    """Bytes a second of one contiguous pinned copy to the device.

    Raises subprocess.CalledProcessError if there is no device to copy to.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.engine_bench.peak"],
        env=dict(child_environment),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the parent alone
    )
    try:
        output, _ = process.communicate(timeout=PEAK_DEADLINE)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return float(json.loads(output)["bytes_per_second"])
