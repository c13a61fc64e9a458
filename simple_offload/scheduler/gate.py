"""Gate: what vLLM is told when it asks for a request's hit."""

from collections.abc import Collection, Mapping

from vllm.v1.request import Request

from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.parked import Parked
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.prompt_records import PromptRecords
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import HostHit
from simple_offload.second_tier.interface import SecondTierHooks

MAX_PASSED = 8
"""Requests that may get blocks while one waits for the load of another, before it loads by
itself."""


def is_prefilled_elsewhere(request: Request) -> bool:
    """Whether another server has done the request's prefill: another connector (MultiConnector)
    brings its KV from there, and it wants nothing of the tiers."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


class Gate:
    """Three answers: a load, no load (0), or ask again (None).

    vLLM passes over a request that has to ask again, and gives the room to those behind it. At one
    that gets no room it stops, so that none passes. So a request has to ask again in three cases:

    - It has given its blocks back (``Parked``). vLLM still has it among those with blocks, before
      all others, until it asks again.
    - The second tier is asked, or read, within its own time limit.
    - The load of another request brings most of its hit. It finds that on the device soon, and
      needs no copy of its own. Then ``MAX_PASSED`` others may get blocks before it.

    Few requests are told so in a step: not more than may run. vLLM asks all behind them too.
    """

    def __init__(
        self,
        loads: Loads,
        groups: Groups,
        parked: Parked,
        policy: StorePolicy,
        records: PromptRecords,
        block_size: int,
        chunk_sizes: Collection[int],
        max_running: int,
    ) -> None:
        """``block_size``: tokens that a hit is a multiple of. ``max_running``: requests that vLLM
        runs at a time."""
        self._loads = loads
        self._groups = groups
        self._parked = parked
        self._policy = policy
        self._records = records
        self._chunk_sizes = chunk_sizes
        self._block_size = block_size
        self._max_running = max_running
        self.is_closed = False
        """Whether the host tier is switched off: nothing is loaded."""
        self._offered: tuple[str, int] | None = None
        """The request that was last offered a load in the step being scheduled, and where its hit
        ends, in tokens; if vLLM has not given it blocks."""
        self._given_back: set[str] = set()
        """Requests that have given their blocks back, and have not asked since."""
        self._num_sharing = 0
        """Requests that wait for loads of others in the step being scheduled."""
        self._num_allocated = 0
        """Requests that have got blocks so far."""
        self._since: dict[str, int] = {}
        """By request that waits for the load of another, that count when it began to."""

    def ask(
        self, request: Request, num_computed_tokens: int, second_tier: SecondTierHooks
    ) -> int | None:
        """Tokens to load for a request without blocks, whose first ``num_computed_tokens`` tokens
        the device has. Pins them. None: vLLM should ask again in the next step."""
        request_id = request.request_id
        self._parked.remove(request_id)
        if request_id in self._given_back:
            self._given_back.remove(request_id)
            return None
        hit = HostHit()
        if self.asks_caches(request) and self._may_load(num_computed_tokens):
            second_tier.on_lookup()
            hit = self._loads.lookup(request, num_computed_tokens)
            if second_tier.must_wait(request, num_computed_tokens, hit.num_tokens):
                return None  # it may add to the hit, which stays pinned
        num_tokens, num_blocks = hit.num_tokens, len(hit.pins) * self._groups.num_sub_blocks
        if num_tokens and self._shares_load(request_id, hit):
            self._loads.unpin_hit(request_id)
            return None
        if not (num_tokens and self._parked.has_room(request)):
            # Without a load vLLM stops at this request too, or has the room to compute it.
            if num_tokens:
                self._records.on_refused(request_id, num_computed_tokens + num_tokens)
            self._loads.unpin_hit(request_id)
            num_tokens = num_blocks = 0
        withholds = self._policy.before_allocation(
            request, num_blocks, num_computed_tokens + num_tokens
        )
        if num_tokens and not withholds:
            self._offered = request_id, num_computed_tokens + num_tokens
        return num_tokens

    def on_allocated(self, request_id: str) -> None:
        self._offered = None
        self._num_allocated += 1
        self._since.pop(request_id, None)

    def on_step(self) -> None:
        """A step has been scheduled."""
        self._offered = None
        self._num_sharing = 0

    def give_back(self) -> None:
        """Have parked requests that are ready give their blocks back. They are computed."""
        for request_id in self._parked.give_back():
            self._given_back.add(request_id)
            self._loads.offer_no_more(request_id)
            self._records.on_lost(request_id, MissReason.NO_ROOM)

    def on_standstill(self) -> None:
        """vLLM has scheduled nothing for some steps, although nothing is under way. A load needs
        more blocks than compute: vLLM keeps some free beside it. One that it refuses now is not
        offered again."""
        self.give_back()
        if self._offered is not None:
            request_id, num_tokens = self._offered
            self._loads.offer_no_more(request_id)
            self._records.on_refused(request_id, num_tokens)

    def on_request_finished(self, request_id: str) -> None:
        self._given_back.discard(request_id)
        self._since.pop(request_id, None)

    def asks_caches(self, request: Request) -> bool:
        """Whether the request may hit anything."""
        skips = request.skip_reading_prefix_cache or is_prefilled_elsewhere(request)
        return not (skips or self.is_closed)

    def _may_load(self, num_computed_tokens: int) -> bool:
        """Whether host blocks may follow this device prefix. It ends on a scheduler block boundary;
        where attention is local to a chunk, the lookup starts with a chunk."""
        if num_computed_tokens % self._block_size:
            return False
        start = self._groups.start_of(num_computed_tokens)
        return not any(start % chunk_size for chunk_size in self._chunk_sizes)

    def _shares_load(self, request_id: str, hit: HostHit) -> bool:
        """Whether the request waits for the load of another one."""
        if self._num_sharing == self._max_running or not self._loads.will_bring_most(hit):
            return False
        since = self._since.setdefault(request_id, self._num_allocated)
        if self._num_allocated - since > MAX_PASSED:
            return False
        self._num_sharing += 1
        return True
