"""Memory and start-up time of a large tier.

``measure_footprint`` starts ``python -m examples.scheduler_bench.footprint NAME BLOCKS FILLED``,
which prints them as JSON: memory that a process has had before tells nothing.
"""

import gc
import json
import logging
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import median

import psutil

from examples.scheduler_bench.plan import BLOCK_SIZE, FootprintPlan
from examples.scheduler_bench.race import Race
from examples.scheduler_bench.results import Footprint, Results

ROOT = Path(__file__).resolve().parents[2]

BYTES_EXPECTED = 400
"""Of a host block in Python objects, at most, where one holds something."""
BYTES_OF_A_PROCESS = 2 << 30
"""That has imported vLLM, at most."""


class ChildFailed(RuntimeError):
    """A process ended without numbers."""


def bytes_needed(plan: FootprintPlan) -> int:
    """Memory that a measurement may take."""
    return BYTES_OF_A_PROCESS + BYTES_EXPECTED * plan.tier_blocks


def run_footprints(race: Race, results: Results) -> None:
    """Fill in ``results.footprints``."""
    plan = results.plan.footprint
    found: dict[str, list[Footprint]] = {}
    for _ in range(plan.repeats):
        measured = race.each(
            f"a tier of {plan.tier_blocks} blocks",
            lambda contender: measure_footprint(contender.name, plan),
            lambda contender: not contender.for_one_offs,
        )
        for name, footprint in measured.items():
            found.setdefault(name, []).append(footprint)
    for name, footprints in found.items():
        filled = [f.bytes_per_filled_block for f in footprints if f.bytes_per_filled_block]
        results.footprints[name] = Footprint(
            plan.tier_blocks,
            median(f.seconds_to_start for f in footprints),
            median(f.bytes_per_block for f in footprints),
            median(filled) if filled else None,
        )


def measure_footprint(name: str, plan: FootprintPlan) -> Footprint:
    """In a process of its own."""
    sizes = (str(plan.tier_blocks), str(plan.filled_blocks))
    done = subprocess.run(
        [sys.executable, "-m", "examples.scheduler_bench.footprint", name, *sizes],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildFailed(f"{name}: the process ended with {done.returncode}")
    return Footprint(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(name: str, num_blocks: int, num_filled: int) -> Footprint:
    from examples.scheduler_bench.contenders import CONTENDERS
    from examples.scheduler_bench.costs import fill_tier
    from examples.scheduler_bench.engine import MAX_MODEL_LEN, Engine, Shape

    contender = CONTENDERS[name]
    device_blocks = MAX_MODEL_LEN // BLOCK_SIZE + 16
    # What every engine has is there once one has been.
    Engine(contender, Shape(device_blocks, host_blocks=64)).close()
    before = _resident_bytes()
    engine = Engine(contender, Shape(device_blocks, num_blocks))
    if engine.side.num_host_blocks(engine.connector) != num_blocks:
        raise ChildFailed(f"{name}: has not got {num_blocks} host blocks")
    after = _resident_bytes()
    filled = None
    if num_filled:
        random = Random(0)
        # The device's blocks hold something from now on.
        fill_tier(engine, device_blocks, random)
        start, num_stored = _resident_bytes(), engine.num_stored
        fill_tier(engine, num_filled, random)
        filled = (_resident_bytes() - start) / (engine.num_stored - num_stored)
    return Footprint(num_blocks, engine.seconds_to_start, (after - before) / num_blocks, filled)


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    from dataclasses import asdict

    logging.disable(logging.WARNING)
    print(json.dumps(asdict(_measure_here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
