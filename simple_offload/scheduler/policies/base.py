"""StorePolicy: what decides which device blocks are stored, and when."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class BoundaryState(NamedTuple):
    """A device block that holds the state (Mamba and the like) after ``num_tokens`` tokens by
    the end of this step, as vLLM hands it over; soon it may be in no block table any more."""

    group: int
    block_id: int
    num_tokens: int


class StorePolicy(Protocol):
    """Decides what is stored by calling ``Stores.plan``."""

    @property
    def num_requests(self) -> int:
        """Requests that are being followed, those that have ended with blocks yet to be stored
        included."""

    @property
    def idle(self) -> bool:
        """Whether nothing has been put off to the next step."""

    @property
    def num_held_blocks(self) -> int:
        """Device blocks of ended requests that are held until the next step."""

    def on_allocated(self, request: "Request", *, loads: bool) -> None:
        """``request`` has (new) device blocks. ``loads``: the tier fills some of them. If it does
        not, then another connector (MultiConnector) may be about to, until the request runs."""

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        """A step has been scheduled that completes these state blocks, by request id."""

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        """A step has been scheduled. What was computed in earlier steps is complete by the time
        that this step's stores start."""

    def on_finished(self, request: "Request", loading: bool) -> None:
        """``request`` is giving up its device blocks right after this call; ``loading``: they
        were still waiting for a load. A client waits for the request's last words, so what
        takes time is put off to the next step."""

    def on_reset(self) -> None:
        """What the device holds must not be stored any more."""


def confirmed_tokens(request: "Request") -> int:
    """How many of the request's tokens have been computed for certain."""
    # Tokens that async scheduling has only reserved room for are not known yet.
    return request.num_computed_tokens - request.num_output_placeholders


def first_own_block(
    groups: Groups, request: "Request", group: int, table: Sequence[KVCacheBlock], stop: int
) -> int:
    """From which of the ``stop`` complete host blocks of a request that ends those are stored too
    that vLLM has not hashed, in a group that is not chained. ``table``: its block table.

    Of a sliding window vLLM hashes, by default, what the prompt's end needs
    (``prefix_cache_retention_interval`` 0). Here it is what the request's end needs, if the table
    has all of that.
    """
    if group not in groups.stable_ids:
        return stop
    num_tokens = min(confirmed_tokens(request), len(request.block_hashes) * groups.hash_block_size)
    num_unread = groups.num_unread_tokens(groups.next_hit(num_tokens), group)
    first = num_unread // groups.block_sizes[group]
    has_all = first < stop and not table[first * groups.num_parts].is_null
    return first if has_all else stop


def num_complete_blocks(groups: Groups, request: "Request", group: int, num_blocks: int) -> int:
    """How many of the request's ``num_blocks`` blocks of ``group`` are complete and have a
    hash."""
    confirmed = confirmed_tokens(request)
    tokens = min(
        confirmed,
        groups.num_cacheable_tokens(confirmed, group),
        len(request.block_hashes) * groups.hash_block_size,
    )
    return int(min(tokens // groups.block_sizes[group], num_blocks))
