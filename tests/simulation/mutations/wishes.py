"""Wishes: what a request keeps out of the tiers, wants kept or releases, and its report."""

from dataclasses import replace
from typing import Any

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.device_contents import DeviceContents
from simple_offload.scheduler.policy.sessions import Sessions
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.tier.leases import Leases
from simple_offload.scheduler.tier.segments import Segments
from simple_offload.scheduler.wishes import Wishbook
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import WISHES, WISHES_IN_A_SMALL_TIER

# What is kept out


@mutation(StorePolicy, "on_allocated", WISHES)
def store_what_is_kept_out(
    on_allocated: Any, self: StorePolicy, request: Any, found: int, loaded: int, wishes: Any
) -> None:
    on_allocated(self, request, found, loaded, replace(wishes, store=True))


@mutation(DeviceContents, "on_found", WISHES)
def store_what_requests_find_that_want_nothing_stored(
    on_found: Any, self: DeviceContents, block_ids: Any, **options: Any
) -> Any:
    return on_found(self, block_ids, stores=True)


@mutation(StorePolicy, "on_request_finished", WISHES)
def store_the_end_of_what_is_kept_out(
    finished: Any, self: StorePolicy, request: Any, **options: Any
) -> None:
    if (progress := self._progress.get(request.request_id)) is not None:
        progress.stores = True
    finished(self, request, **options)


# What is kept

keep_a_lease_without_contents = always(Leases, "end", None, WISHES_IN_A_SMALL_TIER)
keep_more_than_the_share = always(Segments, "_limit_kept", None, WISHES_IN_A_SMALL_TIER)


@mutation(Segments, "pin", WISHES_IN_A_SMALL_TIER)
def forget_that_a_found_block_is_kept(pin: Any, self: Segments, blocks: Any) -> None:
    blocks = list(blocks)
    pin(self, blocks)
    for block in blocks:
        self._of[block.block_id] = 1


# What is released

release_what_others_have_found = always(Sessions, "on_found", None, WISHES)
release_what_was_there = always(StorePolicy, "_num_there", 0, WISHES)


@mutation(Sessions, "__init__", WISHES_IN_A_SMALL_TIER.beginning_with(64))
def take_each_model_for_one_with_full_attention(init: Any, self: Sessions, **_: Any) -> None:
    init(self, has_full_attention=True)


# Requests

remember_wishes_for_ever = always(Wishbook, "forget", None, WISHES)
report_nothing = always(OffloadScheduler, "_report", None, WISHES)
