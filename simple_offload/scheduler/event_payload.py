"""What KV events say of a block: its tokens, and the request they came from."""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_group_id,
    to_event_extra_keys,
)

from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
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


_MOST_BLOCKS = 512
"""So many blocks are let go of in a step, at microseconds each; more if many are waiting."""


class _Followed(NamedTuple):
    request: "Request"
    num_seen: list[int]
    """By group, how many blocks of its table have been noted."""
    block_ids: set[int]
    """Of all blocks that have been noted."""


class Origins:
    """Which request computed a device block. A block says so as long as it holds what that
    request put there, and a block that is stored late outlives its request. One entry a device
    block at most.

    A request that has ended is let go of when the step has been scheduled that stores what it
    left behind, a long one over several steps: of a block that stays on the device its contents
    are remembered, and not the request, which may be thousands of times as large.
    """

    def __init__(self, groups: Groups, kv_cache_manager: "KVCacheManager") -> None:
        self._groups = groups
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool = kv_cache_manager.block_pool
        self._followed: dict[str, _Followed] = {}
        self._by_block: dict[int, Request | ByKey] = {}
        self._ended: list[_Followed] = []
        """Since the last step was scheduled."""
        self._left: deque[_Followed] = deque()
        """Before that, and not let go of yet."""

    def follow(self, request: "Request") -> None:
        """``request`` has (new) device blocks."""
        before = self._followed.get(request.request_id)
        block_ids = before.block_ids if before is not None else set()
        self._followed[request.request_id] = _Followed(
            request, [0] * len(self._managers), block_ids
        )

    def forget(self, request_id: str) -> None:
        """The request, whose blocks have not been freed yet, gets no more. Those that it has
        are still known as its own."""
        if (followed := self._followed.pop(request_id, None)) is not None:
            self._note(followed)  # it may never have run: what was loaded for it is complete
            self._ended.append(followed)

    def on_step(
        self, request_ids: Iterable[str], state_blocks: Mapping[str, Sequence[int]]
    ) -> None:
        """A step has been scheduled that runs these requests. ``state_blocks``: by request, the
        ids of blocks with its states, which may be in no table; a request may hand over the
        states of an earlier step in one that does not run it."""
        self._let_go()
        self._left.extend(self._ended)
        self._ended.clear()
        for request_id, block_ids in state_blocks.items():
            if (followed := self._followed.get(request_id)) is not None:
                self._by_block.update(dict.fromkeys(block_ids, followed.request))
                followed.block_ids.update(block_ids)
        # After them: such a block may have been given up since, and be in another's table.
        for request_id in request_ids:
            if (followed := self._followed.get(request_id)) is not None:
                self._note(followed)

    def of(self, parts: Sequence[KVCacheBlock]) -> "Request | ByKey | None":
        """The request that was the last to have the device blocks of a host block, the last of
        them at least, in its table; or, if it has been let go of, what they hold."""
        last = self._by_block.get(parts[-1].block_id)
        if not isinstance(last, dict) or len(parts) == 1:
            return last
        contents: ByKey = {}
        for part in parts:
            origin = self._by_block.get(part.block_id)
            contents |= origin if isinstance(origin, dict) else self._contents(part, origin)
        return contents

    def _note(self, followed: _Followed) -> None:
        request, num_seen, block_ids = followed
        for group, manager in enumerate(self._managers):
            table = manager.req_to_blocks.get(request.request_id, [])
            # A table of states does not only grow.
            start = num_seen[group] if manager.has_positionally_stable_blocks else 0
            new = [block.block_id for block in table[start:]]
            self._by_block.update(dict.fromkeys(new, request))
            block_ids.update(new)
            num_seen[group] = len(table)

    def _let_go(self) -> None:
        """Of those that have left, as far as there is time in a step."""
        num_waiting = sum(len(followed.block_ids) for followed in self._left)
        num_blocks = max(_MOST_BLOCKS, num_waiting // 8)  # never to fall behind for good
        while self._left and num_blocks > 0:
            request, _, block_ids = self._left[0]
            while block_ids and num_blocks > 0:
                self._let_go_of(block_ids.pop(), request)
                num_blocks -= 1
            if not block_ids:
                self._left.popleft()

    def _let_go_of(self, block_id: int, request: "Request") -> None:
        if self._by_block.get(block_id) is request:
            contents = self._contents(self._device_pool.blocks[block_id], request)
            if contents:
                self._by_block[block_id] = contents
            else:
                del self._by_block[block_id]

    def _contents(self, block: KVCacheBlock, request: "Request | None") -> ByKey:
        """What the block holds of the request, if it can be found."""
        key, num_tokens = block.block_hash, block.block_hash_num_tokens
        if request is None or key is None or num_tokens is None:
            return {}
        inner_keys = self._device_pool.cached_block_hashes_by_block.get(block.block_id, ())
        return contents_of_device_block(self._groups, key, inner_keys, num_tokens, request)
