"""Overlap: compute begins with the first layers while the bytes of the last are on their way."""

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention, MLAAttention

from simple_offload import metrics
from simple_offload.backends.base import ComputeMark, CopiesByLayer
from simple_offload.layout import has_own_kernels
from simple_offload.transfer import Transfer
from simple_offload.worker.copy_lane import CopyLane
from simple_offload.worker.layer_groups import LayerGroups

if TYPE_CHECKING:
    from vllm.config import VllmConfig


LEAST_LAGS = 3.0
"""Loads are divided that take this many times as long as vLLM needs from an announcement to
compute. Compute could begin just before the end of shorter ones. And a divided load has more
descriptors, whose submission takes a fifth of its time (H100, docs/measurements.md)."""


def waiting_layers(vllm_config: "VllmConfig") -> frozenset[str]:
    """Names of the layers that call ``wait_for_layer_load`` before they read their KV. To be called
    once the model has been loaded.

    vLLM's own attention layers do, in one operator. None is counted where others may read KV too:
    in models with attention kernels of their own, and with a drafter, which vLLM may launch as one
    CUDA graph.
    """
    if vllm_config.speculative_config is not None or has_own_kernels(vllm_config):
        return frozenset()
    return frozenset(
        name
        for name, layer in vllm_config.compilation_config.static_forward_context.items()
        if getattr(type(layer), "forward", None) in (Attention.forward, MLAAttention.forward)
    )


def _waits_by_layer() -> bool:
    """Whether vLLM is about to run a forward whose layers call ``wait_for_layer_load``, on one
    stream. It replays a full CUDA graph without any call."""
    if not is_forward_context_available():
        return False
    context = get_forward_context()
    is_full_graph = context.cudagraph_runtime_mode == CUDAGraphMode.FULL
    return bool(context.attn_metadata) and context.ubatch_slices is None and not is_full_graph


class _Forward(NamedTuple):
    """A forward that waited for each layer group."""

    num_tokens: int
    num_blocks: int
    """Device blocks that were loaded for it layer group by layer group."""
    stretches: list[tuple[ComputeMark, ComputeMark]]
    """Compute between each two holds."""

    def seconds(self) -> float | None:
        """Compute between the first hold and the last; None until the device has reached that."""
        total = 0.0
        for start, stop in reversed(self.stretches):
            if (seconds := stop.seconds_since(start)) is None:
                return None
            total += seconds
        return total


class Overlap:
    """The loads that a step's compute waits for layer by layer, and how much compute lies between
    the first layers and the last.

    vLLM calls ``wait_for_layer_load`` in every attention operator. Where it does not, as in a step
    that it replays as one CUDA graph, or where loads come in one layer group, compute waits for
    whole loads at the step's start. One thread, the one that runs the model, calls all methods.
    """

    def __init__(
        self, groups: LayerGroups, lane: CopyLane, backend: CopiesByLayer, meter: metrics.Meter
    ) -> None:
        """``backend``: used for several groups only."""
        self._groups = groups
        self._meter = meter
        self._lane = lane
        self._backend = backend
        self._loads: Collection[int] = ()
        """Those that the step's compute does not wait for yet, or only in part."""
        self._num_held = 0
        """Layer groups of them that it waits for."""
        self._forward = _Forward(0, 0, [])
        self._last_hold: ComputeMark | None = None
        self._unmeasured: deque[_Forward] = deque()
        self._seconds_per_block = 0.0
        """Of the last load."""
        self._bounds: dict[int, tuple[_Forward, float]] = {}
        """The latest and their seconds, by the power of two of their number of tokens."""

    def plan(self, load: Transfer, lag_seconds: float) -> Transfer:
        """The load as it is to be copied: by layer group only if it takes long enough."""
        seconds = len(load.device_blocks) * self._seconds_per_block
        if self._groups.num == 1 or seconds >= LEAST_LAGS * lag_seconds:
            return load
        return replace(load, num_new_tokens=0)

    def on_load_ended(self, load: Transfer, seconds: float) -> None:
        """The device has taken ``seconds`` for it."""
        self._seconds_per_block = seconds / max(1, len(load.device_blocks))

    def hold_compute(self, loads: Collection[int], num_tokens: int) -> None:
        """Make the compute of a step of ``num_tokens`` tokens wait for these loads."""
        self._loads, self._num_held, self._last_hold = loads, 0, None
        self._forward = _Forward(num_tokens, self._lane.num_divided_blocks(loads), [])
        if self._groups.num == 1 or not _waits_by_layer():
            self._hold(self._groups.num)

    def on_layer(self, name: str) -> None:
        """The compute that is queued next reads the KV of this layer."""
        if self._loads:
            num_groups = self._groups.num_needed.get(name, self._groups.num)
            if num_groups > self._num_held:
                self._hold(num_groups)

    def on_forward_ended(self) -> None:
        """All compute of the step is queued: what is queued next waits for all of its loads. Raises
        RuntimeError if the step's compute has not waited: it may have read wrong bytes."""
        if self._loads:
            if not self._num_held:
                raise RuntimeError(
                    "no layer has called wait_for_layer_load in a step that reads loaded KV "
                    "(overlap_loads=False avoids this)"
                )
            self._hold(self._groups.num)

    def hidden_seconds(self, load: Transfer) -> float:
        """Lower bound on compute between the first layer of the load's request and the last. The
        last bytes may arrive this much after the first.

        More tokens or a longer prefix never take less time, and fewer take at least their share. So
        each measured forward gives a lower bound.
        """
        while self._unmeasured and (seconds := self._unmeasured[0].seconds()) is not None:
            forward = self._unmeasured.popleft()
            self._bounds[forward.num_tokens.bit_length()] = forward, seconds
        if not load.overlaps:
            return 0.0
        shares = (
            seconds
            * min(1.0, load.num_new_tokens / forward.num_tokens)
            * min(1.0, len(load.device_blocks) / forward.num_blocks)
            for forward, seconds in self._bounds.values()
        )
        return max(shares, default=0.0)

    def _hold(self, num_groups: int) -> None:
        forward, is_last = self._forward, num_groups == self._groups.num
        if self._last_hold is not None:
            forward.stretches.append((self._last_hold, self._backend.mark_compute()))
        self._lane.hold_compute(self._loads, num_groups)
        if not is_last:
            self._last_hold = self._backend.mark_compute()
        else:
            self._loads, self._last_hold = (), None
            if forward.stretches and forward.num_blocks:
                self._unmeasured.append(forward)
                self._meter.add(metrics.OVERLAPPED, 1)
        self._num_held = num_groups
