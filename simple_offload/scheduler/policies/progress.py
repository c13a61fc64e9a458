"""Progress: how far the stores of a request have come."""

from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash

from simple_offload.scheduler.policies.kept import Kept


@dataclass(slots=True, eq=False)
class Progress:
    """Of a request, but not the request: what is left of one that has ended outlives it."""

    hashes: list[BlockHash]
    """The request's, which grow with it."""
    next_index: list[int]
    """By group, the first block that has not been dealt with; of a chained group a guess at it,
    until ``started`` or the request's end."""
    num_found: list[int]
    """By chained group, how many of its first blocks the tier had (or was getting) already when
    the first of the others was to be stored."""
    loads: bool
    """Whether the tier fills blocks of it before it runs."""
    kept: Kept
    """What the tier has of it: that must not leave to make room for the rest."""
    ran: bool = False
    """Whether a step with it has been scheduled since it got its blocks."""
    ready_at: int = 0
    """With fewer tokens computed, there is nothing to store."""
    started: bool = False
    """Whether what the tier has of it already has been skipped."""
    refused_at: int = -1
    """The version of the admission that has refused the block at a cursor, if it has."""
