"""The order of compute, stores and loads, on the device and in the scheduler."""

from contextlib import ExitStack
from typing import Any

from simple_offload.backends.base import Direction
from simple_offload.scheduler.write_hazards import WriteHazards
from tests.simulation.device import ScriptedDevice
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import late_drafts, write_hazards


@mutation()
def drop_store_barrier(stack: ExitStack) -> None:
    _drop_barrier(stack, Direction.STORE)


@mutation(write_hazards)
def drop_load_barrier(stack: ExitStack) -> None:
    _drop_barrier(stack, Direction.LOAD)


def _drop_barrier(stack: ExitStack, direction: Direction) -> None:
    init = ScriptedDevice.__init__

    def careless(self: ScriptedDevice, *arguments: Any) -> None:
        init(self, *arguments)
        self.ignore_barriers.add(direction)

    substitute(stack, ScriptedDevice, "__init__", careless)


@mutation(write_hazards)
def think_free_blocks_untouched(stack: ExitStack) -> None:
    substitute(stack, WriteHazards, "may_touch", lambda self, blocks: False)


@mutation(late_drafts)
def let_steps_without_tokens_count(stack: ExitStack) -> None:
    """As if each of these steps showed that an earlier step was over."""
    on_step = WriteHazards.on_step

    def count(self: WriteHazards, zeroed: Any = (), *, computes: bool = True) -> None:
        on_step(self, zeroed)

    substitute(stack, WriteHazards, "on_step", count)
