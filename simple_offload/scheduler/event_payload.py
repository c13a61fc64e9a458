"""Payloads of KV events: the tokens of a block and their origin."""

from array import array
from collections.abc import Iterable

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    generate_block_hash_extra_keys,
    get_group_id,
)
from vllm.v1.request import Request

from simple_offload import vllm_compat
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import EventPayload, PayloadsByKey

_MAX_SESSION_ID = 1024
"""Characters. A longer id is left out: payloads outlive their request, and vLLM, which limits a
salt so, does not limit this."""


def payloads_of_host_block(
    groups: Groups,
    key: BlockHashWithGroupId,
    inner_keys: Iterable[BlockHashWithGroupId],
    num_tokens: int,
    request: Request,
) -> PayloadsByKey:
    """Payloads of the host block with ``key``, at the end of the request's first ``num_tokens``
    tokens, for the keys that are the request's own. ``inner_keys``: of prefixes that end inside
    it."""
    group, hash_size = int(get_group_id(key)), groups.hash_block_size
    size = groups.block_sizes[group]
    sub_size = size // groups.num_sub_blocks
    payloads: PayloadsByKey = {}
    if _is_of(groups, key, request, num_tokens):
        for end in range(num_tokens - size + sub_size, num_tokens + 1, sub_size):
            # Of a prefix that ends inside a block, vLLM reports the last tokens that a hash covers.
            start = end - (hash_size if end % sub_size else sub_size)
            sub_key = groups.key_at(request.block_hashes, group, end)
            payloads[sub_key] = _payload(groups, request, start, end)
    ends = range((num_tokens - 1) // size * size + hash_size, num_tokens, hash_size)
    for inner_key in inner_keys:
        inner_end = next((end for end in ends if _is_of(groups, inner_key, request, end)), None)
        if inner_end is not None:
            payloads[inner_key] = _payload(groups, request, inner_end - hash_size, inner_end)
    return payloads


def _is_of(groups: Groups, key: BlockHashWithGroupId, request: Request, end: int) -> bool:
    """Whether ``key`` is the key of the request's first ``end`` tokens."""
    if not 0 < end <= len(request.block_hashes) * groups.hash_block_size:
        return False
    return groups.key_at(request.block_hashes, int(get_group_id(key)), end) == key


def _payload(groups: Groups, request: Request, start: int, end: int) -> EventPayload:
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
