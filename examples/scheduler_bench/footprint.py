"""Memory and start-up time of a large tier, each contender in a process of its own: freed memory of
earlier work would hide the tier's.

A process makes the tier several times: memory is that of the first, which does not vary, start-up
time the median.
"""

import gc
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from random import Random
from statistics import median

import psutil
from vllm.v1.core.block_pool import BlockPool

from examples.bench.connectors import Contender
from examples.bench.race import Race
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CONTENDERS, CONTENDERS_OF, FootprintPlan
from examples.scheduler_bench.planned import MAX_MODEL_LEN
from examples.scheduler_bench.results import POOL, Footprint, Results


def run_footprints(race: Race[Contender], results: Results) -> None:
    """Fill in ``results.footprints``: ``POOL``, and the contenders that fill a tier with room."""
    plan = results.plan.footprint
    results.footprints |= race.run(
        f"a tier of {plan.tier_blocks} blocks",
        lambda contender: measure_footprint(contender.name, plan),
        CONTENDERS_OF["footprint"],
    )
    with race.attempt(POOL):
        results.footprints[POOL] = measure_footprint(POOL, plan)


def measure_footprint(name: str, plan: FootprintPlan) -> Footprint:
    """Of a contender or ``POOL``, in a process of its own. All numbers are for device blocks, also
    where host blocks are larger. Raises what the measurement raises."""
    measure = _measure_pool if name == POOL else partial(_measure_tier, name)
    quiet = (logging.disable, (logging.WARNING,))
    with ProcessPoolExecutor(1, get_context("spawn"), *quiet) as executor:
        return executor.submit(measure, plan).result()


def _measure_tier(name: str, plan: FootprintPlan) -> Footprint:
    contender = CONTENDERS[name]
    num_sub_blocks = int(contender.extra.get("cpu_block_size", BLOCK_SIZE)) // BLOCK_SIZE
    num_device_blocks = MAX_MODEL_LEN // BLOCK_SIZE + 16
    large = Shape(num_device_blocks, plan.tier_blocks // num_sub_blocks * num_sub_blocks)
    # The first engine of a process makes the objects that all engines share.
    Engine(contender, replace(large, host_blocks=64 * num_sub_blocks)).close()
    seconds = []

    def start() -> Engine:
        begin = time.process_time()
        engine = Engine(contender, large)
        seconds.append(time.process_time() - begin)
        return engine

    before = _resident_bytes()
    engine = start()
    found = engine.side.num_host_blocks(engine.connector) * num_sub_blocks
    if found != large.host_blocks:
        raise RuntimeError(f"{name}: has {found} host blocks, not {large.host_blocks}")
    per_block = (_resident_bytes() - before) / plan.tier_blocks
    filled = None
    if plan.filled_blocks:
        random = Random(0)
        # The device's blocks hold something from now on.
        _fill(engine, num_device_blocks, random)
        before, num_stored = _resident_bytes(), engine.num_stored
        _fill(engine, plan.filled_blocks, random)
        filled = (_resident_bytes() - before) / (engine.num_stored - num_stored)
    engine.close()
    del engine
    for _ in range(plan.repeats - 1):
        gc.collect()
        start().close()
    return Footprint(plan.tier_blocks, median(seconds), per_block, filled)


def _fill(engine: Engine, num_blocks: int, random: Random) -> None:
    """Store ``num_blocks`` blocks of prompts that do not come again."""
    most = MAX_MODEL_LEN // BLOCK_SIZE - 1
    while num_blocks > 0:
        prompt = random.choices(range(1000), k=BLOCK_SIZE * min(most, num_blocks))
        engine.add(f"filler {engine.num_steps}", prompt, [1])
        engine.drain()
        num_blocks -= most


def _measure_pool(plan: FootprintPlan) -> Footprint:
    seconds, per_block = [], []
    for _ in range(plan.repeats):
        before, begin = _resident_bytes(), time.process_time()
        pool = BlockPool(plan.tier_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)
        seconds.append(time.process_time() - begin)
        per_block.append((_resident_bytes() - before) / plan.tier_blocks)
        del pool
    return Footprint(plan.tier_blocks, median(seconds), per_block[0], None)


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)
