"""KVEvents: the host tier's part of vLLM's KV events, for cache-aware routers."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

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
from vllm.v1.request import Request

from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import EventPayload, PayloadsByKey, Run

_LOCALITY = "LOCAL"


class _Removed(NamedTuple):
    key: BlockHashWithGroupId
    sub_block_keys: Sequence[BlockHashWithGroupId]
    """Keys that no sub-block of another host block had then."""


class KVEvents:
    """Collects BlockStored and BlockRemoved for the keys of the tier, in vLLM's terms. A router
    that replays them has exactly the keys that a lookup would find.

    There is no AllBlocksCleared, even after a reset: it names no medium, and would remove the
    device's blocks too. A host block with several sub-blocks is reported as those, which routers
    know from the device's prefix cache.
    """

    def __init__(self, tier: CpuTier, groups: Groups) -> None:
        self._tier = tier
        self._groups = groups
        self._sub_block_keys: dict[BlockHashWithGroupId, list[BlockHashWithGroupId]] = {}
        """By key of a host block with several sub-blocks, their keys but the last, which is the
        same."""
        self._num_with: Counter[BlockHashWithGroupId] = Counter()
        """Host blocks with a sub-block of that key: chains may fork inside a host block."""
        self._queue: list[BlockStored | _Removed] = []
        self._specs = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in groups.specs
        ]
        tier.on_removed(self._on_removed)

    def on_committed(self, run: Run, useless: Collection[int]) -> None:
        """The blocks of ``run`` can be found from now on, except at the places ``useless``. Tokens
        and parent are left out where they are not known."""
        for place, (key, num_tokens) in enumerate(zip(run.keys, run.num_tokens, strict=True)):
            if place not in useless:
                inner_keys = run.inner_keys[place] if run.inner_keys else ()
                payloads = run.payloads[place] if run.payloads else {}
                if run.request is not None and num_tokens:
                    payloads = payloads_of_host_block(
                        self._groups, key, inner_keys, num_tokens, run.request
                    )
                self._on_cached(key, inner_keys, num_tokens, payloads)

    def on_fetched(self, run: Run, request: Request, useless: Collection[int]) -> None:
        """The blocks of ``run``, which a second tier had, were fetched for ``request``, and can be
        found from now on, except at the places ``useless``."""
        run.request = request
        self.on_committed(run, useless)

    def _on_cached(
        self,
        key: BlockHashWithGroupId,
        inner_keys: Iterable[BlockHashWithGroupId],
        num_tokens: int,
        payloads: PayloadsByKey,
    ) -> None:
        """Queue the events of one block, at the end of a prefix of ``num_tokens`` tokens."""
        group = int(get_group_id(key))
        size, num_sub_blocks = self._groups.block_sizes[group], self._groups.num_sub_blocks
        if num_sub_blocks > 1 and len(payloads) == num_sub_blocks and key in payloads:
            keys = list(payloads)
            self._sub_block_keys[key] = keys[:-1]
            self._num_with.update(keys[:-1])
            for sub_block_key in keys:
                self._add(sub_block_key, group, size // num_sub_blocks, payloads[sub_block_key])
            return
        hash_size = self._groups.hash_block_size
        self._add(key, group, hash_size if num_tokens % size else size, payloads.get(key))
        for inner_key in inner_keys:
            self._add(inner_key, group, hash_size, payloads.get(inner_key))

    def drain(self) -> list[BlockStored | BlockRemoved]:
        """The events since the last call, in order."""
        queue, self._queue = self._queue, []
        events: list[BlockStored | BlockRemoved] = []
        removed: set[tuple[ExternalBlockHash, int | None]] = set()
        # Reported, and not stored again since: two blocks may have had the same inner key.
        for item in queue:
            if isinstance(item, BlockStored):
                events.append(item)
                removed.difference_update((each, item.group_idx) for each in item.block_hashes)
                continue
            if self._tier.has(item.key):  # another block holds it
                continue
            for key in (*item.sub_block_keys, item.key):
                name = maybe_convert_block_hash(get_block_hash(key)), int(get_group_id(key))
                # Another host block may have got such a sub-block since.
                if key not in self._num_with and name not in removed:
                    removed.add(name)
                    _append_removed(events, *name)
        return events

    def _on_removed(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        for key in keys:
            sub_block_keys = self._sub_block_keys.pop(key, ())
            self._num_with.subtract(sub_block_keys)
            gone = [each for each in sub_block_keys if self._num_with[each] == 0]
            for sub_block_key in gone:
                del self._num_with[sub_block_key]
            self._queue.append(_Removed(key, gone))

    def _add(
        self, key: BlockHashWithGroupId, group: int, size: int, payload: EventPayload | None
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
        if payload is not None:
            if payload.parent is not None:
                event.parent_block_hash = maybe_convert_block_hash(payload.parent)
            event.token_ids = payload.token_ids.tolist()
            event.extra_keys = payload.extra_keys
            event.session_id = payload.session_id
            event.lora_id, event.lora_name = payload.lora_id, payload.lora_name
            if self._queue and _extend(self._queue[-1], event):
                return
        self._queue.append(event)


def _extend(last: object, event: BlockStored) -> bool:
    """Add ``event``, of one block, to ``last`` if it is the next block of the same chain; False
    if not."""
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
