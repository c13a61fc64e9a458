"""Loads and their hits."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import Ended
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation.mutations.registry import mutation, substitute


@mutation()
def skip_unpin_after_load(stack: ExitStack) -> None:
    on_ended = Loads.on_ended

    def leaking(self: Loads, ended: Ended, device_pool: Any) -> bool:
        with patch.object(CpuTier, "unpin", lambda self, blocks: None):
            return on_ended(self, ended, device_pool)

    substitute(stack, Loads, "on_ended", leaking)


@mutation()
def skip_pin_of_hit(stack: ExitStack) -> None:
    lookup = Loads.lookup

    def unpinned(self: Loads, request: Any, num_computed_tokens: int) -> int:
        num_tokens = lookup(self, request, num_computed_tokens)
        known = self._hits.get(request.request_id)
        if known is not None:
            self._tier.unpin(known.hit.pins)
            known.hit.pins.clear()
        return num_tokens

    substitute(stack, Loads, "lookup", unpinned)


@mutation()
def load_into_the_next_block(stack: ExitStack) -> None:
    submit = Loads.submit

    def shifted(self: Loads, *arguments: Any) -> Any:
        transfers = submit(self, *arguments)
        for transfer in transfers:
            transfer.host_blocks[:] = transfer.host_blocks[::-1].copy()
        return transfers

    substitute(stack, Loads, "submit", shifted)
