"""Router: knows the host tier's contents from an engine's KV events alone."""

import os
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    hash_block_tokens,
    make_block_hash_with_group_id,
)

from simple_offload.vllm_compat import vllm_version

# Whole hashes, not their last 64 bits: the next block's hash is computed from them.
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"

EVENTS_CONFIG = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
"""vLLM makes events, and the test replaces their publisher."""


LORA_PATH = "/nowhere"
"""The path of every adapter. vLLM hashes it, and events omit it."""


class Router:
    """Replaces vLLM's publisher, and derives the host tier's keys from the events.

    Computes the hash of every stored block from the event's fields. Raises AssertionError for an
    event that contradicts itself or an earlier event.
    """

    def __init__(self, hash_size: int) -> None:
        self.keys: set[BlockHashWithGroupId] = set()
        """The keys that can be found in the host tier."""
        self._hash_size = hash_size

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", "") == MEDIUM_CPU:
                self._apply(event)

    def shutdown(self) -> None:
        pass

    def get_publisher_config(self) -> None:
        return None

    def _apply(self, event: object) -> None:
        assert isinstance(event, BlockStored | BlockRemoved), event
        assert event.locality == "LOCAL", event
        assert event.group_idx is not None, event
        hashes = [BlockHash(block_hash) for block_hash in event.block_hashes]  # type: ignore[arg-type]
        keys = {make_block_hash_with_group_id(h, event.group_idx) for h in hashes}
        if isinstance(event, BlockStored):
            self._check(event, hashes)
            self.keys |= keys
        else:
            assert keys <= self.keys, f"{event}: removed before it was stored"
            self.keys -= keys

    def _check(self, event: BlockStored, hashes: list[BlockHash]) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(hashes), event
        assert event.extra_keys is not None, event
        assert event.kv_cache_spec_kind, event
        parent: Any = event.parent_block_hash
        for index, block_hash in enumerate(hashes):
            extra = event.extra_keys[index] or ()
            for start in range(0, size, self._hash_size):
                first, end = index * size + start, start + self._hash_size
                keys = [_key(each, event.lora_name, start, end) for each in extra]
                found = tuple(key for key in keys if key) or None
                tokens = event.token_ids[first : first + self._hash_size]
                parent = hash_block_tokens(sha256, parent, tokens, found)
            # A hash of a block's embeddings does not tell those of its parts.
            is_known = size == self._hash_size or not any(isinstance(each, bytes) for each in extra)
            assert parent == block_hash or not is_known, f"{event}: block {index} has another hash"
            parent = block_hash


def _key(extra: Any, lora_name: str | None, start: int, end: int) -> Any:
    """An extra key of an event, as vLLM hashes it with tokens ``start`` to ``end`` of the block:
    from 0.31 on with a tag. None: not with these."""
    key: tuple[Any, ...]
    if isinstance(extra, tuple):
        content, offset = extra
        if not start - int(content.split()[1]) < offset < end:
            return None
        key = "mm", content, offset - start
    elif isinstance(extra, bytes):
        key = "prompt_embeds", extra
    elif extra == lora_name:
        key = "lora", extra, LORA_PATH
    elif start == 0:
        key = "cache_salt", extra
    else:
        return None
    if vllm_version() >= (0, 31):
        return key
    return key[1:] if isinstance(extra, tuple) else extra
