"""Soak: ``python -m tests.simulation.soak --steps N --seed S`` plays scripts, each from the next
seed, until N engine steps have been made. Exit code 1 and the seed on any violation."""

import argparse
import logging
import sys
import time
from collections import Counter
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress

from tests.simulation.script import play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="engine steps to make")
    parser.add_argument("--seed", type=int, default=0, help="the first script's seed")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps={arguments.steps}: must be at least 1")
    logging.disable(logging.CRITICAL)  # faults on purpose log an error each
    console = Console()
    total: Counter[str] = Counter()
    seed, start = arguments.seed, time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task("engine steps", total=arguments.steps)
        while total["num_steps"] < arguments.steps:
            try:
                total.update(asdict(play(seed)))
            except Exception as error:  # noqa: BLE001 - vLLM's assertions count as well
                progress.stop()
                console.print(f"seed {seed}: {type(error).__name__}: {error}", markup=False)
                console.print(f"replay: make soak STEPS=1 SEED={seed}", markup=False)
                return 1
            seed += 1
            progress.update(task, completed=total["num_steps"])
    console.print(
        f"{total['num_steps']:,} steps in {seed - arguments.seed:,} scripts from seed "
        f"{arguments.seed}: {total['num_finished']:,} requests, {total['num_blocks_loaded']:,} "
        f"blocks loaded, {total['num_read']:,} objects read, {total['num_faults']:,} faults, no "
        f"violation "
        f"({time.monotonic() - start:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
