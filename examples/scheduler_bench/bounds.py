"""Hits that a cache of a given size could have, by the order of requests alone."""

import heapq
from collections import OrderedDict
from collections.abc import Container, Sequence
from math import inf
from typing import NamedTuple


class Access(NamedTuple):
    """The blocks of a request."""

    blocks: Sequence[bytes]
    """Contents of its prompt's blocks, in order."""
    num_new: int
    """Further blocks that no request asks for again."""


def lru_hits(accesses: Sequence[Access], size: int, first: int) -> int:
    """Blocks that the accesses from ``first`` on find in a cache of ``size`` blocks which loses the
    least recently used block first, a prompt's tail before its head."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for number, access in enumerate(accesses):
        if number >= first:
            hits += _num_found(access, cache)
        for place in range(access.num_new):
            cache[number, place] = None
        for block in reversed(access.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


def optimal_hits(accesses: Sequence[Access], size: int, first: int) -> int:
    """The same for a cache which knows the future: it loses the block first that is used last, or
    never (Belady, "A study of replacement algorithms", 1966), and need not take a block."""
    next_uses = _next_uses(accesses)
    cache: dict[bytes, tuple[float, int]] = {}
    heap: list[tuple[float, int, bytes]] = []
    hits = 0
    for number, access in enumerate(accesses):
        if number >= first:
            hits += _num_found(access, cache)
        for place, (block, use) in enumerate(zip(access.blocks, next_uses[number], strict=True)):
            if use == inf:
                cache.pop(block, None)
                continue
            # Of blocks used at the same time, a tail leaves before its head.
            cache[block] = (use, place)
            heapq.heappush(heap, (-use, -place, block))
        while len(cache) > size:
            use, place, block = heapq.heappop(heap)
            if cache.get(block) == (-use, -place):
                del cache[block]
    return hits


def _num_found(access: Access, cache: Container[object]) -> int:
    """Length of the prefix in the cache."""
    for place, block in enumerate(access.blocks):
        if block not in cache:
            return place
    return len(access.blocks)


def _next_uses(accesses: Sequence[Access]) -> list[list[float]]:
    """By access and block, the number of the next access that uses the block."""
    known: dict[bytes, int] = {}
    uses: list[list[float]] = []
    for number in reversed(range(len(accesses))):
        uses.append([known.get(block, inf) for block in accesses[number].blocks])
        known.update(dict.fromkeys(accesses[number].blocks, number))
    return uses[::-1]
