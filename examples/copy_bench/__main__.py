"""``python -m examples.copy_bench``: measure, print the results."""

import argparse
import os
import traceback
from collections.abc import Sequence
from functools import partial

import torch

from examples.bench.arguments import BenchParser, changed
from examples.bench.command import CannotStart, RunFailed, exit_code_of, run_program
from examples.bench.race import run_race
from examples.bench.results_file import NUMBERS, gpu, machine, prepare_output
from examples.copy_bench import bench
from examples.copy_bench.plan import Plan
from examples.copy_bench.results import Results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = BenchParser(
        "copy_bench",
        "Scattered blocks between host memory and a CUDA device: their bandwidth by block size, "
        "way and path, beside plain torch and the peak of one contiguous copy.",
    )
    parser.add_plan(Plan())
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise CannotStart(f"No CUDA device (torch {torch.__version__} sees none).")
    prepare_output(arguments.output, NUMBERS)
    facts = {
        "device": torch.cuda.get_device_name(),
        "driver": gpu("driver_version"),
        "cuda": str(torch.version.cuda),
    }
    results = Results(plan=changed(Plan(), arguments), machine=facts | machine())
    try:
        return run_race("copy_bench", results, arguments.output, partial(bench.run, results))
    except ImportError as error:
        raise CannotStart(f"{error} (the extra 'cuda' brings it)") from None
    except (MemoryError, RuntimeError) as error:
        traceback.print_exc()  # of the device's errors, the stack shows which call queued it
        raise RunFailed(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    # The table says what vLLM's logger would repeat for every size and path.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    run_program(main)
