"""``python -m examples.overlap_probe``: measure, print the results and the verdict."""

import argparse
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from examples.bench.arguments import BenchParser, exit_codes
from examples.bench.command import (
    BAD_RESULT,
    CannotStart,
    RunFailed,
    exit_code_of,
    print_lines,
    run_program,
)
from examples.bench.progress import Progress
from examples.bench.results_file import (
    NUMBERS,
    gpu_driver,
    machine,
    prepare_output,
    save_numbers,
)
from examples.overlap_probe.plan import Plan
from examples.overlap_probe.results import Results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe; return the exit code."""
    plan, parser = Plan(), _parser()
    arguments = parser.parse_args(argv)
    contexts = arguments.contexts or plan.contexts
    size = plan.shape.block_tokens
    if wrong := [context for context in contexts if context % size]:
        parser.error(f"argument --contexts: {wrong[0]} is not a multiple of {size}")
    plan = replace(
        plan,
        contexts=tuple(sorted(set(contexts))),
        rounds=arguments.rounds,
        fixed_seconds=arguments.fixed_ms / 1e3,
        lag_seconds=arguments.lag_ms / 1e3,
    )
    return exit_code_of(lambda: _run(plan, arguments.output))


def _parser() -> argparse.ArgumentParser:
    plan = Plan()
    parser = BenchParser(
        "overlap_probe",
        "Loads KV in one group of layers, as today, and in four and eight. The forward pass of a "
        "Llama of 8 billion random parameters waits for each group before its layers. Measures "
        "both together, bytes alone and compute alone, and says whether groups pay.",
        exit_codes(
            "measured, whatever the verdict",
            "a forward pass read wrong KV",
            "a copy or a kernel failed, or memory is short",
            "wrong usage, or this machine lacks a CUDA device or a package",
        ),
    )
    parser.add_number(
        "--contexts",
        "loaded tokens, multiples of 16 (default: 8192 100000, which take 30 GiB on the device "
        "and 12.2 GiB of host memory)",
        nargs="+",
    )
    parser.add_number(
        "--rounds", "timed rounds, 1 to 100 (default: 12)", default=plan.rounds, most=100
    )
    parser.add_number(
        "--fixed-ms",
        "part of TTFT that is neither load nor forward pass, in ms (default: 7)",
        default=round(plan.fixed_seconds * 1e3),
        least=0,
    )
    parser.add_number(
        "--lag-ms",
        "from a load's submission until vLLM can have queued compute, in ms (default: 4)",
        default=round(plan.lag_seconds * 1e3),
        least=0,
    )
    parser.add_output("--out", "overlap-probe-out", "the numbers")
    return parser


def _run(plan: Plan, output: Path) -> int:
    if not torch.cuda.is_available():
        raise CannotStart(f"No CUDA device (torch {torch.__version__} sees none).")
    prepare_output("--out", output, NUMBERS)
    try:
        return _measure_and_report(plan, output)
    except ImportError as error:
        raise CannotStart(f"{error} (the extras 'cuda' and 'bench' bring all)") from None
    except MemoryError as error:
        raise RunFailed(str(error)) from None
    except RuntimeError as error:  # of the device: the stack shows which call queued it
        traceback.print_exc()
        raise RunFailed(f"{type(error).__name__}: {error}") from None


def _measure_and_report(plan: Plan, output: Path) -> int:
    # Takes seconds, as it brings vLLM: wrong usage is reported without it.
    from examples.overlap_probe import measure

    started = time.monotonic()
    facts = {"device": torch.cuda.get_device_name(), "driver": gpu_driver(), **machine()}
    results = Results(plan, facts)
    with Progress() as progress:

        def on_step(step: str) -> None:
            results.total_seconds = time.monotonic() - started
            save_numbers(output, results.to_json())
            progress.show("overlap_probe", step)

        on_step("memory, weights, graphs")
        with measure.cuda_rig(results) as rig:
            measure.run(rig, results, on_step)
    console = Console()
    print_lines(
        console,
        f"{facts['device']}, driver {facts['driver']}, torch {facts['torch']}, "
        f"vLLM {facts['vllm']}, attention by {results.attention}",
    )
    console.print(results.loads_table(), results.passes_table(), results.changes_table())
    print_lines(console, *results.verdict()[1], f"Numbers: {output / NUMBERS}")
    return BAD_RESULT if results.num_faults else 0


if __name__ == "__main__":
    # The tables say what vLLM's logger would repeat for every backend.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    run_program(main)
