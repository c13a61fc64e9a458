"""What becomes of what a device block held is counted once, and by what is lost."""

from simple_offload import metrics
from simple_offload.scheduler.admission import Admission
from simple_offload.scheduler.in_flight import InFlight
from simple_offload.scheduler.residents import Residents
from simple_offload.scheduler.stores import Stores
from tests.scheduler.tiers import BLOCK_SIZE, key, make_tier


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
        said.append(tier.meter.take())
    assert said[0] is None
    assert said[1] is not None
    assert said[1]._values(metrics.DROPPED) == {("too_late",): 1}
