"""Payloads of KV events: the tokens of a block and their origin."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    generate_block_hash_extra_keys,
    get_group_id,
)

from simple_offload import vllm_compat
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import EventPayload, PayloadsByKey

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_SESSION_ID = 1024
"""Characters. A longer id is left out: payloads outlive their request, and vLLM, which limits a
salt so, does not limit this."""


def payloads_of_host_block(
    groups: Groups,
    key: BlockHashWithGroupId,
    inner_keys: Iterable[BlockHashWithGroupId],
    num_tokens: int,
    request: "Request",
) -> PayloadsByKey:
    """Payloads of the host block with ``key``, at the end of the request's first ``num_tokens``
    tokens, for the keys that are the request's own. ``inner_keys``: of prefixes that end inside
    it."""
    group, num_sub_blocks = int(get_group_id(key)), groups.num_sub_blocks
    size = groups.block_sizes[group]
    if num_sub_blocks == 1:
        return payloads_of_device_block(groups, key, inner_keys, num_tokens, request)
    payloads: PayloadsByKey = {}
    if _is_of(groups, key, request, num_tokens):
        sub_size = size // num_sub_blocks
        for end in range(num_tokens - size + sub_size, num_tokens + 1, sub_size):
            sub_key = groups.key_at(request.block_hashes, group, end)
            payloads |= payloads_of_device_block(groups, sub_key, (), end, request)
    return payloads


def payloads_of_device_block(
    groups: Groups,
    key: BlockHashWithGroupId,
    inner_keys: Iterable[BlockHashWithGroupId],
    num_tokens: int,
    request: "Request",
) -> PayloadsByKey:
    """Payloads of a device block, which is as large as a sub-block."""
    size = groups.block_sizes[int(get_group_id(key))] // groups.num_sub_blocks
    hash_size = groups.hash_block_size
    payloads: PayloadsByKey = {}
    if _is_of(groups, key, request, num_tokens):
        # For a prefix that ends inside a block, vLLM reports the last tokens that a hash covers.
        start = num_tokens - (hash_size if num_tokens % size else size)
        payloads[key] = _payload(groups, request, start, num_tokens)
    ends = range((num_tokens - 1) // size * size + hash_size, num_tokens, hash_size)
    for inner_key in inner_keys:
        end = next((end for end in ends if _is_of(groups, inner_key, request, end)), None)
        if end is not None:
            payloads[inner_key] = _payload(groups, request, end - hash_size, end)
    return payloads


def _is_of(groups: Groups, key: BlockHashWithGroupId, request: "Request", end: int) -> bool:
    """Whether ``key`` is the key of the request's first ``end`` tokens."""
    if not 0 < end <= len(request.block_hashes) * groups.hash_block_size:
        return False
    return groups.key_at(request.block_hashes, int(get_group_id(key)), end) == key


def _payload(groups: Groups, request: "Request", start: int, end: int) -> EventPayload:
    extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    lora, session_id = request.lora_request, request.session_id
    return EventPayload(
        array("q", request.all_token_ids[start:end]),
        request.block_hashes[start // groups.hash_block_size - 1] if start else None,
        vllm_compat.event_extra_keys([extra_keys]),
        session_id if len(session_id or "") <= _MAX_SESSION_ID else None,
        lora.adapter_id if lora is not None else None,
        lora.name if lora is not None else None,
    )
