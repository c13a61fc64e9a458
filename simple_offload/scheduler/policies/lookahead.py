"""Lookahead: how many device blocks had better be safe to evict before they are asked for."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StepLimits(NamedTuple):
    """How many device blocks may be needed how soon, at most."""

    per_step: int
    """To schedule one step, those aside that a load fills."""

    num_steps: int
    """From the step that plans a store to the first that may have its blocks."""

    longest: int
    """To load the longest request."""

    reserve: int
    """For running requests to go on, a token each."""

    @classmethod
    def of(cls, vllm_config: "VllmConfig", block_sizes: Sequence[int]) -> "StepLimits":
        """``block_sizes``: in tokens, by KV cache group."""
        scheduler_config = vllm_config.scheduler_config
        num_tokens = scheduler_config.max_num_batched_tokens
        num_requests = min(scheduler_config.max_num_seqs, num_tokens)
        return cls(
            per_step=sum(cdiv(num_tokens, size) + num_requests for size in block_sizes),
            # A store starts with its step's end, and is heard of a step later at the earliest.
            num_steps=vllm_config.max_concurrent_batches + 2,
            longest=sum(cdiv(vllm_config.model_config.max_model_len, size) for size in block_sizes),
            reserve=num_requests * len(block_sizes),
        )


class Lookahead:
    """Blocks stored too late are lost. Blocks stored too early are in both caches, and the tier
    has room for as many fewer (Wong and Wilkes, "My cache or yours?", 2002).

    So it is the most that may be needed until what is stored now has been released, where that
    is a small part of the device, or as long as the tier has room to spare. Otherwise it is the
    most that was needed lately.
    """

    def __init__(self, limits: StepLimits, num_device_blocks: int) -> None:
        self._most = limits.num_steps * limits.per_step + min(
            limits.longest, num_device_blocks // 4
        )
        is_small = 3 * self._most <= num_device_blocks
        self._least = self._most if is_small else num_device_blocks // 16
        self._horizon = num_device_blocks
        """Blocks that are taken until a need is forgotten; after twice as many at the latest."""
        self._taken: deque[int] = deque([0], limits.num_steps)
        """In each of the last steps; the last is the one that is being scheduled."""
        self._peak = self._peak_before = 0
        """The most in as many steps: since the horizon was last reached, and before that, since
        the time before."""
        self._num_taken = 0
        """Since the horizon was last reached."""

    def num_blocks(self, num_empty: int) -> int:
        """How many blocks at the front of the free queue should hold nothing that only the
        device has, while ``num_empty`` host blocks hold nothing."""
        return max(self._least, self._peak, self._peak_before, min(self._most, num_empty // 4))

    def take(self, count: int) -> None:
        """So many blocks have been taken to be filled."""
        self._taken[-1] += count

    def end_step(self) -> None:
        """A step has been scheduled."""
        self._peak = max(self._peak, sum(self._taken))
        self._num_taken += self._taken[-1]
        self._taken.append(0)
        if self._num_taken >= self._horizon:
            self._num_taken = 0
            self._peak, self._peak_before = sum(self._taken), self._peak
