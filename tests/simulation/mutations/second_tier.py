"""The second tier: whose bytes are trusted, and who holds blocks."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from simple_offload.second_tier.seals import Seals
from simple_offload.second_tier.second_tier import SecondTier
from simple_offload.second_tier.speeds import EngineTime, Speeds
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import (
    BAD_OBJECTS,
    FOREIGN_OBJECTS,
    FROZEN,
    LATE_OBJECTS,
    NEW_WEIGHTS,
    OBJECTS,
    OBJECTS_AND_DUPLICATES,
)

# Bytes


@mutation(Seals, "count_whole", BAD_OBJECTS)
def trust_all_bytes(_: Any, self: Seals, rows: Sequence[int], names: Sequence[bytes]) -> int:
    return len(rows)


@mutation(Seals, "_checksum", FOREIGN_OBJECTS)
def seal_without_the_name(checksum: Any, self: Seals, row: int, name: bytes) -> Any:
    """Whole objects of other keys are taken."""
    return checksum(self, row, b"")


@mutation(Seals, "_checksum", BAD_OBJECTS.beginning_with(19))
def seal_the_beginning(checksum: Any, self: Seals, row: int, name: bytes) -> Any:
    whole, self._rows = self._rows, self._rows[:, :64]
    try:
        return checksum(self, row, name)
    finally:
        self._rows = whole


go_on_after_a_reset = always(SecondTier, "reset", None, NEW_WEIGHTS)


# Time


@mutation(EngineTime, "__call__", FROZEN.beginning_with(9))
def count_time_without_steps(_: Any, self: EngineTime) -> float:
    """A tier that has answered at once seems to hang."""
    return self.clock()


# Blocks


@mutation(SecondTier, "_start_reads", LATE_OBJECTS)
def offer_blocks_before_they_are_read(start_reads: Any, self: SecondTier) -> None:
    start_reads(self)
    for fetch in self._fetches:
        for read in fetch.reads:
            if read.check is None:
                read.check = Future()
                read.check.set_result(len(read.keys))


@mutation(SecondTier, "_end_wait", LATE_OBJECTS.beginning_with(11))
def free_blocks_when_the_request_goes_on(
    end_wait: Any, self: SecondTier, request_id: str, result: str | None
) -> None:
    """vLLM's tier may still write to them."""
    fetch = self._waits.get(request_id)
    end_wait(self, request_id, result)
    if result == "late" and fetch is not None:
        for read in fetch.reads:
            if read.check is None:
                self._tier.unpin(read.blocks)


@mutation(SecondTier, "_plan", OBJECTS_AND_DUPLICATES.beginning_with(8))
def allocate_while_vllm_schedules(plan: Any, self: SecondTier, *arguments: Any) -> None:
    """The policy does not know yet what the device has let go of in this step."""
    plan(self, *arguments)
    self._start_reads()


# Requests


@mutation(Speeds, "max_wait", LATE_OBJECTS)
def wait_for_longer_than_compute_takes(max_wait: Any, self: Speeds, num_tokens: int) -> float:
    return 10.0 + 2.0 * float(max_wait(self, num_tokens))


@mutation(SecondTier, "on_request_finished", OBJECTS)
def remember_requests_for_ever(finished: Any, self: SecondTier, request_id: str) -> None:
    finished(self, request_id)
    self._over[request_id] = None
