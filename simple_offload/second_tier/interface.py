"""SecondTierHooks: the calls of the scheduler side to a second tier."""

# ruff: noqa: ARG002 - where there is no second tier, nothing is done

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from simple_offload.scheduler.tier.run import Run


class SecondTierHooks:
    """By itself, where there is no second tier: nothing is fetched or written.

    None of them raises, and none but ``shutdown`` waits. One thread calls them.
    """

    @property
    def has_pending_work(self) -> bool:
        """Whether something waits for the next step, which no thread does by itself. Not for long
        after the last step with tokens."""
        return False

    def on_new_request(self, request: "Request", /) -> None:
        """vLLM has put a request into its queue."""

    def on_lookup(self) -> None:
        """The host tier is about to be asked for a hit. It may get blocks before."""

    def must_wait(
        self, request: "Request", num_computed_tokens: int, num_hit_tokens: int, /
    ) -> bool:
        """Whether a request should be asked about again in the next step, as more of its prefix may
        be in host memory then. It has ``num_computed_tokens`` tokens on the device, and the tier
        has ``num_hit_tokens`` more."""
        return False

    def num_fetched_tokens(self, request_id: str, num_tokens: int, /) -> int:
        """How many of a request's first ``num_tokens`` tokens device and tier have got by the fetch
        that it waited for. Also those that another request has stored meanwhile: seldom."""
        return 0

    def on_request_finished(self, request_id: str, /) -> None:
        """The request has ended. Reads under way go on."""

    def on_stored(self, run: "Run", useless: Collection[int], /) -> None:
        """The blocks of ``run`` have become findable in the host tier, except at the places
        ``useless``."""

    def on_step(self, num_tokens: int, /) -> int | None:
        """vLLM schedules a step of ``num_tokens`` tokens. Returns its number if ``on_step_ended``
        has to tell of its end."""
        return None

    def on_step_ended(self, number: int, /) -> None:
        """The step of this number has ended on every rank."""

    def reset(self) -> None:
        """Close the tier, and forget all contents: the model may be another from now on. Objects
        of before must not be found. No server could find what this one writes from now on."""

    def gauges(self) -> dict[str, float]:
        """For metrics."""
        return {}

    def shutdown(self) -> None:
        """Finish the writes under way, for some seconds at most."""
