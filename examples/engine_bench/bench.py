"""Bench: runs contenders in turn and keeps their reports."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from examples.bench.agents import WorkingSet, requests_by_agent, working_set
from examples.bench.child import Event, child_command, engine_environment, listen
from examples.bench.connectors import PACKAGE, Contender
from examples.bench.models import save_model
from examples.bench.results_file import machine, save_numbers
from examples.engine_bench.files import Directory, drop_from_page_cache, look_at
from examples.engine_bench.plan import Part, Plan
from examples.engine_bench.results import floor_seconds, medians_by_contender, problems

ENGINE_RUN = "examples.engine_bench.engine_run"

Show = Callable[[str, str, int, int | None], None]
"""Gets who is at work, the work, and the number of requests: done, and of all."""


class Bench:
    """The plan's rounds of engines of each of ``contenders``, in turn; each engine does the work
    ``repeats`` times. The part ``restart``, and ``turns`` once more, are for another engine over
    the files of the first, which are in ``files``. Results are written to ``output`` after each
    time, so that an early end costs the rest only."""

    def __init__(
        self,
        plan: Plan,
        contenders: Sequence[Contender],
        parts: Sequence[Part],
        output: Path,
        repeats: int = 1,
        files: Path | None = None,
    ) -> None:
        self.plan = plan
        self.contenders = contenders
        self.parts = parts
        self.output = output
        self.repeats = repeats
        self.files = files
        self.directory: Directory | None = None
        """What ``files`` is on."""
        self.runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        self.peak: float | None = None
        """Bytes a second of a contiguous copy to the device."""
        self.working_set: WorkingSet | None = None
        """Of the part ``traces``."""
        self._machine = machine()

    @property
    def medians(self) -> dict[str, dict[str, float]]:
        return medians_by_contender(self.runs)

    @property
    def floor(self) -> float | None:
        return floor_seconds(self.medians, self.plan, self.peak)

    @property
    def problems(self) -> list[str]:
        return problems(self.runs, self.plan, self.parts, self.num_runs)

    @property
    def num_runs(self) -> int:
        """Of each contender."""
        return self.plan.rounds * self.repeats

    def run(self, show: Show) -> None:
        """Raises CannotStart if the trace does not fit or ``files`` cannot be written, and
        RunFailed if a process fails. No process and no file is left, however this ends."""
        if self.files is not None:
            self.directory = look_at(self.files)
        if "traces" in self.parts:
            show("bench", "reading the trace", 0, None)
            self.working_set = working_set(
                chain(*requests_by_agent(self.plan.replay)),
                self.plan.device_tokens,
                self.plan.host_bytes / self.plan.model.kv_bytes_per_token,
            )
        with (
            tempfile.TemporaryDirectory(prefix="work-", dir=self.output) as work,
            tempfile.TemporaryDirectory(prefix="offload-bench-") as scratch,
        ):
            plan, model = self.plan, Path(work).absolute() / "model"
            show("bench", "making the model", 0, None)
            save_model(plan.model, plan.max_model_len, plan.seed, model)
            if plan.device == "cuda" and "ttft" in self.parts:
                show("bench", "measuring a contiguous copy", 0, None)
                self._measure_peak(Path(scratch))
            for number in range(1, plan.rounds + 1):
                for contender in self.contenders:
                    self._run_one(contender, number, model, Path(scratch), show)

    def save(self) -> None:
        """Write all results so far."""
        result = {
            "began": self._machine["date"],
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self._machine,
            "plan": self.plan,
            "parts": self.parts,
            "rounds": self.plan.rounds,
            "repeats": self.repeats,
            "peak_bytes_per_second": self.peak,
            "floor_seconds": self.floor,
            "working_set": self.working_set,
            "directory": self.directory,
            "medians": self.medians,
            "problems": self.problems,
            "runs": self.runs,
        }
        save_numbers(self.output, result)

    def _measure_peak(self, scratch: Path) -> None:
        def on_event(event: Event) -> None:
            self.peak = event["bytes_per_second"]

        environment = engine_environment("cuda", scratch)
        listen(child_command(ENGINE_RUN), environment, self.output / "peak.log", on_event)

    def _run_one(
        self, contender: Contender, number: int, model: Path, scratch: Path, show: Show
    ) -> None:
        who = f"round {number}/{self.plan.rounds} {contender.name}"
        runs: list[dict[str, Any]] = []
        """Of this round, as many as there are repeats."""

        def on_run(run: dict[str, Any]) -> None:
            runs.append({"round": number, **run})
            self.runs[contender.name].append(runs[-1])

        def on_run_again(run: dict[str, Any]) -> None:
            first, numbers = runs[run["repeat"]], run["numbers"]
            first["numbers"]["restart"] = numbers.get("turns", {}) | numbers.get("restart", {})
            for key in ("lost", "replies"):
                first[key] += run[key]

        with tempfile.TemporaryDirectory(prefix="engine-bench-", dir=self.files) as name:
            folder = Path(name)
            play = partial(self._play, contender, folder, model, scratch, show)
            first_parts = [part for part in self.parts if part != "restart"]
            play(f"{contender.name}-{number}", who, first_parts, on_run)
            restarts = contender.has_files and "restart" in self.parts
            if restarts and not any(run["lost"] for run in runs):
                drop_from_page_cache(folder)
                parts = [part for part in self.parts if part in ("restart", "turns")]
                play(f"{contender.name}-{number}-again", f"{who} again", parts, on_run_again)
        show(who, "done", 1, 1)

    def _play(
        self,
        contender: Contender,
        folder: Path,
        model: Path,
        scratch: Path,
        show: Show,
        log: str,
        who: str,
        parts: Sequence[Part],
        on_run: Callable[[dict[str, Any]], None],
    ) -> None:
        """One engine from its start to its end, with its files in ``folder``."""
        phase = "starting Python"
        show(who, phase, 0, None)

        def on_event(event: Event) -> None:
            nonlocal phase
            if "run" in event:
                on_run(event["run"])
                self.save()
            else:
                phase = event.get("phase", phase)
                show(who, phase, event.get("done", 0), event.get("of"))

        command = child_command(
            ENGINE_RUN,
            plan=asdict(self.plan),
            contender=asdict(contender.with_files(folder)),
            parts=parts,
            repeats=self.repeats,
            model=str(model),
            folder=str(folder),
        )
        environment = self._environment(contender, scratch)
        listen(command, environment, self.output / f"{log}.log", on_event)

    def _environment(self, contender: Contender, scratch: Path) -> dict[str, str]:
        environment = engine_environment(self.plan.device, scratch, **contender.environment)
        if contender.source is not None:
            # A checkout has examples too. Its package alone goes before this one's, and the
            # current directory, where Python would look first, counts no more.
            alone = Path(tempfile.mkdtemp(dir=scratch))
            (alone / PACKAGE).symlink_to(Path(contender.source) / PACKAGE)
            environment["PYTHONPATH"] = os.pathsep.join([str(alone), environment["PYTHONPATH"]])
            environment["PYTHONSAFEPATH"] = "1"
        return environment
