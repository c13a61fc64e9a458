"""Host blocks with several sub-blocks."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.policies.request_walk import DeviceBlocks
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import Lookup
from tests.simulation.mutations.growth import grow_to
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import with_sub_blocks


@mutation(with_sub_blocks)
def pair_from_the_start_of_the_host_block(stack: ExitStack) -> None:
    """The bug shows in a load that begins in the middle of a host block."""
    submit = Loads.submit

    def shifted(self: Loads, *arguments: Any) -> Any:
        transfers = submit(self, *arguments)
        for transfer in transfers:
            transfer.host_blocks[:] -= transfer.host_blocks[0] % self._groups.num_sub_blocks
        return transfers

    substitute(stack, Loads, "submit", shifted)


@mutation(with_sub_blocks)
def number_slots_by_the_host_block(stack: ExitStack) -> None:
    """As if the sub-blocks of the next host block began at the next slot."""

    def slots(self: CpuTier, blocks: Any) -> list[int]:
        count = self._groups.num_sub_blocks
        return [block.block_id + count - 1 + place for block in blocks for place in range(count)]

    substitute(stack, CpuTier, "slots", slots)


@mutation(with_sub_blocks)
def grow_by_slots(stack: ExitStack) -> None:
    grow_to(stack, lambda sizes, num_ranks: min(sizes.values()) if len(sizes) == num_ranks else 0)


@mutation(with_sub_blocks)
def store_a_host_block_that_lacks_a_sub_block(stack: ExitStack) -> None:
    match = DeviceBlocks.match

    def lenient(self: DeviceBlocks, *arguments: Any) -> Any:
        keys, blocks = match(self, *arguments)
        count = self._groups.num_sub_blocks
        whole: list[Any] = []
        for first in range(0, len(blocks), count):
            own = blocks[first : first + count]
            there = next((block for block in own if block is not None), None)
            whole += own if count == 1 else [block or there for block in own]
        return keys, whole

    substitute(stack, DeviceBlocks, "match", lenient)


@mutation(with_sub_blocks)
def know_a_host_block_by_its_first_sub_block(stack: ExitStack) -> None:
    keys, find, match = Groups.keys, Lookup.find, DeviceBlocks.match

    def first(groups: Groups, hashes: Any) -> Any:
        return [hashes[index - index % groups.num_sub_blocks] for index in range(len(hashes))]

    substitute(
        stack,
        Groups,
        "keys",
        lambda self, hashes, *a, **k: keys(self, first(self, hashes), *a, **k),
    )
    substitute(
        stack,
        Lookup,
        "find",
        lambda self, hashes, *a, **k: find(self, first(self._groups, hashes), *a, **k),
    )

    def match_first(
        self: DeviceBlocks, hashes: Any, group: int, start: int, table: Any, *rest: Any
    ) -> Any:
        _, blocks = match(self, hashes, group, start, table, *rest)
        stop = start + len(table) // self._groups.num_sub_blocks
        return self._groups.keys(hashes, group, start, stop), blocks

    substitute(stack, DeviceBlocks, "match", match_first)


@mutation(with_sub_blocks)
def believe_that_all_groups_have_the_last_host_block(stack: ExitStack) -> None:
    """The bug shows in a hit that ends inside the last host block."""
    extend = Lookup._extend

    def careless(self: Lookup, *arguments: Any) -> Any:
        with patch.object(self._groups, "ids", self._groups.ids[:1]):
            return extend(self, *arguments)

    substitute(stack, Lookup, "_extend", careless)
