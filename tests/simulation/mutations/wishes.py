"""Wishes: what a request keeps out of the tiers, wants kept or releases, and its report."""

from dataclasses import replace
from typing import Any

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.owners import Owners
from simple_offload.scheduler.policy.residency import Residency, StoreRule
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.tier.eviction_order import EvictionOrder
from simple_offload.scheduler.wishes import Wishbook
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import WISHES, WISHES_IN_A_SMALL_TIER

# What is kept out


@mutation(StorePolicy, "on_allocated", WISHES)
def store_what_is_kept_out(
    on_allocated: Any, self: StorePolicy, request: Any, found: int, loaded: int, wishes: Any
) -> None:
    on_allocated(self, request, found, loaded, replace(wishes, store=True))


@mutation(Residency, "on_hit", WISHES.beginning_with(27))
def store_what_requests_hit_that_want_nothing_stored(
    on_hit: Any, self: Residency, block_ids: Any, _: Any
) -> Any:
    return on_hit(self, block_ids, StoreRule.ALL)


@mutation(StorePolicy, "on_request_finished", WISHES)
def store_the_end_of_what_is_kept_out(
    finished: Any, self: StorePolicy, request: Any, **options: Any
) -> None:
    if (progress := self._progress.get(request.request_id)) is not None:
        progress.rule = StoreRule.ALL
    finished(self, request, **options)


# What is kept


@mutation(EvictionOrder, "pin", WISHES_IN_A_SMALL_TIER)
def forget_that_a_hit_block_is_reserved(pin: Any, self: EvictionOrder, blocks: Any) -> None:
    blocks = list(blocks)
    pin(self, blocks)
    for block in blocks:
        self._codes[block.block_id] = 1


# What is released

release_what_others_have_found = always(Owners, "share", None, WISHES)


@mutation(StorePolicy, "_own", WISHES.beginning_with(12))
def own_what_was_there(
    own: Any, self: StorePolicy, progress: Any, group: int, keys: Any, lacking: Any
) -> None:
    own(self, progress, group, (), lacking)
    self._owners.claim(progress.session, keys)


# Requests

remember_wishes_for_ever = always(Wishbook, "forget", None, WISHES)


@mutation(OffloadScheduler, "request_finished", WISHES)
def report_nothing(finished: Any, self: OffloadScheduler, request: Any) -> tuple[bool, None]:
    return finished(self, request)[0], None
