"""KV events: what a cache-aware router is told of the host tier."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    ExternalBlockHash,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.runs import Run

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_LOCALITY = "LOCAL"


class _Followed(NamedTuple):
    request: "Request"
    num_seen: list[int]
    """By group, how many blocks of its table have been noted."""


class _Removed(NamedTuple):
    key: BlockHashWithGroupId
    part_keys: Sequence[BlockHashWithGroupId]
    """That no other host block had a part of then."""


class Origins:
    """Which request computed a device block. A block says so as long as it holds what that
    request put there, and a block that is stored late outlives its request. One entry a device
    block at most."""

    def __init__(self, kv_cache_manager: "KVCacheManager") -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._followed: dict[str, _Followed] = {}
        self._by_block: dict[int, Request] = {}

    def follow(self, request: "Request") -> None:
        """``request`` has (new) device blocks."""
        self._followed[request.request_id] = _Followed(request, [0] * len(self._managers))

    def forget(self, request_id: str) -> None:
        """The request, whose blocks have not been freed yet, gets no more. Those that it has
        are still known as its own."""
        if (followed := self._followed.pop(request_id, None)) is not None:
            self._note(followed)  # it may never have run: what was loaded for it is complete

    def on_step(
        self, request_ids: Iterable[str], state_blocks: Mapping[str, Sequence[int]]
    ) -> None:
        """A step has been scheduled that runs these requests. ``state_blocks``: by request, the
        ids of blocks with its states, which may be in no table; a request may hand over the
        states of an earlier step in one that does not run it."""
        for request_id, block_ids in state_blocks.items():
            if (followed := self._followed.get(request_id)) is not None:
                self._by_block.update(dict.fromkeys(block_ids, followed.request))
        # After them: such a block may have been given up since, and be in another's table.
        for request_id in request_ids:
            if (followed := self._followed.get(request_id)) is not None:
                self._note(followed)

    def of(self, block: KVCacheBlock) -> "Request | None":
        """The request that was the last to have ``block`` in its table."""
        return self._by_block.get(block.block_id)

    def _note(self, followed: _Followed) -> None:
        request, num_seen = followed
        for group, manager in enumerate(self._managers):
            table = manager.req_to_blocks.get(request.request_id, [])
            # A table of states does not only grow.
            start = num_seen[group] if manager.has_positionally_stable_blocks else 0
            for block in table[start:]:
                self._by_block[block.block_id] = request
            num_seen[group] = len(table)


class KVEvents:
    """Collects BlockStored and BlockRemoved for the keys of the tier, in vLLM's terms: whoever
    replays them has exactly the keys that a lookup would find.

    There is no AllBlocksCleared, not even on a reset: it names no medium, and would take the
    device's blocks along. A host block that holds several device blocks is told of as those, by
    which a router knows the device's prefix cache too.
    """

    def __init__(self, tier: CpuTier) -> None:
        self.tier = tier
        self._parts: dict[BlockHashWithGroupId, list[BlockHashWithGroupId]] = {}
        """By key of a host block of several parts, those of its parts but the last, which is
        the same."""
        self._num_with: Counter[BlockHashWithGroupId] = Counter()
        """Host blocks that have a part of that key: they may part ways inside a host block."""
        self._queue: list[BlockStored | _Removed] = []
        self._specs = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in tier.coordinator.kv_cache_config.kv_cache_groups
        ]
        # The pool knows of every block that leaves, by whatever way.
        setattr(tier.pool, "_emit_block_removed_events", self._queue_removed)  # noqa: B010

    def stored_run(self, run: Run, useless: Collection[int]) -> None:
        """The blocks of ``run`` are findable from now on, but those at the places ``useless``.
        Without the request that computed one, its tokens and its parent are not known, and left
        out."""
        for place, key in enumerate(run.keys):
            if place not in useless:
                self.stored(
                    key,
                    run.inner_keys[place] if run.inner_keys else (),
                    run.num_tokens + place * run.size,
                    run.requests[place] if run.requests else None,
                )

    def stored(
        self,
        key: BlockHashWithGroupId,
        inner_keys: Iterable[BlockHashWithGroupId],
        num_tokens: int,
        request: "Request | None",
    ) -> None:
        """``stored_run`` for one block, of the prefix of ``num_tokens`` tokens; ``inner_keys``:
        of prefixes that end inside it."""
        group = int(get_group_id(key))
        size = self.tier.block_sizes[group]
        hash_size = self.tier.hash_block_size
        num_parts = self.tier.num_parts
        if num_parts > 1 and request is not None and self._is_of(key, request, num_tokens):
            part_size = size // num_parts
            ends = range(num_tokens - size + part_size, num_tokens + 1, part_size)
            keys = [self.tier.key_at(request.block_hashes, group, end) for end in ends]
            self._parts[key] = keys[:-1]
            self._num_with.update(keys[:-1])
            for part_key, end in zip(keys, ends, strict=True):
                self._add(part_key, group, end, part_size, request)
            return
        # vLLM tells of a part of a block as of the last tokens that a hash covers.
        own_size = hash_size if num_tokens % size else size
        self._add(key, group, num_tokens, own_size, request)
        if inner_keys:
            ends = range((num_tokens - 1) // size * size + hash_size, num_tokens, hash_size)
            for inner_key in inner_keys:
                end = next((end for end in ends if self._is_of(inner_key, request, end)), 0)
                self._add(inner_key, group, end, hash_size, request)

    def take(self) -> list[BlockStored | BlockRemoved]:
        """What has happened since the last call, in order."""
        queue, self._queue = self._queue, []
        events: list[BlockStored | BlockRemoved] = []
        removed: set[tuple[ExternalBlockHash, int | None]] = set()
        # Told, and not stored again since: two blocks may have had the same inner key.
        for item in queue:
            if isinstance(item, BlockStored):
                events.append(item)
                removed.difference_update((each, item.group_idx) for each in item.block_hashes)
                continue
            if self.tier.get(item.key) is not None:  # another block holds it
                continue
            for key in (*item.part_keys, item.key):
                told = maybe_convert_block_hash(get_block_hash(key)), int(get_group_id(key))
                # Nor has another come to hold that part since.
                if key not in self._num_with and told not in removed:
                    removed.add(told)
                    _append_removed(events, *told)
        return events

    def _queue_removed(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        for key in keys:
            part_keys = self._parts.pop(key, ())
            self._num_with.subtract(part_keys)
            gone = [part_key for part_key in part_keys if self._num_with[part_key] == 0]
            for part_key in gone:
                del self._num_with[part_key]
            self._queue.append(_Removed(key, gone))

    def _add(
        self,
        key: BlockHashWithGroupId,
        group: int,
        end: int,
        size: int,
        request: "Request | None",
    ) -> None:
        """Queue the ``size`` tokens up to ``end`` as stored under ``key``."""
        kind, sliding_window = self._specs[group]
        block_hash = maybe_convert_block_hash(get_block_hash(key))
        event = BlockStored(
            block_hashes=[block_hash],
            parent_block_hash=None,
            token_ids=[],
            block_size=size,
            lora_id=None,
            medium=MEDIUM_CPU,
            lora_name=None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=sliding_window,
            locality=_LOCALITY,
        )
        if request is not None and self._is_of(key, request, end):
            start = end - size
            extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            event.parent_block_hash = self._parent(request, start)
            event.token_ids = list(request.all_token_ids[start:end])
            event.extra_keys = to_event_extra_keys([extra_keys])
            event.session_id = request.session_id
            if request.lora_request is not None:
                event.lora_id = request.lora_request.adapter_id
                event.lora_name = request.lora_request.name
            if self._queue and _follows(self._queue[-1], event):
                return
        self._queue.append(event)

    def _is_of(self, key: BlockHashWithGroupId, request: "Request | None", end: int) -> bool:
        """Whether ``key`` is of the first ``end`` tokens of the request."""
        if request is None or not 0 < end <= len(request.block_hashes) * self.tier.hash_block_size:
            return False
        return self.tier.key_at(request.block_hashes, int(get_group_id(key)), end) == key

    def _parent(self, request: "Request", start: int) -> ExternalBlockHash | None:
        if start == 0:
            return None
        return maybe_convert_block_hash(
            request.block_hashes[start // self.tier.hash_block_size - 1]
        )


def _follows(last: object, event: BlockStored) -> bool:
    """Whether ``event``, of one block, continues the chain of ``last``, which then has it."""
    if (
        not isinstance(last, BlockStored)
        or not last.token_ids
        or last.block_hashes[-1] != event.parent_block_hash
        or (last.group_idx, last.block_size, last.session_id, last.lora_name)
        != (event.group_idx, event.block_size, event.session_id, event.lora_name)
    ):
        return False
    last.block_hashes += event.block_hashes
    last.token_ids += event.token_ids
    last.extra_keys = [*(last.extra_keys or ()), *(event.extra_keys or ())]
    return True


def _append_removed(
    events: list[BlockStored | BlockRemoved], block_hash: ExternalBlockHash, group: int
) -> None:
    last = events[-1] if events else None
    if isinstance(last, BlockRemoved) and last.group_idx == group:
        last.block_hashes.append(block_hash)
    else:
        events.append(BlockRemoved([block_hash], MEDIUM_CPU, group, _LOCALITY))
