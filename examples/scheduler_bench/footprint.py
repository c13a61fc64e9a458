"""Memory and start-up time of a large tier.

``measure_footprint`` starts ``python -m examples.scheduler_bench.footprint NAME BLOCKS FILLED
REPEATS``, which prints them as JSON: memory that a process has had before tells nothing. One
process a contender makes the tier several times: memory is that of the first, which does not vary,
start-up time the median.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import psutil

from examples.scheduler_bench.contenders import CONTENDERS, Contender
from examples.scheduler_bench.plan import BLOCK_SIZE, FootprintPlan
from examples.scheduler_bench.race import Race
from examples.scheduler_bench.results import Footprint, Results

POOL = "vLLM's BlockPool"
"""Heads the line of what a tier takes that is nothing but vLLM's pool of as many blocks: no
connector of which the pool is a part takes less memory."""

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
    """Fill in ``results.footprints``: eager contenders, as what is stored when has no part in
    it, and ``POOL``."""
    plan = results.plan.footprint
    what = f"a tier of {plan.tier_blocks} blocks"
    results.footprints |= race.each(
        what, lambda contender: measure_footprint(contender.name, plan), _takes_part
    )
    try:
        results.footprints[POOL] = measure_footprint(POOL, plan)
    except ChildFailed as error:
        results.failures[POOL] = str(error)


def _takes_part(contender: Contender) -> bool:
    return not contender.lazy and not contender.for_one_offs


def measure_footprint(name: str, plan: FootprintPlan) -> Footprint:
    """Of a contender or ``POOL``, in a process of its own. All numbers are for device blocks, also
    where host blocks are larger."""
    sizes = (plan.tier_blocks, plan.filled_blocks, plan.repeats)
    done = subprocess.run(
        [sys.executable, "-m", "examples.scheduler_bench.footprint", name, *map(str, sizes)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildFailed(f"{name}: the process ended with {done.returncode}")
    return Footprint(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(name: str, num_blocks: int, num_filled: int, repeats: int) -> Footprint:
    from examples.scheduler_bench.costs import fill_tier
    from examples.scheduler_bench.engine import MAX_MODEL_LEN, Engine, Shape

    contender = CONTENDERS[name]
    num_parts = contender.num_parts
    num_device_blocks = MAX_MODEL_LEN // BLOCK_SIZE + 16
    large = Shape(num_device_blocks, num_blocks // num_parts * num_parts)
    # What every engine has is there once one has been.
    Engine(contender, replace(large, host_blocks=64 * num_parts)).close()
    seconds = []

    def start() -> Engine:
        begin = time.process_time()
        engine = Engine(contender, large)
        seconds.append(time.process_time() - begin)
        return engine

    before = _resident_bytes()
    engine = start()
    found = engine.side.num_host_blocks(engine.connector) * num_parts
    if found != large.host_blocks:
        raise ChildFailed(f"{name}: has got {found} host blocks, not {large.host_blocks}")
    per_block = (_resident_bytes() - before) / num_blocks
    filled = None
    if num_filled:
        random = Random(0)
        # The device's blocks hold something from now on.
        fill_tier(engine, num_device_blocks, random)
        begin, num_stored = _resident_bytes(), engine.num_stored
        fill_tier(engine, num_filled, random)
        filled = (_resident_bytes() - begin) / (engine.num_stored - num_stored)
    engine.close()
    del engine
    for _ in range(repeats - 1):
        gc.collect()
        start().close()
    return Footprint(num_blocks, median(seconds), per_block, filled)


def _measure_pool(num_blocks: int, repeats: int) -> Footprint:
    from vllm.v1.core.block_pool import BlockPool

    seconds, per_block = [], []
    for _ in range(repeats):
        before, begin = _resident_bytes(), time.process_time()
        pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)
        seconds.append(time.process_time() - begin)
        per_block.append((_resident_bytes() - before) / num_blocks)
        del pool
    return Footprint(num_blocks, median(seconds), per_block[0], None)


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    from dataclasses import asdict

    logging.disable(logging.WARNING)
    name, (tier_blocks, filled_blocks, times) = sys.argv[1], map(int, sys.argv[2:])
    if name == POOL:
        numbers = _measure_pool(tier_blocks, times)
    else:
        numbers = _measure_here(name, tier_blocks, filled_blocks, times)
    print(json.dumps(asdict(numbers)), flush=True)
    # To give back millions of objects one by one takes as long as it took to make them.
    os._exit(0)
