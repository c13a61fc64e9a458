"""The host tier: the keys that it finds, the blocks that it keeps, and its growth."""

from copy import copy
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.setup import Setup
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction_order import EvictionOrder
from simple_offload.scheduler.tier.lookup import Lookup
from simple_offload.worker.host_pool import HostPool
from tests.simulation.mutations.registry import Mutation, always, mutation
from tests.simulation.mutations.situations import (
    ADAPTERS,
    COPIES,
    EMBEDDINGS,
    FAILING_LOADS,
    GROWING,
    ORDINARY,
    PICTURES,
    RESETS,
    SMALL_TIER,
    SUB_BLOCKS,
    Situation,
    engine,
)
from tests.simulation.world import World

# What it drops

offer_a_failed_block_again = always(CpuTier.drop, None, FAILING_LOADS.beginning_with(19))
keep_the_tier_over_a_reset = always(CpuTier.reset, None, RESETS)

# Its order of eviction

leave_the_evicted_in_their_segment = always(EvictionOrder._forget, None, SMALL_TIER)
# Only one of them becomes the most recently used.
let_duplicates_of_lost_blocks_leave_first = mutation(
    EvictionOrder.device_lost, "", "block_ids, hit = block_ids[:1], hit[:1]", COPIES
)
never_settle = always(EvictionOrder._settle, None, COPIES)
# The last block of the tier becomes a duplicate too.
call_duplicates_what_the_device_does_not_have = mutation(
    CpuTier.device_got,
    "",
    "for block in [b for b in self._pool.blocks if b.block_hash][-1:]:\n"
    "    self._order.device_got([block])",
    COPIES,
)
let_heads_leave_before_tails = mutation(
    CpuTier.device_lost, "(block_ids, hit)", "(block_ids[::-1], hit[::-1])", COPIES
)

# Its keys

_OF_TWINS: dict[bytes, bytes] = {}


def note_twin(request: Request, hash_size: int, **changes: Any) -> None:
    """Remember what the request's hashes would be with these ``changes``."""
    twin = copy(request)
    vars(twin).update(changes, block_hashes=[])
    of_twin = get_request_block_hasher(hash_size, sha256)(twin)
    _OF_TWINS.update(zip(request.block_hashes, of_twin, strict=True))


def of_twins(hashes: Any) -> list[Any]:
    """Hashes, or keys, as those of the requests' twins."""
    return [_OF_TWINS.get(each[:32], each[:32]) + each[32:] for each in hashes]


def _ignoring(shown_by: Situation = ORDINARY, **changes: Any) -> Mutation:
    """The tier stores and finds blocks as if requests had these ``changes``. KV events are right:
    the wrong bytes must show this bug."""
    here = f"from {__name__} import note_twin, of_twins"
    note = f"note_twin(request, self.shape.hash_size, **{changes!r})"
    add = "self.scheduler.add_request(request)"
    return (
        mutation(World.add_request, add, f"{here}; {note}\n{add}", shown_by)
        .also(Lookup.find, "", f"{here}; block_hashes = of_twins(block_hashes)")
        .also(CpuTier.commit, "run.keys,", "of_twins(run.keys),")
        .also(CpuTier.commit, "", here)
        .also(World.check_events, "", "return")
    )


ignore_salt = _ignoring(cache_salt=None)
ignore_adapters = _ignoring(ADAPTERS, lora_request=None)
ignore_pictures = _ignoring(PICTURES, mm_features=[])
ignore_embeddings = _ignoring(EMBEDDINGS, prompt_embeds=None)

# Its growth

grow_to_the_largest_rank = mutation(Setup.on_capacities, "= min(", "= max(", GROWING)
grow_by_slots = mutation(
    Setup.on_capacities, "num_open // self._num_sub_blocks", "num_open", SUB_BLOCKS
)
grow_before_all_ranks_have_spoken = mutation(
    Setup.on_capacities,
    "if len(",
    "self.tier.grow(min((each.num_open for each in self._capacities.values()), default=0))\n"
    "if len(",
    GROWING.beginning_with(15),
)
grow_to_what_is_not_open_yet = mutation(
    Setup.on_capacities, "capacity.num_open", "capacity.num_host_blocks", GROWING
)
never_grow = mutation(OffloadScheduler._on_report, "if report.capacities:", "if False:", GROWING)
open_what_no_other_rank_has_room_for = mutation(
    HostPool.agree,
    "min(num_blocks, self.num_blocks)",
    "self.num_blocks",
    engine(windows=(0,), num_ranks=2, uneven_ranks=True, chunk_blocks=3, first_seed=4),
)
