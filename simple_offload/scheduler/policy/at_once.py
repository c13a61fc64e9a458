"""AtOnce: stores each block when it is complete."""

from collections.abc import Collection, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.policy.boundaries import Boundaries
from simple_offload.scheduler.policy.free_queue_scan import num_running_blocks
from simple_offload.scheduler.policy.residency import StoreRule
from simple_offload.scheduler.policy.store_policy import (
    Completed,
    PolicyParts,
    Progress,
    StorePolicy,
    confirmed_tokens,
)
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.run import Run
from simple_offload.transfer import Transfer


class Unhashed(NamedTuple):
    """A host block of an ended request which vLLM will not find."""

    key: BlockHashWithGroupId
    blocks: list[KVCacheBlock]
    num_tokens: int


class AtOnce(StorePolicy):
    """For models with several KV cache groups: a hit needs blocks of every group, and the device
    loses these at different times. Also for larger host blocks, which the device loses in parts.

    The tier then has most of what the device has. Its order is that of last use by requests.
    """

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts, records_hits=True)
        num_running = num_running_blocks(parts.vllm_config, len(self._groups.block_sizes))
        self._reserve = min(num_running, len(self._device_pool.blocks) // 4)
        """Free device blocks that no store takes, for running requests."""
        self._boundaries = Boundaries(self._groups, self._tier)
        self._unchained_ids = set(self._groups.ids).difference(self._groups.chained_ids)
        """Groups of windows or states."""
        self._released: dict[BlockHashWithGroupId, bytes | None] = {}
        """Released contents whose stores are in flight, and their owner."""

    def before_allocation(
        self, request: Request, _num_load_blocks: int, num_computed_tokens: int, /
    ) -> bool:
        """vLLM keeps windows and states at the end of a prefix that others share. The end of a
        conversation's chain is none. vLLM sets the attribute from the device's cache just before it
        asks a connector, and reads it when it schedules."""
        num_own = self._boundaries.num_own(request, num_computed_tokens)
        if request.shared_prefix_boundary <= num_own:
            request.shared_prefix_boundary = 0
        return False

    def on_allocated(self, progress: Progress) -> None:
        super().on_allocated(progress)
        progress.left_before = self._boundaries.hit(progress.request, progress.num_found_tokens)

    def on_step(self, scheduled: SchedulerOutput) -> None:
        due = self._on_scheduled(scheduled)
        self._record_states(_boundary_states(scheduled))
        self._record_due(due)

    def on_store_ended(
        self, blocks: Sequence[KVCacheBlock], _transfer: Transfer | None, /, *, ok: bool
    ) -> None:
        if not ok:
            keys = [key for key in block_pool.keys_of(blocks) if key is not None]
            self._tier.history.note(MissReason.NOT_STORED, keys)
        block_pool.free_blocks(self._device_pool, reversed(blocks))
        if self._released:
            released, self._released = self._released, {}
            self._release(released)

    # Recording

    def _on_complete(self, progress: Progress, completed: Sequence[Completed]) -> None:
        count, sizes = self._groups.num_sub_blocks, self._groups.block_sizes
        hashes = progress.request.block_hashes
        parts = []
        # First the hits of all groups: they must not make room for what one of them stores.
        for group, first, blocks, all_keys in completed:
            keys, stop = all_keys[count - 1 :: count], progress.num_hit_tokens // sizes[group]
            hits = set(self._groups.keys(hashes, group, first, stop)) if first < stop else set()
            # It does not read earlier windows and states, although the device has them.
            start = max(first, self._groups.first_read(progress.num_found_tokens, group))
            read = set(self._groups.keys(hashes, group, start, stop)) if first < start else hits
            self._tier.touch([key for key in keys if key in read])
            # Without its head it was no hit, and must not outlive that.
            self._tier.renew([key for key in keys if key not in hits])
            # Also those that have left the block table: windows and states.
            stop = progress.num_recorded[group]
            own = self._tier.ids_of(self._groups.keys(hashes, group, start, stop))
            progress.own.update(own)
            parts.append((group, blocks, keys, hits))
        for group, blocks, keys, hits in parts:
            lacking = self._stores.absent(keys)
            self._count_computed(progress, group, keys, lacking, hits)
            self._store(progress, blocks, keys, lacking, hits)

    def _follow_computed(
        self, computed: Collection[BlockHashWithGroupId], new: Collection[BlockHashWithGroupId]
    ) -> None:
        """A request has computed contents, and the tier lacked ``new`` ones of them. All take the
        place of others at the end of its order."""
        if self._reuse.advance(len(computed)) and new:
            self._reuse.follow(get_block_hash(min(new)))

    def _on_ended(self, progress: Progress, /) -> Sequence[BlockHashWithGroupId]:
        unhashed = self._unhashed(progress.request) if progress.rule is StoreRule.ALL else []
        keys = [each.key for each in unhashed]
        lacking = self._stores.absent(keys)
        for group in self._groups.ids if keys else ():
            self._own(progress, group, (), lacking)
        self._follow_computed(keys, lacking)
        self._store_unhashed(progress, [each for each in unhashed if each.key in lacking])
        self._renew(progress)
        return keys

    def _renew(self, progress: Progress) -> None:
        """A request ends. What the next turn needs must not make room before others."""
        request, groups = progress.request, self._groups
        hashes = request.block_hashes
        for group in groups.chained_ids:
            self._tier.renew(groups.keys(hashes, group, 0, progress.num_recorded[group]))
        # A repeated prompt, or one with another last question, goes on at the prompt's end.
        ends = (request.num_prompt_tokens - 1, self._num_hashed_tokens(request))
        needed = {groups.next_hit(end): self._needed(hashes, end) for end in ends}
        self._tier.renew(dict.fromkeys(chain(*needed.values())))
        left = {n: keys for n, keys in needed.items() if keys and not self._stores.absent(keys)}
        self._boundaries.add(request, left, progress.left_before)

    def _needed(self, hashes: list[BlockHash], num_tokens: int) -> list[BlockHashWithGroupId]:
        """Keys of the windows and states that must be there for the next hit."""
        keys = []
        for group in self._unchained_ids:
            blocks = self._groups.needed_blocks(num_tokens, group)
            keys += self._groups.keys(hashes, group, blocks.start, blocks.stop)
        return keys

    def _record_states(self, states: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        for request_id, of_request in states.items():
            progress = self._progress.get(request_id)
            if progress is not None:
                self._count(progress)
                self._record(progress)  # what it has hit must not make room
                for state in of_request:
                    self._record_state(progress, *state)

    def _record_state(self, progress: Progress, group: int, block_id: int, num_tokens: int) -> None:
        block = self._device_pool.blocks[block_id]
        if group in self._groups.ids:
            key = self._groups.key_at(progress.request.block_hashes, group, num_tokens)
            if block.block_hash == key:
                self._tier.renew([key])
                progress.own.update(self._tier.ids_of([key]))
                self._store(progress, [block], [key], self._stores.absent([key]), set())

    def _count_computed(
        self,
        progress: Progress,
        group: int,
        keys: Sequence[BlockHashWithGroupId],
        lacking: set[BlockHashWithGroupId],
        hits: set[BlockHashWithGroupId],
    ) -> None:
        """A request has computed contents with ``keys``, but for ``hits``. The tier neither has nor
        gets ``lacking`` ones."""
        computed = set(keys) - hits
        new = lacking - hits
        self._own(progress, group, keys, new)
        self._meter.add(metrics.SKIPPED, len(computed - lacking), "already_stored")
        self._follow_computed(computed, new)
        note = self._tier.history.note
        if progress.rule is StoreRule.NONE:
            note(MissReason.WISH, new)
        elif progress.rule is StoreRule.HITS:
            self._meter.add(metrics.SKIPPED, len(new), "overload")
            note(MissReason.OVERLOAD, new)
        else:
            refused = new - self._admission.admitted(new)
            self._meter.add(metrics.SKIPPED, len(refused), "below_threshold")
            note(MissReason.BELOW_THRESHOLD, refused)

    def _on_released(self, released: Sequence[tuple[KVCacheBlock, BlockHashWithGroupId]]) -> None:
        self._release({key: self._owners.of(key) for _, key in released})

    def _release(self, released: Mapping[BlockHashWithGroupId, bytes | None]) -> None:
        """Release contents that still have these owners: now, or when their stores have ended."""
        owned = [key for key, owner in released.items() if self._owners.of(key) == owner]
        self._tier.release(owned)
        coming = self._tier.absent(owned) - self._stores.absent(owned)
        self._released |= {key: released[key] for key in owned if key in coming}

    # Storing

    def _store(
        self,
        progress: Progress,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        lacking: set[BlockHashWithGroupId],
        hits: set[BlockHashWithGroupId],
    ) -> None:
        """Plan stores of ``blocks``, all sub-blocks of the host blocks with ``keys``, as far as the
        tier is ``lacking`` them. The device had the contents of ``hits`` before."""
        if progress.rule is StoreRule.HITS:
            lacking = lacking & hits
        wanted = self._admission.admitted(lacking)
        if not wanted or progress.rule is StoreRule.NONE:
            return
        run = self._run(progress.request, blocks, keys, wanted)
        planned = self._stores.plan(run, progress.own, self._device_pool)
        progress.own.update([block.block_id for block in planned])
        self._meter.add(metrics.DROPPED, len(run.keys) - len(planned), "tier_full")
        if len(planned) < len(wanted):
            self._tier.history.note(MissReason.NOT_STORED, wanted - {*run.keys[: len(planned)]})

    def _run(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        wanted: Set[BlockHashWithGroupId],
    ) -> Run:
        """The host blocks of ``wanted`` keys. Blocks that are free already count only as far as
        running requests do not need them."""
        count = self._groups.num_sub_blocks
        room = max(0, self._device_pool.get_num_free_blocks() - self._reserve)
        is_tight = room < len(blocks)
        device_blocks: list[KVCacheBlock] = []
        chosen: list[BlockHashWithGroupId] = []
        for place, key in enumerate(keys):
            if key not in wanted:
                continue
            parts = blocks[place * count : (place + 1) * count]
            if is_tight:
                num_free = sum(part.ref_cnt == 0 for part in parts)
                if num_free > room:
                    continue
                room -= num_free
            device_blocks += parts
            chosen.append(key)
        run = Run(device_blocks, chosen, request=request)
        if self._wants_events:
            last = device_blocks[count - 1 :: count]
            run.num_tokens = [block.block_hash_num_tokens or 0 for block in last]
        return run

    def _unhashed(self, request: Request) -> list[Unhashed]:
        """Blocks that vLLM will not hash any more, and will allocate first: blocks completed by
        the last step, and a window that the next turn needs."""
        groups, found = self._groups, []
        for group in groups.ids:
            manager = self._managers[group]
            table = manager.req_to_blocks.get(request.request_id, [])
            stop = self._num_complete_blocks(request, group, len(table) // groups.num_sub_blocks)
            if group in groups.chained_ids:
                num_hashed = manager.num_cached_block.get(request.request_id, 0)
                first = num_hashed // groups.num_sub_blocks
            else:
                first = self._first_unhashed_block(request, group, table, stop)
            size = groups.block_sizes[group]
            keys = groups.keys(request.block_hashes, group, first, stop)
            admitted = self._admission.admitted({*keys})
            for index, key in enumerate(keys, first):
                blocks = groups.sub_blocks(table, index, index + 1)
                if (
                    not any(block.is_null for block in blocks)
                    and None in block_pool.keys_of(blocks)
                    and key in admitted
                ):
                    found.append(Unhashed(key, blocks, (index + 1) * size))
        return found

    def _first_unhashed_block(
        self, request: Request, group: int, table: Sequence[KVCacheBlock], stop: int
    ) -> int:
        """The first block that is stored although vLLM has not hashed it: of the ``stop`` complete
        host blocks of an ending request, in a group that is not chained. ``table``: its block
        table.

        By default vLLM hashes the blocks of a sliding window that the prompt's end needs
        (``prefix_cache_retention_interval`` 0). This adds the blocks that the request's end needs,
        if the table has all of them.
        """
        groups = self._groups
        if group not in groups.stable_ids:
            return stop
        first = groups.first_read(groups.next_hit(self._num_hashed_tokens(request)), group)
        has_all = first < stop and not table[first * groups.num_sub_blocks].is_null
        return first if has_all else stop

    def _num_complete_blocks(self, request: Request, group: int, num_blocks: int) -> int:
        """Number of the request's ``num_blocks`` blocks of ``group`` that are complete and have a
        hash."""
        confirmed = confirmed_tokens(request)
        tokens = min(
            self._num_hashed_tokens(request), self._groups.num_cacheable_tokens(confirmed, group)
        )
        return int(min(tokens // self._groups.block_sizes[group], num_blocks))

    def _num_hashed_tokens(self, request: Request) -> int:
        """Confirmed tokens whose blocks may have a hash."""
        num_known = len(request.block_hashes) * self._groups.hash_block_size
        return min(confirmed_tokens(request), num_known)

    def _store_unhashed(self, progress: Progress, lacking: Sequence[Unhashed]) -> None:
        """Store blocks of a request that vLLM will not find, and that the tier lacks."""
        if not lacking:
            return
        run = Run(
            [block for each in lacking for block in each.blocks],
            [each.key for each in lacking],
            on_device=False,
            request=progress.request,
        )
        run.num_tokens = [each.num_tokens for each in lacking]
        planned = self._stores.plan(run, progress.own, self._device_pool)
        # The device has these no more.
        self._meter.add(metrics.DROPPED, len(lacking) - len(planned), "tier_full")


def _boundary_states(scheduled: SchedulerOutput) -> dict[str, list[tuple[int, int, int]]]:
    """The state blocks (Mamba and the like) that vLLM hands over with this step, by request: group,
    block id, and the number of tokens after which the state is. Soon they may be in no block table.
    Without those of requests that give up their blocks in this step, which does not complete
    them."""
    handed_over = scheduled.kv_connector_block_state
    if handed_over is None:
        return {}
    gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
    return {
        request_id: states
        for request_id, states in handed_over.boundary_state_offloads.items()
        if request_id not in gone
    }
