"""Loads, and the hits that they are planned for."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import Ended
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation.mutations.registry import mutation, substitute


@mutation()
def forget_unpin_after_load(stack: ExitStack) -> None:
    finish = Loads.finish

    def leaking(self: Loads, ended: Ended, device_pool: Any) -> bool:
        with patch.object(CpuTier, "unpin", lambda self, blocks: None):
            return finish(self, ended, device_pool)

    substitute(stack, Loads, "finish", leaking)


@mutation()
def forget_pin_of_hit(stack: ExitStack) -> None:
    lookup = Loads.lookup

    def unpinned(self: Loads, request: Any, num_computed_tokens: int) -> int:
        num_tokens = lookup(self, request, num_computed_tokens)
        hit = self._hits.get(request.request_id)
        if hit is not None and hit.pins:
            self.tier.unpin(hit.pins)
            hit.pins.clear()
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
