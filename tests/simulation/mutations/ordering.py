"""What the device and the scheduler keep in order: compute, stores and loads."""

from contextlib import ExitStack
from typing import Any

from simple_offload.backends.base import Direction
from simple_offload.scheduler.recent_tables import RecentTables
from tests.simulation.device import ScriptedDevice
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import recent_tables


@mutation()
def drop_store_barrier(stack: ExitStack) -> None:
    _drop_barrier(stack, Direction.STORE)


@mutation(recent_tables)
def drop_load_barrier(stack: ExitStack) -> None:
    _drop_barrier(stack, Direction.LOAD)


def _drop_barrier(stack: ExitStack, direction: Direction) -> None:
    init = ScriptedDevice.__init__

    def careless(self: ScriptedDevice, *arguments: Any) -> None:
        init(self, *arguments)
        self.ignore_barriers.add(direction)

    substitute(stack, ScriptedDevice, "__init__", careless)


@mutation(recent_tables)
def think_free_blocks_untouched(stack: ExitStack) -> None:
    substitute(stack, RecentTables, "may_touch", lambda self, blocks: False)
