"""A forward pass of Llama 3 8B's size with random weights, in parts that are queued one by one."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from vllm import _custom_ops as kernels

from examples.overlap_probe.plan import EAGER, GRAPHS, PARTS, Shape

_TYPE = torch.bfloat16
_EPSILON = 1e-5


class Layer(NamedTuple):
    """Weights ``[out, in]``."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Random weights on ``device``, which keep the size of what they multiply."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def weight(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=_TYPE, device=device).normal_(std=size[-1] ** -0.5)

        self.shape, self.device = shape, device
        width = shape.heads * shape.head
        self.layers = [
            Layer(
                weight(width + 2 * shape.kv_heads * shape.head, shape.hidden),
                weight(shape.hidden, width),
                weight(2 * shape.mlp, shape.hidden),
                weight(shape.hidden, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        self.vocab = weight(shape.vocab, shape.hidden)
        self.ones = torch.ones(shape.hidden, dtype=_TYPE, device=device)


class Attention(Protocol):
    """Writes K and V of the new tokens to their pages, and attends to all pages of the request."""

    def __call__(
        self, qkv: tuple[torch.Tensor, ...], cache: torch.Tensor, step: "Step", out: torch.Tensor
    ) -> None:
        """``qkv``: q, k and v, ``[tokens, heads, head]`` each; ``cache``: the pages of one layer,
        ``[blocks, KV heads, tokens, K and V]``; ``out``: as q."""


class Step:
    """A forward pass of ``new_tokens`` behind ``context`` tokens, of which the pool's first blocks
    have the KV. That of the new ones goes to the pool's last blocks, to which no load goes.

    ``pool``: ``[blocks, *Shape.block_shape]``. All that a pass writes is allocated here.
    """

    def __init__(
        self, model: Model, attention: Attention, pool: torch.Tensor, new_tokens: int, context: int
    ) -> None:
        shape, device, size = model.shape, model.device, model.shape.block_tokens
        self.new_tokens, self.context = new_tokens, context
        self.context_blocks, tail = context // size, -(-new_tokens // size)
        if context % size or self.context_blocks + tail > len(pool):
            raise ValueError(f"{context} and {new_tokens} tokens in {len(pool)} blocks of {size}")
        self._model, self._attention, self._pool = model, attention, pool
        blocks = torch.cat([torch.arange(self.context_blocks), torch.arange(-tail, 0) + len(pool)])
        positions = torch.arange(context, context + new_tokens)
        slots = blocks[positions // size] * size + positions % size
        self.block_table = blocks.int()[None].to(device)  # [1, blocks]
        self.slots, self._positions = slots.to(device), positions.to(device)
        self.ends = torch.tensor([0, new_tokens], dtype=torch.int32, device=device)
        self.length = torch.tensor([context + new_tokens], dtype=torch.int32, device=device)
        angles = torch.outer(
            torch.arange(context + new_tokens),
            5e5 ** (-torch.arange(0, shape.head, 2) / shape.head),
        )
        self._rotation = torch.cat([angles.cos(), angles.sin()], dim=1).to(device, _TYPE)

        def buffer(width: int) -> torch.Tensor:
            return torch.zeros(new_tokens, width, dtype=_TYPE, device=device)

        self._embedded = buffer(shape.hidden).normal_()
        self._x, self._residual = buffer(shape.hidden), buffer(shape.hidden)
        self._widths = [shape.heads * shape.head, *[shape.kv_heads * shape.head] * 2]
        self._qkv, self._attended = buffer(sum(self._widths)), buffer(self._widths[0])
        self._gate_up, self._mlp = buffer(2 * shape.mlp), buffer(shape.mlp)
        self.logits = torch.zeros(1, shape.vocab, dtype=_TYPE, device=device)
        """Of the last token: what a pass ends with."""
        self.launches: dict[str, list[Callable[[], None]]] = {
            EAGER: [partial(self._compute, part) for part in range(PARTS)]
        }
        """By kind of launch, a function for each part."""
        self.expected: dict[str, torch.Tensor] = {}
        """By kind of launch, the logits of ``learn``."""

    def learn(self) -> None:
        """Add the launch by CUDA graphs, one a part, and keep the logits of each launch. The pool
        holds what will be loaded."""
        for _ in range(2):  # kernels are chosen and loaded before they are captured
            self.run(EAGER)
        self.launches[GRAPHS] = capture(self.launches[EAGER])
        for launch in self.launches:
            self.run(launch)
            self.expected[launch] = self.logits.clone()

    def run(self, launch: str) -> None:
        """Queue the whole pass."""
        for part in self.launches[launch]:
            part()

    def _compute(self, part: int) -> None:
        if part == 0:
            self._x.copy_(self._embedded)
            self._residual.zero_()
        per_part = len(self._model.layers) // PARTS
        for index in range(part * per_part, (part + 1) * per_part):
            self._layer(self._model.layers[index], self._pool[:, index])
        if part == PARTS - 1:
            self._norm()
            torch.mm(self._x[-1:], self._model.vocab.t(), out=self.logits)

    def _layer(self, weights: Layer, cache: torch.Tensor) -> None:
        """By torch's matrix products and vLLM's kernels, as vLLM does."""
        head = self._model.shape.head
        self._norm()
        torch.mm(self._x, weights.qkv.t(), out=self._qkv)
        q, k, v = self._qkv.split(self._widths, dim=1)
        kernels.rotary_embedding(self._positions, q, k, head, self._rotation, True)
        qkv = tuple(part.view(self.new_tokens, -1, head) for part in (q, k, v))
        self._attention(qkv, cache, self, self._attended.view(self.new_tokens, -1, head))
        torch.mm(self._attended, weights.o.t(), out=self._x)
        self._norm()
        torch.mm(self._x, weights.gate_up.t(), out=self._gate_up)
        torch.ops._C.silu_and_mul(self._mlp, self._gate_up)
        torch.mm(self._mlp, weights.down.t(), out=self._x)

    def _norm(self) -> None:
        kernels.fused_add_rms_norm(self._x, self._residual, self._model.ones, _EPSILON)


class FlashAttention:
    """vLLM's kernels on CUDA, called as its backend FLASH_ATTN does. (One difference: FA3 plans its
    schedule in every layer, where vLLM does so once a step.)"""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError where vLLM has no flash attention for this GPU."""
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self.version = get_flash_attn_version()
        if self.version not in (2, 3):
            raise RuntimeError(f"vLLM has FA{self.version} for this GPU, neither FA3 nor FA2")
        self._attend: Callable[..., object] = flash_attn_varlen_func
        self._one = torch.ones((), device=device)

    def __call__(
        self, qkv: tuple[torch.Tensor, ...], cache: torch.Tensor, step: Step, out: torch.Tensor
    ) -> None:
        """See ``Attention``."""
        q, k, v = qkv
        keys, values = cache.transpose(1, 2).split(q.shape[-1], dim=-1)
        kernels.reshape_and_cache_flash(
            k, v, keys, values, step.slots, "auto", self._one, self._one
        )
        self._attend(
            q,
            keys,
            values,
            max_seqlen_q=step.new_tokens,
            cu_seqlens_q=step.ends,
            max_seqlen_k=step.context + step.new_tokens,
            seqused_k=step.length,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=True,
            block_table=step.block_table,
            out=out,
            fa_version=self.version,
        )


def capture(parts: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """A function for each part that replays it as a CUDA graph. Parts are replayed in order."""
    graphs = [torch.cuda.CUDAGraph() for _ in parts]
    pool = torch.cuda.graph_pool_handle()
    for graph, part in zip(graphs, parts, strict=True):
        with torch.cuda.graph(graph, pool=pool):
            part()
    return [graph.replay for graph in graphs]
