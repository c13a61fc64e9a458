"""Models with states, drafts, several sizes of blocks and pages; host blocks with sub-blocks."""

from simple_offload.scheduler.loads import Loads, _Load
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.at_once import AtOnce
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.lookup import Lookup
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import Mutation, mutation
from tests.simulation.mutations.situations import (
    CHAINED_WINDOWS,
    INNER_HITS,
    INSIDE_HOST_BLOCKS,
    STATES,
    SUB_BLOCKS,
    Situation,
    engine,
)
from tests.simulation.world import World

# States

# A state block is stored once its last token is known, before the state includes that token.
store_the_running_state = mutation(
    AtOnce._num_complete_blocks,
    "",
    "if group not in self._groups.stable_ids:\n"
    "    num_known = len(request.block_hashes) * self._groups.hash_block_size\n"
    "    return min(num_known // self._groups.block_sizes[group], num_blocks)",
    STATES.beginning_with(14),
).also(AtOnce._first_unhashed_block, "return stop", "return max(0, stop - 1)")
load_the_state_of_another_boundary = mutation(
    Lookup.find,
    "pins = [",
    "for group in {*groups.ids}.difference(groups.stable_ids):\n"
    "    last = (num_computed_tokens + num_tokens) // groups.block_sizes[group] - 1\n"
    "    keys = groups.keys(block_hashes, group, 0, last)\n"
    "    found = [block for block in block_pool.find_blocks(self._pool, keys) if block]\n"
    "    blocks[group][-1:] = found[-1:] or blocks[group][-1:]\n"
    "pins = [",
    STATES,
)
# The hit is as long as the attention groups', whatever the state groups hold. No state is loaded.
believe_a_state_that_is_missing = mutation(
    Lookup.__init__,
    "self._coordinator = coordinator",
    "self._coordinator = coordinator\n"
    "coordinator.attention_groups = [\n"
    "    each for each in coordinator.attention_groups if 'Mamba' not in type(each.spec).__name__\n"
    "]",
    STATES,
).also(
    Loads.plan,
    "[group][first:last]",
    "[group][first:last] if group in self._groups.stable_ids else []",
)
# vLLM copies a state to keep it from inside a block. The request goes on with the original, which
# this step changes.
store_the_original_of_a_copied_state = mutation(
    AtOnce._record_state,
    "if block.block_hash == key:",
    "request, size = progress.request, self._groups.block_sizes[group]\n"
    "if num_tokens % size and self._stores.absent([key]):\n"
    "    table = self._managers[group].req_to_blocks[request.request_id]\n"
    "    run = Run([table[num_tokens // size]], [key], on_device=False, request=request)\n"
    "    run.num_tokens = [num_tokens]\n"
    "    self._stores.plan(run, set(), self._device_pool)\n"
    "if block.block_hash == key:",
    INNER_HITS,
)
take_the_inner_keys_of_another_block = mutation(
    CpuTier.commit,
    "",
    "before = vars(self).setdefault('inner_keys_before', [()])\n"
    "before.extend(run.inner_keys or [()] * len(run.keys))\n"
    "run.inner_keys = [before.pop(0) for _ in run.keys]",
    INNER_HITS,
)

# Drafts

count_rejected_drafts_as_computed = (
    mutation(
        StorePolicy._on_scheduled,
        "return ",
        "for request_id, num_tokens in scheduled.num_scheduled_tokens.items():\n"
        "    if progress := self._progress.get(request_id):\n"
        "        progress.request.num_sent += num_tokens\n"
        "return ",
        engine(windows=(0,), num_drafted=3, first_seed=21),
    )
    .also(
        StorePolicy.on_allocated,
        "",
        "progress.request.num_sent = confirmed_tokens(progress.request)",
    )
    .also(
        AtOnce._num_complete_blocks,
        "confirmed_tokens(request)",
        "max(request.num_sent, request.num_computed_tokens)",
    )
    .also(
        AtOnce._num_complete_blocks,
        "self._num_hashed_tokens(request)",
        "len(request.block_hashes) * self._groups.hash_block_size",
    )
)
# As if a table ended with the hit. That of a state group has room for the drafts' states behind it.
pair_a_hit_with_the_end_of_a_table = mutation(
    Loads.plan,
    "[group][first:last]",
    "[group][first:last]\n"
    "table = device_blocks[group][len(device_blocks[group]) - len(hit.blocks[group]) :]",
    engine(windows=(0,), num_drafted=2, num_states=1),
)
# The blocks stay in the table without contents, and vLLM gives them a hash.
leave_blocks_that_attention_does_not_read = mutation(
    OffloadScheduler._free_unread, "", "return", CHAINED_WINDOWS
).also(
    _Load.add,
    "",
    "there = [slot >= num_sub_blocks for slot in slots]\n"
    "table = [block for block, is_there in zip(table, there) if is_there]\n"
    "slots = [slot for slot, is_there in zip(slots, there) if is_there]",
)


def _lose_what_a_step_has_left(shown_by: Situation) -> Mutation:
    return mutation(OffloadWorker.bind, "if metadata is not self._metadata:", "if False:", shown_by)


# vLLM does not call them on a pipeline's first stages.
wait_for_hooks_that_are_not_called = _lose_what_a_step_has_left(
    engine(windows=(0,), num_drafted=2, num_ranks=2, num_stages=2, first_seed=8)
)
# vLLM 0.30 does not call them. The engine then steps for ever.
wait_for_hooks_of_steps_without_tokens = _lose_what_a_step_has_left(
    engine(
        windows=(0,),
        saves_without_tokens=False,
        otherwise={"saves_without_tokens": True},
        first_seed=2,
    )
)
# vLLM's V1 runner asks for results before it drafts, so a store may read a page that the drafter
# has yet to write.
submit_stores_with_results = mutation(
    OffloadWorker.poll,
    "",
    "self.submit_stores()",
    engine(
        windows=(0,),
        draft=True,
        num_drafted=2,
        v2_runner=False,
        otherwise={"v2_runner": True},
        first_seed=9,
    ),
)

# Blocks and pages of several sizes


def _skip_blocks_of(size: str, shown_by: Situation) -> Mutation:
    """Count the device's share of a table in blocks of ``size`` tokens."""
    return mutation(
        Loads.plan,
        "table = device_blocks[group][first:last]",
        "table = device_blocks[group]\n"
        f"wrong = min(known.num_computed_tokens // self._groups.{size}, len(table) - 1)\n"
        "table = [*table[wrong:], *table[:wrong]][: last - first]",
        shown_by,
    )


think_all_blocks_as_large_as_the_first = _skip_blocks_of(
    "block_sizes[0]", engine(windows=(0, 0), scales=(1, 2), first_seed=10)
)
think_a_block_is_what_one_rank_has_of_it = _skip_blocks_of(
    "specs[group].block_size",
    engine(windows=(0,), num_ranks=2, context_parallel=True, first_seed=10),
)
# A copy covers as many bytes of each page as the smallest page has.
believe_all_pages_alike = mutation(
    OffloadWorker.register_kv_caches,
    "self._rank_pool = ",
    "regions = [each[:, : min(region.shape[1] for region in regions)] for each in regions]\n"
    "self._rank_pool = ",
    engine(windows=(0,), mixed_pages=True, otherwise={"windows": (0, 8)}, first_seed=3),
)

# Host blocks with several sub-blocks

# The bug shows in a load that begins in the middle of a host block.
pair_from_the_start_of_the_host_block = mutation(
    Loads.submit,
    "load.slots,",
    "[slot - load.slots[0] % self._groups.num_sub_blocks for slot in load.slots],",
    INSIDE_HOST_BLOCKS,
)
# As if the sub-blocks of the next host block began at the next slot.
number_slots_by_the_host_block = mutation(
    CpuTier.slots,
    "block.block_id * count + place",
    "block.block_id + count - 1 + place",
    SUB_BLOCKS,
)
# KV events are right: the wrong bytes must show this bug.
know_a_host_block_by_its_first_sub_block = (
    mutation(
        Lookup.find,
        "",
        "count = self._groups.num_sub_blocks\n"
        "block_hashes = [block_hashes[i - i % count] for i in range(len(block_hashes))]",
        SUB_BLOCKS,
    )
    .also(
        CpuTier.commit,
        "useless = ",
        "if (count := self._groups.num_sub_blocks) > 1:\n"
        "    first = block_pool.keys_of(run.device_blocks[::count])\n"
        "    keys = [by_first or key for by_first, key in zip(first, keys)]\n"
        "useless = ",
    )
    .also(World.check_events, "", "return")
    .also(World._check_duplicates, "", "return")
)
# The bug shows in a hit that ends inside the last host block.
believe_that_all_groups_have_the_last_host_block = mutation(
    Lookup._extend, "for group in groups.ids:", "for group in groups.ids[:1]:", SUB_BLOCKS
)
