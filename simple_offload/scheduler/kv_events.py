"""KV events: what a cache-aware router is told of the host tier."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    ExternalBlockHash,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from simple_offload.scheduler.event_payload import ByKey, Contents, contents_of_host_block
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOCALITY = "LOCAL"


class _Removed(NamedTuple):
    key: BlockHashWithGroupId
    part_keys: Sequence[BlockHashWithGroupId]
    """That no other host block had a part of then."""


class KVEvents:
    """Collects BlockStored and BlockRemoved for the keys of the tier, in vLLM's terms: whoever
    replays them has exactly the keys that a lookup would find.

    There is no AllBlocksCleared, not even on a reset: it names no medium, and would take the
    device's blocks along. A host block that holds several device blocks is told of as those, by
    which a router knows the device's prefix cache too.
    """

    def __init__(self, tier: CpuTier) -> None:
        self.tier = tier
        self._groups = tier.groups
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
        Where it is not known whose tokens they are, those and their parent are left out."""
        for place, key in enumerate(run.keys):
            if place not in useless:
                self.stored(
                    key,
                    run.inner_keys[place] if run.inner_keys else (),
                    run.num_tokens + place * run.size,
                    run.origins[place] if run.origins else None,
                )

    def stored(
        self,
        key: BlockHashWithGroupId,
        inner_keys: Iterable[BlockHashWithGroupId],
        num_tokens: int,
        origin: "Request | ByKey | None",
    ) -> None:
        """``stored_run`` for one block, of the prefix of ``num_tokens`` tokens; ``inner_keys``:
        of prefixes that end inside it."""
        group = int(get_group_id(key))
        size, num_parts = self._groups.block_sizes[group], self._groups.num_parts
        contents = origin or {}
        if not isinstance(contents, dict):
            contents = contents_of_host_block(self._groups, key, inner_keys, num_tokens, contents)
        if num_parts > 1 and len(contents) == num_parts and key in contents:
            keys = list(contents)
            self._parts[key] = keys[:-1]
            self._num_with.update(keys[:-1])
            for part_key in keys:
                self._add(part_key, group, size // num_parts, contents[part_key])
            return
        hash_size = self._groups.hash_block_size
        self._add(key, group, hash_size if num_tokens % size else size, contents.get(key))
        for inner_key in inner_keys:
            self._add(inner_key, group, hash_size, contents.get(inner_key))

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
            if self.tier.lookup.get(item.key) is not None:  # another block holds it
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
        self, key: BlockHashWithGroupId, group: int, size: int, contents: Contents | None
    ) -> None:
        """Queue ``size`` tokens as stored under ``key``."""
        kind, sliding_window = self._specs[group]
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
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
        if contents is not None:
            if contents.parent is not None:
                event.parent_block_hash = maybe_convert_block_hash(contents.parent)
            event.token_ids = contents.token_ids.tolist()
            event.extra_keys = contents.extra_keys
            event.session_id = contents.session_id
            event.lora_id, event.lora_name = contents.lora_id, contents.lora_name
            if self._queue and _follows(self._queue[-1], event):
                return
        self._queue.append(event)


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
