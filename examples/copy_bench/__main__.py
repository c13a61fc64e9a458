"""``python -m examples.copy_bench``: measure, print the results."""

import argparse
import os
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from pydantic_core import PydanticCustomError
from rich.console import Console

from examples.bench.arguments import BenchParser, exit_codes
from examples.bench.command import (
    BAD_RESULT,
    RUN_FAILED,
    CannotStart,
    RunFailed,
    exit_code_of,
    print_lines,
    run_program,
)
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, gpu, machine, prepare_output, save_numbers
from examples.copy_bench import bench, report
from examples.copy_bench.plan import SIZES, Plan, size_text
from examples.copy_bench.results import Results
from simple_offload.config import parse_size

_SIZE_RANGE = f"a power of two from {size_text(SIZES[0])} to {size_text(SIZES[-1])}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    arguments = _parse(argv)
    return exit_code_of(lambda: _run(arguments))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchParser(
        "copy_bench",
        "Scattered blocks between host memory and a CUDA device: their bandwidth by block size, "
        "way and path, beside plain torch and the peak of one contiguous copy; and the time of "
        "small copies on another stream beside those of the largest size.",
        exit_codes(
            "all measured, every byte right",
            "a copy brought wrong bytes",
            "a copy failed",
            "wrong usage, or this machine lacks a CUDA device or a package",
        ),
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE",
        nargs="+",
        type=_block_size,
        default=list(SIZES),
        help=f"of a block: {_SIZE_RANGE} (default: all of them)",
    )
    parser.add_number(
        "--repeats",
        f"timed copies of each kind, 1 to 100 (default: {Plan.repeats}); "
        "slow ones are repeated less often",
        most=100,
        default=Plan.repeats,
    )
    parser.add_number(
        "--scale",
        f"copies N times as large, 1 to 8: of N GiB, or of N times "
        f"{Plan.most_blocks:,} blocks if that is less (default: 1)",
        most=8,
        default=1,
    )
    parser.add_output("--out", "copy-bench-out", "the numbers")
    return parser.parse_args(argv)


def _block_size(text: str) -> int:
    with suppress(PydanticCustomError):
        size = parse_size(text)
        if size in SIZES:
            return size
    raise argparse.ArgumentTypeError(f"{text!r} is not {_SIZE_RANGE}")


def _run(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise CannotStart(f"No CUDA device (torch {torch.__version__} sees none).")
    prepare_output("--out", arguments.output, NUMBERS)
    try:
        return _measure_and_report(arguments)
    except ImportError as error:
        raise CannotStart(f"{error} (the extra 'cuda' brings it)") from None
    except MemoryError as error:
        raise RunFailed(str(error)) from None
    except RuntimeError as error:  # of the device: the stack shows which call queued it
        traceback.print_exc()
        raise RunFailed(f"{type(error).__name__}: {error}") from None


def _measure_and_report(arguments: argparse.Namespace) -> int:
    plan = Plan(tuple(sorted(set(arguments.sizes))), arguments.repeats).scaled(arguments.scale)
    results = Results(plan, _facts())
    start = time.monotonic()
    with Progress() as progress:

        def on_step(step: str) -> None:
            # A driver that takes the process down takes no numbers with it.
            results.seconds = time.monotonic() - start
            save_numbers(arguments.output, results)
            progress.show("copy_bench", step)

        bench.run(results, on_step)
        on_step("done")

    console = Console()
    print_lines(console, *(f"{name}: {fact}" for name, fact in results.machine.items()))
    if results.rows:
        console.print(report.bandwidth_table(results), report.small_copies_table(results))
    left_out = (f"Left out: {name}: {reason}" for name, reason in results.left_out.items())
    print_lines(console, *left_out, f"Numbers: {arguments.output / NUMBERS}")
    wrong = (f"WRONG BYTES: {fault}" for fault in results.faults)
    failures = (f"{name} failed: {failure}" for name, failure in results.failures.items())
    print_lines(console, *wrong, *failures, style="bold red")
    if results.faults:
        return BAD_RESULT
    return RUN_FAILED if results.failures else 0


def _facts() -> dict[str, Any]:
    """Of the machine."""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": gpu("driver_version"),
        "cuda": str(torch.version.cuda),
        **machine(),
    }


if __name__ == "__main__":
    # The table says what vLLM's logger would repeat for every size and path.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    run_program(main)
