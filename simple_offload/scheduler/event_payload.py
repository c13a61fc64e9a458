"""Contents: what KV events say of some tokens of a request, beside the key that they have."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    generate_block_hash_extra_keys,
    get_group_id,
    to_event_extra_keys,
)

from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Contents(NamedTuple):
    """A block's, or those of a part of it that has a key of its own."""

    token_ids: "array[int]"
    parent: BlockHash | None
    """The hash of the tokens before them."""
    extra_keys: list[tuple[object, ...] | None] | None
    session_id: str | None
    lora_id: int | None
    lora_name: str | None


ByKey = dict[BlockHashWithGroupId, Contents]
"""Of a block: of its parts in order, or its own first and then those that end inside it."""


def contents_of_host_block(
    groups: Groups,
    key: BlockHashWithGroupId,
    inner_keys: Iterable[BlockHashWithGroupId],
    num_tokens: int,
    request: "Request",
) -> ByKey:
    """What ``request`` has in the host block of ``key``, of the prefix of ``num_tokens`` tokens,
    as far as those keys are its own; by its parts, where it has several. ``inner_keys``: of
    prefixes that end inside it."""
    group, num_parts = int(get_group_id(key)), groups.num_parts
    size = groups.block_sizes[group]
    if num_parts == 1:
        return _contents(groups, key, inner_keys, num_tokens, size, request)
    contents: ByKey = {}
    if _is_of(groups, key, request, num_tokens):
        part_size = size // num_parts
        for end in range(num_tokens - size + part_size, num_tokens + 1, part_size):
            part_key = groups.key_at(request.block_hashes, group, end)
            contents |= _contents(groups, part_key, (), end, part_size, request)
    return contents


def contents_of_device_block(
    groups: Groups,
    key: BlockHashWithGroupId,
    inner_keys: Iterable[BlockHashWithGroupId],
    num_tokens: int,
    request: "Request",
) -> ByKey:
    """The same for a device block, which is as large as a part."""
    size = groups.block_sizes[int(get_group_id(key))] // groups.num_parts
    return _contents(groups, key, inner_keys, num_tokens, size, request)


def _contents(
    groups: Groups,
    key: BlockHashWithGroupId,
    inner_keys: Iterable[BlockHashWithGroupId],
    num_tokens: int,
    size: int,
    request: "Request",
) -> ByKey:
    hash_size = groups.hash_block_size
    contents: ByKey = {}
    if _is_of(groups, key, request, num_tokens):
        # vLLM tells of a part of a block as of the last tokens that a hash covers.
        contents[key] = _between(
            groups, request, num_tokens - (hash_size if num_tokens % size else size), num_tokens
        )
    ends = range((num_tokens - 1) // size * size + hash_size, num_tokens, hash_size)
    for inner_key in inner_keys:
        end = next((end for end in ends if _is_of(groups, inner_key, request, end)), None)
        if end is not None:
            contents[inner_key] = _between(groups, request, end - hash_size, end)
    return contents


def _is_of(groups: Groups, key: BlockHashWithGroupId, request: "Request", end: int) -> bool:
    """Whether ``key`` is of the first ``end`` tokens of the request."""
    if not 0 < end <= len(request.block_hashes) * groups.hash_block_size:
        return False
    return groups.key_at(request.block_hashes, int(get_group_id(key)), end) == key


def _between(groups: Groups, request: "Request", start: int, end: int) -> Contents:
    extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    lora = request.lora_request
    return Contents(
        array("q", request.all_token_ids[start:end]),
        request.block_hashes[start // groups.hash_block_size - 1] if start else None,
        to_event_extra_keys([extra_keys]),
        request.session_id,
        lora.adapter_id if lora is not None else None,
        lora.name if lora is not None else None,
    )
