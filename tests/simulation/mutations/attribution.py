"""Attribution: where the tokens of prompts came from, and why others were computed."""

from simple_offload.scheduler.prompt_records import PromptRecord, PromptRecords
from simple_offload.scheduler.tier.history import History
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import FAILING_LOADS, FULL_DEVICE, OVERLOAD

count_a_failed_load_as_found = always(PromptRecords.on_lost, None, FAILING_LOADS)
remember_nothing = always(History.note, None, OVERLOAD)
count_a_reason_twice = mutation(
    PromptRecords.on_step,
    "self._count(record)",
    "self._count(record)\n"
    "record.missed = {reason: 2 * count for reason, count in record.missed.items()}",
)
count_a_preempted_request_twice = mutation(
    PromptRecords.on_allocated,
    "",
    "if request.num_preemptions: self._by_request.pop(request.request_id, None)",
    FULL_DEVICE,
)
count_a_failed_load_for_another_reason = mutation(
    PromptRecord.miss, "", "num_tokens -= reason is MissReason.LOAD_FAILED", FAILING_LOADS
)
