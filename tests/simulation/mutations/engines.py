"""Engines with drafts, or with blocks and pages of several sizes."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.loads import Loads, _Load
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policies.eager import EagerPolicy
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.worker import worker
from simple_offload.worker.regions import find_regions
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.integrity import groups_of
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import Engine, chained_windows


@mutation(Engine({"num_drafted": 3, "windows": (0,)}))
def count_rejected_drafts_as_computed(stack: ExitStack) -> None:
    """The policy adds up scheduled tokens from the request's first blocks on. It ignores rejected
    drafts."""
    allocated, on_step = EagerPolicy.on_allocated, EagerPolicy.on_step
    num_complete = EagerPolicy._num_complete
    computed: dict[str, int] = {}

    def start(self: EagerPolicy, request: Any, **options: Any) -> None:
        computed.pop(request.request_id, None)
        allocated(self, request, **options)

    def count(self: EagerPolicy, scheduled: Any) -> None:
        on_step(self, scheduled)
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            if (request := self._requests.get(request_id)) is not None:
                first = request.num_computed_tokens - request.num_output_placeholders
                computed[request_id] = computed.get(request_id, first) + num_tokens

    def believed(self: EagerPolicy, request: Any, group: int, num_blocks: int) -> int:
        num_tokens = max(computed.get(request.request_id, 0), request.num_computed_tokens)
        with patch.multiple(request, num_computed_tokens=num_tokens, num_output_placeholders=0):
            return num_complete(self, request, group, num_blocks)

    substitute(stack, EagerPolicy, "on_allocated", start)
    substitute(stack, EagerPolicy, "on_step", count)
    substitute(stack, EagerPolicy, "_num_complete", believed)


count_rejected_drafts_with_async_scheduling = replace(
    count_rejected_drafts_as_computed,
    shown_by=Engine({"num_drafted": 3, "windows": (0,), "async_scheduling": True}),
)


@mutation(Engine({"num_drafted": 2, "windows": (0,), "num_states": 1}))
def pair_a_hit_with_the_end_of_a_table(stack: ExitStack) -> None:
    """As if a table ended with the hit. The table of a state group has room for the drafts' states
    behind it."""
    plan = Loads.plan

    def from_the_end(self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        known = self._hits[request.request_id]
        shifted = []
        for group, table in enumerate(tables):
            first = known.num_computed_tokens // self._groups.block_sizes[group]
            num_blocks = len(known.hit.blocks[group])
            shifted.append([*table[:first], *table[len(table) - num_blocks :]])
        plan(self, request, shifted, *rest)

    substitute(stack, Loads, "plan", from_the_end)


def _skip_blocks_of(stack: ExitStack, size: Callable[[CpuTier, int], int]) -> None:
    """Count the device's share of a table in blocks of ``size`` tokens, given the tier and the
    group."""
    plan = Loads.plan

    def mistaken(self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        num_computed = self._hits[request.request_id].num_computed_tokens
        shifted = []
        for group, table in enumerate(tables):
            right = num_computed // self._groups.block_sizes[group]
            wrong = min(num_computed // size(self._tier, group), len(table) - 1)
            shifted.append([*table[:right], *(table[wrong:] + table[:wrong])])
        plan(self, request, shifted, *rest)

    substitute(stack, Loads, "plan", mistaken)


@mutation(Engine({"windows": (0, 0), "scales": (1, 2)}))
def think_all_blocks_as_large_as_the_first(stack: ExitStack) -> None:
    _skip_blocks_of(stack, lambda tier, group: groups_of(tier).block_sizes[0])


@mutation(Engine({"windows": (0,), "num_ranks": 2, "context_parallel": True}))
def think_a_block_is_what_one_rank_has_of_it(stack: ExitStack) -> None:
    def of_one_rank(tier: CpuTier, group: int) -> int:
        spec = groups_of(tier).specs[group]
        return int(spec.block_size)

    _skip_blocks_of(stack, of_one_rank)


@mutation(chained_windows)
def leave_blocks_that_attention_does_not_read(stack: ExitStack) -> None:
    """The blocks stay in the table without contents, and vLLM gives them a hash."""
    add = _Load.add

    def only_what_is_there(
        self: _Load,
        group: int,
        table: Any,
        slots: Any,
        null: Any,
        num_sub_blocks: int,
        **options: Any,
    ) -> None:
        pairs = [pair for pair in zip(table, slots, strict=True) if pair[1] >= num_sub_blocks]
        table, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
        add(self, group, table, slots, null, num_sub_blocks, **options)

    substitute(stack, OffloadScheduler, "_free_unread", lambda self, *arguments: None)
    substitute(stack, _Load, "add", only_what_is_there)


@mutation(Engine({"windows": (0,), "num_drafted": 2, "num_ranks": 2, "num_stages": 2}))
def wait_for_hooks_that_are_not_called(stack: ExitStack) -> None:
    """On a pipeline's first stages, the stores that a step has left are lost with the step."""
    bind = OffloadWorker.bind

    def lose(self: OffloadWorker, metadata: StepMetadata) -> None:
        self._metadata = metadata
        bind(self, metadata)

    substitute(stack, OffloadWorker, "bind", lose)


@mutation(Engine({"windows": (0,), "mixed_pages": True}, otherwise={"windows": (0, 8)}))
def believe_all_pages_alike(stack: ExitStack) -> None:
    """A copy covers as many bytes of each page as the smallest page has."""

    def narrow(*args: Any) -> list[Any]:
        regions = find_regions(*args)
        page_bytes = min(region.shape[1] for region in regions)
        return [region[:, :page_bytes] for region in regions]

    stack.enter_context(patch.object(worker, "find_regions", narrow))
