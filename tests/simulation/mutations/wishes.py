"""Wishes: what a request keeps out of the tiers, wants kept or releases, and its report."""

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.owners import Owners
from simple_offload.scheduler.policy.residency import Residency
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.tier.eviction_order import EvictionOrder
from simple_offload.scheduler.wishes import Wishbook
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import WISHES, WISHES_IN_A_SMALL_TIER

# What is kept out

store_what_is_kept_out = mutation(StorePolicy.on_allocated, "if wishes.store:", "if True:", WISHES)
store_what_requests_hit_that_want_nothing_stored = mutation(
    Residency.on_hit, "if rule is StoreRule.NONE:", "if False:", WISHES.beginning_with(27)
)
store_the_end_of_what_is_kept_out = mutation(
    StorePolicy.on_request_finished,
    "self._pacer.remove(request_id)",
    "self._pacer.remove(request_id); progress.rule = StoreRule.ALL",
    WISHES,
)

# What is kept

forget_that_a_hit_block_is_reserved = mutation(
    EvictionOrder.pin, "code & _RESERVED or _PROTECTED", "_PROTECTED", WISHES_IN_A_SMALL_TIER
)

# What is released

release_what_others_have_found = always(Owners.share, None, WISHES)
own_what_was_there = mutation(
    StorePolicy._own,
    "session, [key for key in keys if key not in new]",
    "session, ()",
    WISHES.beginning_with(11),
).also(StorePolicy._own, "claim(progress.session, new)", "claim(progress.session, keys)")

# Requests

remember_wishes_for_ever = always(Wishbook.forget, None, WISHES)
report_nothing = mutation(
    OffloadScheduler.request_finished, "is not None and wants_report", "is ...", WISHES
)
