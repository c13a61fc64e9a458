"""StorePolicy: decides which device blocks are stored, and when."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class BoundaryState(NamedTuple):
    """A device block that holds the state (Mamba and the like) after ``num_tokens`` tokens by the
    end of this step. vLLM hands it over; soon it may be in no block table."""

    group: int
    block_id: int
    num_tokens: int


class StorePolicy(Protocol):
    """Decides which blocks are stored, by calling ``Stores.plan``."""

    @property
    def idle(self) -> bool:
        """Whether nothing is postponed to the next step."""

    @property
    def num_held_blocks(self) -> int:
        """Device blocks of ended requests that are held until the next step."""

    def on_allocated(self, request: "Request", *, loads: bool) -> None:
        """``request`` has (new) device blocks. ``loads``: the tier fills some of them. Otherwise
        another connector (MultiConnector) may do so until the request runs."""

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        """A step has been scheduled that completes these state blocks, by request id."""

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        """A step has been scheduled. Tokens of earlier steps are computed by the time that this
        step's stores start."""

    def on_request_finished(self, request: "Request", loading: bool) -> None:
        """``request`` gives up its device blocks right after this call; ``loading``: they were
        still waiting for a load. Work is postponed to the next step: a client waits for the
        request's last token."""

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A store of these device blocks, in order, has ended: drop its references, and with the
        last one put each block where it belongs in the free queue."""

    def on_reset(self) -> None:
        """Contents of the device's blocks must not be stored any more."""


def confirmed_tokens(request: "Request") -> int:
    """Number of the request's tokens that have been computed for certain."""
    # Async scheduling counts tokens that it only has reserved room for.
    return request.num_computed_tokens - request.num_output_placeholders


def first_unhashed_block(
    groups: Groups, request: "Request", group: int, table: Sequence[KVCacheBlock], stop: int
) -> int:
    """The first block that is stored although vLLM has not hashed it: of the ``stop`` complete host
    blocks of an ending request, in a group that is not chained. ``table``: its block table.

    By default vLLM hashes the blocks of a sliding window that the prompt's end needs
    (``prefix_cache_retention_interval`` 0). This adds the blocks that the request's end needs, if
    the table has all of them.
    """
    if group not in groups.stable_ids:
        return stop
    num_tokens = min(confirmed_tokens(request), len(request.block_hashes) * groups.hash_block_size)
    num_unread = groups.num_unread_tokens(groups.next_hit(num_tokens), group)
    first = num_unread // groups.block_sizes[group]
    has_all = first < stop and not table[first * groups.num_sub_blocks].is_null
    return first if has_all else stop


def num_complete_blocks(groups: Groups, request: "Request", group: int, num_blocks: int) -> int:
    """Number of the request's ``num_blocks`` blocks of ``group`` that are complete and have a
    hash."""
    confirmed = confirmed_tokens(request)
    tokens = min(
        confirmed,
        groups.num_cacheable_tokens(confirmed, group),
        len(request.block_hashes) * groups.hash_block_size,
    )
    return int(min(tokens // groups.block_sizes[group], num_blocks))
