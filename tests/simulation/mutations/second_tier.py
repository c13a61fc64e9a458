"""The second tier: whose bytes are trusted, and who holds blocks."""

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

trust_all_bytes = mutation(Seals.count_whole, "", "return len(rows)", BAD_OBJECTS)
# Whole objects of other keys are taken.
seal_without_the_name = mutation(Seals._checksum, "checksum.update(name)", "pass", FOREIGN_OBJECTS)
seal_the_beginning = mutation(
    Seals._checksum, ": -self._seal_bytes", ":32", BAD_OBJECTS.beginning_with(19)
)
go_on_after_a_reset = always(SecondTier.reset, None, NEW_WEIGHTS)

# Time

# A tier that has answered at once seems to hang.
count_time_without_steps = mutation(
    EngineTime.__call__, "", "return self.clock()", FROZEN.beginning_with(9)
)

# Blocks

offer_blocks_before_they_are_read = mutation(
    SecondTier._start_reads,
    "rows = [",
    "from concurrent.futures import Future\n"
    "read.check = Future(); read.check.set_result(len(keys))\n"
    "rows = [",
    LATE_OBJECTS,
)
# vLLM's tier may still write to them.
free_blocks_when_the_request_goes_on = mutation(
    SecondTier._end_wait,
    "if fetch.is_asking:",
    "for read in fetch.reads if result == 'late' else ():\n"
    "    if read.check is None: self._tier.unpin(read.blocks)\n"
    "if fetch.is_asking:",
    LATE_OBJECTS.beginning_with(11),
)
# The policy does not know yet what the device has let go of in this step.
allocate_while_vllm_schedules = mutation(
    SecondTier._plan,
    "self._fetches.append(fetch)",
    "self._fetches.append(fetch); self._start_reads()",
    OBJECTS_AND_DUPLICATES.beginning_with(8),
)

# Requests

wait_for_longer_than_compute_takes = mutation(
    Speeds.max_wait, "return num_tokens", "return 10 + 2 * num_tokens", LATE_OBJECTS
)
remember_requests_for_ever = mutation(
    SecondTier.on_request_finished,
    "self._over.pop(request_id, None)",
    "self._over[request_id] = None",
    OBJECTS,
)
