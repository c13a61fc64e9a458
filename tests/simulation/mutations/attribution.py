"""Attribution: where the tokens of prompts came from, and why others were computed."""

from typing import Any

from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.prompt_records import PromptRecord, PromptRecords
from simple_offload.scheduler.tier.history import History
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import FAILING_LOADS, FULL_DEVICE, OVERLOAD

count_a_failed_load_as_found = always(PromptRecords, "on_lost", None, FAILING_LOADS)
remember_nothing = always(History, "note", None, OVERLOAD)


@mutation(PromptRecords, "on_step")
def count_a_reason_twice(on_step: Any, self: PromptRecords) -> None:
    records = [record for _, record, _ in self._begun]
    on_step(self)
    for record in records:
        record.missed[record.reason] *= 2


@mutation(PromptRecords, "on_allocated", FULL_DEVICE)
def count_a_preempted_request_twice(
    on_allocated: Any, self: PromptRecords, request: Any, *numbers: int, is_asked: bool
) -> None:
    if request.num_preemptions:
        self._by_request.pop(request.request_id, None)
    on_allocated(self, request, *numbers, is_asked=is_asked)


@mutation(PromptRecord, "miss", FAILING_LOADS)
def count_a_failed_load_for_another_reason(
    miss: Any, self: PromptRecord, reason: MissReason, num_tokens: int
) -> None:
    miss(self, reason, num_tokens - (reason is MissReason.LOAD_FAILED))
