"""A guard on work: operations do not become quadratic, or depend on the tier, device or context.

The cost is a count (``work.py``), so a test fails on every machine or on none.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import SchedulerOutput

from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.protections import Protections
from simple_offload.scheduler.policy.queue_reservations import QueueReservations
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run
from simple_offload.transfer import BlockIds
from tests.scheduler.driver import make_request
from tests.scheduler.rig import Rig
from tests.scheduler.tiers import make_tier
from tests.scheduler.work import Work, count_work
from tests.simulation.integrity import groups_of, pool_of


def keys_of(chain: int, count: int) -> list[BlockHashWithGroupId]:
    """The keys of the first ``count`` blocks of a unique chain."""
    digests = [sha256(b"%d %d" % (chain, index)).digest() for index in range(count)]
    return [make_block_hash_with_group_id(BlockHash(each), 0) for each in digests]


def store(tier: CpuTier, chain: int, count: int, *, on_device: bool = False) -> list[KVCacheBlock]:
    """Store the first ``count`` blocks of a chain."""
    blocks = tier.allocate(count)
    tier.commit(Run((), keys_of(chain, count), on_device=on_device, host_blocks=blocks))
    return blocks


NEW = -1
"""A chain that no full tier holds."""


def full_tier(num_blocks: int) -> CpuTier:
    """A tier full of chains of 32 blocks, every other one of duplicates."""
    tier = make_tier(num_blocks)
    for chain in range(num_blocks // 32):
        store(tier, chain, 32, on_device=chain % 2 == 0)
    assert tier.num_used == num_blocks
    return tier


# Operations of the tier, one by one. ``tier``: its blocks, all full. ``blocks``: of one chain.


def device_got(tier: int = 1024, blocks: int = 32) -> Work:
    full = full_tier(tier)
    store(full, NEW, blocks)
    return count_work(full.device_got, keys_of(NEW, blocks))


def ids_of(tier: CpuTier, chain: int, count: int) -> BlockIds:
    """The ids of the blocks of a chain, tail first."""
    return np.array(tier.ids_of(keys_of(chain, count))[::-1], np.int64)


def device_lost(tier: int = 1024, blocks: int = 32) -> Work:
    """The device loses a chain that a request has hit, and others before it."""
    full = full_tier(tier)
    store(full, NEW, blocks, on_device=True)
    for chain in range(0, tier // 32, 2):
        ids = ids_of(full, chain, 32)
        full.device_lost(ids, np.ones(len(ids), np.bool_))
    full.release(())
    ids = ids_of(full, NEW, blocks)
    hit = np.ones(len(ids), np.bool_)

    def lose_and_settle() -> None:
        full.device_lost(ids, hit)
        full.release(())

    return count_work(lose_and_settle)


def losses_in_a_row(tier: int = 1024, blocks: int = 32) -> Work:
    """The device loses chains, gets them again and loses them, and the order does not matter for
    long: now and then all move. A mean."""
    full = full_tier(tier)
    ids, hit = ids_of(full, 0, blocks), np.zeros(blocks, np.bool_)
    keys = keys_of(0, blocks)
    num_times = 4 * tier // blocks

    def lose_often() -> None:
        for _ in range(num_times):
            full.device_lost(ids, hit)
            full.device_got(keys)

    return count_work(lose_often).over(num_times)


def allocate(tier: int = 1024, blocks: int = 32) -> Work:
    """Evict contents on probation, then duplicates; and commit the blocks."""
    full = full_tier(tier)
    num_others = full.num_used - full.num_duplicates
    full.allocate(num_others - blocks // 2)

    def store_new() -> None:
        store(full, NEW, blocks, on_device=True)

    return count_work(store_new)


def pin(tier: int = 1024, blocks: int = 32) -> Work:
    """Pin a hit, and unpin it."""
    full = full_tier(tier)
    chain = store(full, NEW, blocks)

    def pin_and_unpin() -> None:
        full.pin(chain)
        full.unpin(chain)

    return count_work(pin_and_unpin)


def drop(tier: int = 1024, blocks: int = 32) -> Work:
    full = full_tier(tier)
    return count_work(full.drop, store(full, NEW, blocks))


def reset(tier: int = 1024) -> Work:
    return count_work(full_tier(tier).reset)


def on_device_reset(tier: int = 1024) -> Work:
    return count_work(full_tier(tier).on_device_reset)


def reserve(tier: int = 1024, blocks: int = 32) -> Work:
    """Reserve a chain for two requests that have both ended."""
    full = full_tier(tier)
    store(full, NEW, blocks)
    keys = keys_of(NEW, blocks)

    def reserve_and_unreserve() -> None:
        full.reserve(keys)
        full.reserve(keys)
        full.unreserve(keys)
        full.unreserve(keys)

    return count_work(reserve_and_unreserve)


def release(tier: int = 1024, blocks: int = 32) -> Work:
    full = full_tier(tier)
    store(full, NEW, blocks)
    return count_work(full.release, keys_of(NEW, blocks))


def protect(sessions: int = 64) -> Work:
    """Protect a block for one more session."""
    protections = Protections(full_tier(1024))
    for number in range(sessions):
        protections.add(f"{number}".encode(), 60, keys_of(number, 1))
    return count_work(protections.add, b"one more", 60, keys_of(sessions, 1))


def forget_wishes(sessions: int = 64) -> Work:
    """End the wishes of sessions whose prompts had not one block."""
    protections = Protections(full_tier(1024))
    for number in range(sessions):
        protections.add(f"{number}".encode(), 60, ())
    return count_work(protections.clear)


def open_in_chunks(tier: int = 1024) -> Work:
    """Grow the tier a chunk at a time."""
    growing = make_tier(1)

    def grow_all() -> None:
        for num_blocks in range(32, tier + 1, 32):
            growing.grow(num_blocks)

    return count_work(grow_all)


# Operations of the scheduler side: the work in all hooks. ``device``: its blocks.

EAGER = {"lazy_offload": False}
LAZY = {"lazy_offload": True}
EARLY: dict[str, Any] = {}


def full_rig(extra: dict[str, Any], tier: int, device: int) -> Rig:
    """A rig in a steady state: device and tier are full of prompts that do not return."""
    rig = Rig(device=device, tier=tier, extra=extra)
    for prompt in rig.prompts((tier + 4 * device) // 16, 16):
        rig.add(prompt)
    rig.engine.drain()
    return rig


def count_prompts(rig: Rig, prompts: Sequence[list[int]]) -> Work:
    """The work for one prompt. Lazy stores come in batches, so it is the mean of many prompts.
    Otherwise it is the least, because sets and lists sometimes grow in a leap."""
    if rig.is_lazy:
        return rig.count(rig.run, prompts).over(len(prompts))
    works = [rig.count(rig.run, [prompt]) for prompt in prompts]
    return Work(*map(min, zip(*works, strict=True)))


def new_prompt(extra: dict[str, Any], tier: int = 512, device: int = 128, blocks: int = 8) -> Work:
    """Compute a prompt, and store its blocks. They evict others from device and tier."""
    rig = full_rig(extra, tier, device)
    before = rig.num_transferred
    work = count_prompts(rig, rig.prompts(96 // blocks, blocks))
    assert rig.num_transferred - before >= 3 * blocks
    return work


def old_prompt(extra: dict[str, Any], tier: int = 512, device: int = 128, blocks: int = 8) -> Work:
    """Load a prompt that the device has evicted, from lookup to end. With a threshold of two
    requests, store it."""
    rig = full_rig(extra, tier, device)
    prompts = rig.prompts(device // blocks + 2, blocks)
    rig.run(prompts * 4)  # until each round finds as much as the one before
    before = rig.num_transferred
    work = count_prompts(rig, prompts[: 96 // blocks])
    assert rig.num_transferred - before >= 3 * blocks
    return work


def known_prompt(
    extra: dict[str, Any], tier: int = 512, device: int = 128, blocks: int = 8
) -> Work:
    """Start and end a request whose prompt the device has. Nothing is left to store: no
    duplicate has left, else the scan would come upon its block now and then."""
    rig = full_rig(extra, tier, device)
    [prompt] = rig.prompts(1, blocks)
    rig.run([prompt] * 8)
    before = rig.num_transferred
    works = [rig.count(rig.run, [prompt]) for _ in range(3)]
    assert rig.num_transferred == before
    return Work(*map(min, zip(*works, strict=True)))


def idle_step(extra: dict[str, Any], requests: int = 2, context: int = 8, tier: int = 4096) -> Work:
    """A step of decoding requests that completes no block. ``context``: blocks of each request."""
    rig = decoding_rig(extra, requests, context, tier)
    return rig.count(rig.step, 8).over(8)


def busy_step(extra: dict[str, Any], requests: int = 2, context: int = 8, tier: int = 4096) -> Work:
    """The mean step of decoding requests, while each completes a block. Each request's last eight
    blocks are stored, at once or into the empty tier, unless that is left to the last moment."""
    rig = decoding_rig(extra, requests, context, tier)
    rig.step(96)
    before = rig.num_transferred
    work = rig.count(rig.step, 32)
    assert rig.num_transferred - before == (0 if extra is LAZY else requests * 8)
    return work.over(32)


def decoding_rig(extra: dict[str, Any], requests: int, context: int, tier: int) -> Rig:
    """A rig on which all requests have begun to decode, with room on the device. What was postponed
    of their prompts is done."""
    rig = Rig(device=4096, tier=tier, max_running=requests, chunk=512, extra=extra)
    for prompt in rig.prompts(requests, context):
        rig.add(prompt, answer_tokens=200)
    while not rig.engine.all_decode:
        rig.step(1)
    rig.step(18)  # 16 complete a block
    return rig


def turnover(extra: dict[str, Any], loads: int = 16) -> Work:
    """A step in which a request begins to load, another's load ends, and a third ends. ``loads``:
    in flight."""
    rig = Rig(device=512, tier=1024, max_running=64, delay=2, extra=extra)
    prompts = rig.prompts(2 * loads + 16, 4)
    rig.run(prompts)
    rig.run(rig.prompts(512 // 16 + 4, 16))
    rig.engine.shape = replace(rig.engine.shape, delay=loads)

    def begin_all(some: list[list[int]]) -> None:
        for prompt in some:
            rig.add(prompt)
            rig.step(1)

    begin_all(prompts[: 2 * loads])
    before = rig.engine.num_loaded
    work = rig.count(begin_all, prompts[2 * loads :])
    assert rig.engine.num_loaded - before == 4 * 16
    return work.over(16)


def aborted_load(extra: dict[str, Any], aborted: int = 64) -> Work:
    """The step after an aborted load of ``aborted`` blocks has ended. vLLM puts them before all
    blocks of the queue that are known to be safe, while another request has unstored blocks."""
    rig = Rig(device=1024, tier=2048, extra=extra)
    [prompt] = rig.prompts(1, aborted)
    rig.run([prompt])
    rig.run(rig.prompts(1024 // 16, 16))
    [running] = rig.prompts(1, 8)
    rig.add(running, answer_tokens=200)
    while not rig.engine.all_decode:
        rig.step(1)
    rig.step(18)
    before = rig.engine.num_loaded
    request_id = rig.add(prompt)
    while rig.engine.num_loaded == before:
        rig.step(1)
    assert rig.engine.num_loaded == before + aborted
    num_free = rig.num_free_blocks
    rig.abort(request_id)
    while rig.num_free_blocks < num_free + aborted:
        rig.step(1)
    return rig.count(rig.step, 1)


def waiting_for_room(extra: dict[str, Any], waiting: int = 64) -> Work:
    """A step while ``waiting`` requests wait, whose prompts the tier has. Parked ones have the
    device's blocks."""
    rig = Rig(device=64, tier=1024, max_running=8, delay=400, extra=extra)
    prompts = rig.prompts(8, 24)
    rig.run(prompts)
    for number in range(waiting):
        rig.add(prompts[number % 6])
    rig.step(waiting)  # each is looked at once
    before = rig.engine.num_loaded
    work = rig.count(rig.step, 8)
    assert rig.engine.num_loaded == before > 0
    return work.over(8)


def waiting_for_a_load(extra: dict[str, Any], waiting: int = 64) -> Work:
    """A step while ``waiting`` requests, more than may run, want what another one loads."""
    rig = Rig(device=64, tier=1024, max_running=8, delay=400, extra=extra)
    [prompt] = rig.prompts(1, 24)
    rig.run([prompt])
    rig.run(rig.prompts(8, 16))
    for _ in range(waiting):
        rig.add(prompt)
    rig.step(waiting)  # each is looked at once
    work = rig.count(rig.step, 8)
    assert rig.engine.num_loaded > 0
    return work.over(8)


def alternating_priorities(waiting: int = 64) -> Work:
    """A step in which a request gets its blocks: in turn one that comes before ``waiting`` others,
    and the first of these. Eight blocks are reserved for each of the others."""
    tier = make_tier(4096)
    reservations = QueueReservations(tier, groups_of(tier), pool_of(make_tier(1)), by_priority=True)
    requests = [make_request(f"{number}", [number] * 33) for number in range(waiting)]
    urgent = [make_request(f"urgent {number}", [number] * 32 + [0]) for number in range(4)]
    for request in requests:
        request.priority = 1
        keys = groups_of(tier).keys(request.block_hashes, 0)
        tier.commit(Run((), keys, on_device=False, host_blocks=tier.allocate(8)))
        reservations.add(request)
    reservations.on_step()
    assert tier.num_reserved == 8 * waiting

    def serve() -> None:
        for pair in zip(urgent, requests, strict=False):
            reservations.add(pair[0])
            for request in pair:
                reservations.on_allocated(request)
                reservations.remove(request.request_id)
                reservations.on_step()

    work = count_work(serve)
    assert tier.num_reserved < 8 * waiting
    return work.over(8)


# Laws


class Law(Enum):
    """The growth of a count with a size."""

    CONSTANT = "does not grow"
    LINEAR = "grows by as much for each one more"
    MEAN_CONSTANT = "does not grow on average"
    MEAN_LINEAR = "grows in proportion on average"


SLACK = Work(lines=0.1, allocated=6)
"""The growth per unit of size that still counts as constant. A visit to each block costs one line
each, and a list of the blocks eight bytes each. Sets grow in leaps, which differ by hash seed."""
BEND = Work(lines=1.25, allocated=1.4)
"""How much steeper the second half of a line may be than the first. A parabola's second half is
twice as steep. Sets and lists grow in leaps."""
DRIFT = 1.3
"""The allowed deviation of a mean: lazy stores come in batches."""


def obeys(law: Law, unit: str, sizes: Sequence[int], counts: Sequence[float]) -> bool:
    """Whether ``counts`` at two ``sizes`` obey the law. A line takes three."""
    growths = [after - before for before, after in pairwise(counts)]
    slopes = [growth / (b - a) for growth, (a, b) in zip(growths, pairwise(sizes), strict=True)]
    if law is Law.CONSTANT:
        return bool(max(slopes) <= getattr(SLACK, unit))
    if law is Law.LINEAR:
        first, second = slopes
        return bool(second <= getattr(BEND, unit) * max(0, first) + getattr(SLACK, unit))
    in_proportion = sizes[-1] / sizes[0] if law is Law.MEAN_LINEAR else 1
    return counts[-1] <= DRIFT * in_proportion * counts[0]


CONSTANT, LINEAR = Law.CONSTANT, Law.LINEAR
MEAN_CONSTANT, MEAN_LINEAR = Law.MEAN_CONSTANT, Law.MEAN_LINEAR


class Row(NamedTuple):
    name: str
    operation: Callable[..., Work]
    laws: dict[str, Law]
    """The laws by growing size."""


CHAIN = dict(tier=CONSTANT, blocks=LINEAR)
PROMPT = dict(tier=CONSTANT, device=CONSTANT, blocks=LINEAR)
LAZY_PROMPT = dict(tier=MEAN_CONSTANT, device=MEAN_CONSTANT, blocks=MEAN_LINEAR)
BUSY = dict(context=CONSTANT, requests=LINEAR)
LARGE = EAGER | {"cpu_block_size": 64}
THRESHOLD = EAGER | {"store_threshold": 2}

TABLE = (
    Row("device got", device_got, CHAIN),
    Row("device lost", device_lost, CHAIN),
    Row("losses in a row", losses_in_a_row, dict(tier=CONSTANT)),
    Row("allocate and commit", allocate, CHAIN),
    Row("pin and unpin", pin, CHAIN),
    Row("drop", drop, CHAIN),
    Row("reset", reset, dict(tier=LINEAR)),
    Row("device reset", on_device_reset, dict(tier=CONSTANT)),
    Row("reserve and unreserve", reserve, CHAIN),
    Row("release", release, CHAIN),
    Row("protect", protect, dict(sessions=CONSTANT)),
    Row("forget wishes for nothing", forget_wishes, dict(sessions=CONSTANT)),
    Row("open in chunks", open_in_chunks, dict(tier=LINEAR)),
    # Of each 32 blocks the policy follows one, and then looks at all that it follows.
    Row(
        "eager, new prompt",
        partial(new_prompt, EAGER),
        PROMPT | dict(device=MEAN_CONSTANT, blocks=MEAN_LINEAR),
    ),
    Row("eager, old prompt", partial(old_prompt, EAGER), PROMPT),
    Row("eager, known prompt", partial(known_prompt, EAGER), PROMPT),
    Row("eager, idle step", partial(idle_step, EAGER), BUSY | dict(tier=CONSTANT)),
    Row("eager, busy step", partial(busy_step, EAGER), BUSY),
    Row("eager, turnover", partial(turnover, EAGER), dict(loads=MEAN_LINEAR)),
    Row("large host blocks, old prompt", partial(old_prompt, LARGE), CHAIN),
    Row("threshold, old prompt", partial(old_prompt, THRESHOLD), CHAIN),
    Row("lazy, new prompt", partial(new_prompt, LAZY), LAZY_PROMPT),
    Row("lazy, old prompt", partial(old_prompt, LAZY), LAZY_PROMPT),
    Row("lazy, known prompt", partial(known_prompt, LAZY), PROMPT | dict(blocks=MEAN_LINEAR)),
    Row("lazy, idle step", partial(idle_step, LAZY), BUSY | dict(tier=CONSTANT)),
    Row("lazy, busy step", partial(busy_step, LAZY), BUSY),
    Row("lazy, turnover", partial(turnover, LAZY), dict(loads=MEAN_LINEAR)),
    Row("early, no room", partial(waiting_for_room, EARLY), dict(waiting=CONSTANT)),
    Row("early, a load is shared", partial(waiting_for_a_load, EARLY), dict(waiting=CONSTANT)),
    Row("alternating priorities", alternating_priorities, dict(waiting=CONSTANT)),
    Row("lazy, aborted load", partial(aborted_load, LAZY), dict(aborted=LINEAR)),
    Row("early, new prompt", partial(new_prompt, EARLY), LAZY_PROMPT),
    Row(
        "early, old prompt",
        partial(old_prompt, EARLY),
        LAZY_PROMPT | {"large device": MEAN_CONSTANT},
    ),
    # The scan passes again what the tier has room for, some blocks in each step.
    Row("early, known prompt", partial(known_prompt, EARLY), dict(blocks=MEAN_LINEAR)),
    Row("early, idle step", partial(idle_step, EARLY), BUSY | dict(tier=CONSTANT)),
    Row("early, busy step", partial(busy_step, EARLY), BUSY),
    Row("early, turnover", partial(turnover, EARLY), dict(loads=MEAN_LINEAR)),
)

SIZES = {
    "tier": (512, 768, 1024),  # room for duplicates of all that the device has
    "device": (96, 144, 192),
    "large device": (640, 800, 960),
    "blocks": (8, 16, 32),
    "requests": (8, 16, 32),
    "context": (32, 64, 128),
    "loads": (8, 16, 32),
    "aborted": (64, 128, 192),  # with more, a set grows in a leap
    "waiting": (64, 128, 256),
    "sessions": (64, 128, 192),
}


@cache
def fill_caches(operation: Callable[..., Work]) -> None:
    """The first time takes more."""
    operation()


def check(row: Row, grows: str) -> None:
    """Raise AssertionError unless the row's law for the size ``grows`` holds."""
    law = row.laws[grows]
    sizes = SIZES[grows] if law is LINEAR else SIZES[grows][::2]
    fill_caches(row.operation)

    def measure(size: int) -> Work:
        if grows == "device":  # all that it has may be a duplicate
            return row.operation(tier=1024, device=size)
        if grows == "large device":  # some of it may not, so the scan goes on in each step
            return row.operation(tier=1280, device=size, blocks=16)
        if grows == "blocks":  # here too
            return row.operation(tier=1024, blocks=size)
        return row.operation(**{grows: size})

    works = [measure(size) for size in sizes]
    for unit, counts in zip(Work._fields, zip(*works, strict=True), strict=True):
        found = ", ".join(f"{count:,.0f}" for count in counts)
        message = f"{row.name}, {grows} {sizes}: {found} ({unit})"
        assert counts[0] > 0, f"{message}: nothing was counted"
        assert obeys(law, unit, sizes, counts), f"{message}: should be that it {law.value}"


@pytest.mark.parametrize(
    ("row", "grows"),
    [pytest.param(row, grows, id=f"{row.name}-{grows}") for row in TABLE for grows in row.laws],
)
def test_growth(row: Row, grows: str) -> None:
    check(row, grows)


def test_a_reset_takes_few_lines_for_each_block() -> None:
    """A tier may have millions of blocks, and all requests wait."""
    assert reset(tier=1024).lines < 6 * 1024


# The guard fails on each planted bug


def walk(side: OffloadScheduler, scheduled: SchedulerOutput) -> None:
    """A loop over the tier."""
    for _ in pool_of(side.tier).blocks:
        pass


def copy(side: OffloadScheduler, scheduled: SchedulerOutput) -> None:
    """The same in one line of C code."""
    list(pool_of(side.tier).blocks)


def pair_blocks(side: OffloadScheduler, scheduled: SchedulerOutput) -> None:
    """A quadratic loop: for each block of a new request, all of its blocks."""
    for new in scheduled.scheduled_new_reqs:
        for block in new.block_ids[0]:
            for other in new.block_ids[0]:
                assert block == other or block != other


@pytest.mark.parametrize(
    ("plant", "name", "grows"),
    [
        (walk, "eager, idle step", "tier"),
        (copy, "lazy, idle step", "tier"),
        (copy, "eager, old prompt", "tier"),
        (pair_blocks, "eager, known prompt", "blocks"),
    ],
)
def test_the_guard_fails(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], name: str, grows: str
) -> None:
    build = OffloadScheduler.build_connector_meta

    def planted(side: OffloadScheduler, scheduled: SchedulerOutput) -> StepMetadata:
        plant(side, scheduled)
        return build(side, scheduled)

    monkeypatch.setattr(OffloadScheduler, "build_connector_meta", planted)
    [row] = [row for row in TABLE if row.name == name]
    with pytest.raises(AssertionError, match=f"{name}, {grows} .* should be that it"):
        check(row, grows)
