"""Host blocks of several device blocks."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.policies.request_walk import Sources
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import Lookup
from tests.simulation.mutations.growth import grow_to
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import in_parts


@mutation(in_parts)
def pair_from_the_start_of_the_host_block(stack: ExitStack) -> None:
    """A load that begins in the middle of a host block."""
    submit = Loads.submit

    def shifted(self: Loads, *arguments: Any) -> Any:
        transfers = submit(self, *arguments)
        for transfer in transfers:
            transfer.host_blocks[:] -= transfer.host_blocks[0] % self.tier.groups.num_parts
        return transfers

    substitute(stack, Loads, "submit", shifted)


@mutation(in_parts)
def number_slots_by_the_host_block(stack: ExitStack) -> None:
    """As if the parts of the next host block began at the next slot."""

    def slots(self: CpuTier, blocks: Any) -> list[int]:
        count = self.groups.num_parts
        return [block.block_id + count - 1 + part for block in blocks for part in range(count)]

    substitute(stack, CpuTier, "slots", slots)


@mutation(in_parts)
def grow_by_slots(stack: ExitStack) -> None:
    grow_to(stack, lambda said, num_ranks: min(said.values()) if len(said) == num_ranks else 0)


@mutation(in_parts)
def store_a_host_block_that_lacks_a_part(stack: ExitStack) -> None:
    sources_of = Sources.of

    def lenient(self: Sources, parts: Any, *arguments: Any) -> Any:
        sources = sources_of(self, parts, *arguments)
        if sources is not None or self._groups.num_parts == 1:
            return sources
        there = [part for part in parts if not part.is_null]
        return tuple(there[0] if part.is_null else part for part in parts) if there else None

    substitute(stack, Sources, "of", lenient)


@mutation(in_parts)
def know_a_host_block_by_its_first_part(stack: ExitStack) -> None:
    keys, hit = Groups.keys, Lookup.hit

    def first(groups: Groups, hashes: Any) -> Any:
        return [hashes[index - index % groups.num_parts] for index in range(len(hashes))]

    substitute(
        stack,
        Groups,
        "keys",
        lambda self, hashes, *a, **k: keys(self, first(self, hashes), *a, **k),
    )
    substitute(
        stack,
        Lookup,
        "hit",
        lambda self, hashes, *a, **k: hit(self, first(self._groups, hashes), *a, **k),
    )


@mutation(in_parts)
def believe_that_all_groups_have_the_last_host_block(stack: ExitStack) -> None:
    """Of a hit that ends inside it."""
    extend = Lookup._extend

    def careless(self: Lookup, *arguments: Any) -> Any:
        with patch.object(self._groups, "ids", self._groups.ids[:1]):
            return extend(self, *arguments)

    substitute(stack, Lookup, "_extend", careless)
