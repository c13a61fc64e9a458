"""``python -m examples.copy_bench``: measure, print what was measured."""

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic_core import PydanticCustomError
from rich.console import Console

from examples.copy_bench.plan import SIZES, Plan, size_text
from simple_offload.config import parse_size

if TYPE_CHECKING:
    from examples.copy_bench.bench import Rig
    from examples.copy_bench.results import Results

WRONG_BYTES = 1
CANNOT_START = 2
COPY_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT

EXIT_CODES = f"""\
exit codes: 0 all measured, every byte right; {WRONG_BYTES} a copy brought wrong bytes;
{CANNOT_START} wrong usage, or this machine lacks a CUDA device or a package; {COPY_FAILED} a copy
failed; {INTERRUPTED} interrupted"""

PLOT = "bandwidth.png"
NUMBERS = "result.json"

MOST_REPEATS = 100
MOST_SCALE = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    arguments = _parse(argv)
    if not torch.cuda.is_available():
        return _complain(CANNOT_START, f"no CUDA device (torch {torch.__version__} sees none)")
    output: Path = arguments.out
    try:
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
        for name in (PLOT, NUMBERS):
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        return _complain(CANNOT_START, f"--out: cannot write to {output}: {error.strerror}")
    plan = Plan(sizes=arguments.sizes, repeats=arguments.repeats).scaled(arguments.scale)
    return _run(plan, output)


def _run(plan: Plan, output: Path) -> int:
    try:
        with open_rig(plan) as rig:
            return _measure_and_report(plan, rig, output)
    except ImportError as error:
        return _complain(CANNOT_START, f"{error} (the extras 'cuda' and 'bench' bring all)")
    except MemoryError as error:
        return _complain(COPY_FAILED, str(error))
    except RuntimeError as error:  # of the device: what queued it is worth knowing
        traceback.print_exc()
        return _complain(COPY_FAILED, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        return _complain(INTERRUPTED, "interrupted")


@contextmanager
def open_rig(plan: Plan) -> "Iterator[Rig]":
    """The memory and the paths to measure."""
    # Takes seconds, as it brings vLLM: wrong usage is told without it.
    from examples.copy_bench.rig import cuda_rig

    with cuda_rig(plan) as rig:
        yield rig


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.copy_bench",
        description=(
            "Copies scattered blocks between host memory and a CUDA device: bandwidth by block "
            "size, way and path, beside plain torch and the peak of one contiguous copy; and how "
            "long somebody else's small copies take beside those of the largest size."
        ),
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE",
        nargs="+",
        type=_block_size,
        default=list(SIZES),
        help=f"of a block: {_size_range()} (default: all of them)",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=partial(_whole_number, least=1, most=MOST_REPEATS),
        default=Plan.repeats,
        help=f"timed copies of each kind, 1 to {MOST_REPEATS} (default: {Plan.repeats}); "
        "slow ones are repeated less often",
    )
    parser.add_argument(
        "--scale",
        metavar="N",
        type=partial(_whole_number, least=1, most=MOST_SCALE),
        default=1,
        help=f"copies N times as large, 1 to {MOST_SCALE}: of N GiB, or of N times "
        f"{Plan.most_blocks:,} blocks if that is less (default: 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("copy-bench-out"),
        metavar="DIR",
        help="where the plot and the numbers go (default: copy-bench-out)",
    )
    arguments = parser.parse_args(argv)
    arguments.sizes = tuple(sorted(set(arguments.sizes)))
    return arguments


def _size_range() -> str:
    return f"a power of two from {size_text(SIZES[0])} to {size_text(SIZES[-1])}"


def _block_size(text: str) -> int:
    with suppress(PydanticCustomError):
        size = parse_size(text)
        if size in SIZES:
            return size
    raise argparse.ArgumentTypeError(f"{text!r} is not {_size_range()}")


def _whole_number(text: str, *, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{number} is not within {least} and {most}")
    return number


def _measure_and_report(plan: Plan, rig: "Rig", output: Path) -> int:
    from examples.copy_bench.bench import run
    from examples.copy_bench.report import (
        bandwidth_table,
        crossing_lines,
        save_plot,
        small_copies_table,
    )
    from examples.copy_bench.results import Results

    results = Results(plan, rig.machine)

    def tell(step: str) -> None:
        # A driver that takes the process down takes no numbers with it.
        _save(output / NUMBERS, results)
        if step:
            print(f"{results.seconds:5.1f} s  {step}", file=sys.stderr)

    run(rig, results, tell)
    save_plot(output / PLOT, results)

    console = Console()
    console.print(
        f"{rig.machine.get('device')}, driver {rig.machine.get('driver')}, "
        f"torch {rig.machine.get('torch')}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(bandwidth_table(results))
    console.print(small_copies_table(results))
    lines = crossing_lines(results)
    lines += [f"Left out: {name}: {reason}" for name, reason in results.left_out.items()]
    lines += [f"Plot: {output / PLOT}", f"Numbers: {output / NUMBERS}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    for fault in results.faults:
        _complain(WRONG_BYTES, f"WRONG BYTES: {fault}")
    for name, failure in results.failures.items():
        _complain(COPY_FAILED, f"{name} failed: {failure}")
    if results.faults:
        return WRONG_BYTES
    return COPY_FAILED if results.failures else 0


def _save(path: Path, results: "Results") -> None:
    path.write_text(json.dumps(results.to_json(), indent=1) + "\n")


def _complain(code: int, text: str) -> int:
    print(f"copy_bench: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    # The table says what vLLM's logger would repeat for every size and path.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    sys.exit(main())
