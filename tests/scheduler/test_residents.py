"""What becomes of what a device block held is counted once, and by what is lost."""

from simple_offload import metrics
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.device_contents import Residents
from simple_offload.scheduler.rank_reports import InFlight
from simple_offload.scheduler.stores import Storable, Stores
from tests.scheduler.tiers import BLOCK_SIZE, key, make_tier, parent_of, prefixes


def test_what_another_block_of_the_device_holds_is_not_lost() -> None:
    tier, device = make_tier(4), make_tier(8).pool
    residents = Residents(Stores(tier, InFlight(1)), Admission(1), device)
    blocks = device.get_new_blocks(2)
    for block in blocks:
        device._insert_block_hash(key("a"), block, BLOCK_SIZE)
        residents.record([block], [key("a")], None)
    said = []
    for block in blocks:
        device.evict_blocks({block.block_id})
        assert residents.take([block], "too_late") == [block.block_id]
        said.append(tier.meter.drain())
    assert said[0] is None
    assert said[1] is not None
    assert said[1]._values(metrics.DROPPED) == {("too_late",): 1}


def test_what_follows_each_other_is_stored_as_one() -> None:
    tier, device = make_tier(8), make_tier(8).pool
    stores = Stores(tier, InFlight(1))
    residents = Residents(stores, Admission(1), device)
    queued = []
    for chain in ("abc", "x", "xyz"):  # as the device frees them
        for name in reversed(prefixes(chain)):
            if device.cached_block_hash_to_block.get_one_block(key(name)) is None:
                (block,) = device.get_new_blocks(1)
                device._insert_block_hash(key(name), block, len(name) * BLOCK_SIZE)
                residents.record([block], [key(name)], parent_of(name))
                queued.append(block)
    storable = [s for block in queued if (s := residents.storable(block)) is not None]
    assert residents.plan(storable, frozenset()) == []
    runs = [run for run, _ in stores._planned.runs]
    assert [(list(run.keys), run.parent, run.num_tokens, run.size) for run in runs] == [
        ([key("a"), key("ab"), key("abc")], None, 4, 4),
        ([key("x")], None, 4, 0),
        ([key("xy"), key("xyz")], key("x"), 8, 4),
    ]


def test_what_there_is_no_room_for_is_left() -> None:
    tier, device = make_tier(2), make_tier(8).pool
    residents = Residents(Stores(tier, InFlight(1)), Admission(1), device)
    blocks = device.get_new_blocks(3)
    for block, name in zip(blocks, prefixes("abc"), strict=True):
        device._insert_block_hash(key(name), block, len(name) * BLOCK_SIZE)
    residents.record(blocks, [key(name) for name in prefixes("abc")], None)
    storable = [s for block in reversed(blocks) if (s := residents.storable(block)) is not None]
    (left,) = residents.plan(storable, frozenset())
    assert left.key == key("abc")


def test_what_ends_inside_a_block_is_stored_alone() -> None:
    """A run adds as many tokens with each block."""
    tier, device = make_tier(8), make_tier(8).pool
    stores = Stores(tier, InFlight(1))
    residents = Residents(stores, Admission(1), device)
    blocks = device.get_new_blocks(3)
    ends = {"a": 4, "ab": 8, "abc": 10}
    storable = [
        Storable((block,), key(name), parent_of(name), ends[name], early=True)
        for block, name in zip(blocks, reversed(ends), strict=True)
    ]
    assert residents.plan(storable, frozenset()) == []
    assert [list(run.keys) for run, _ in stores._planned.runs] == [
        [key("ab"), key("abc")],
        [key("a")],
    ]
