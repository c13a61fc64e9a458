"""The plan of a run: a model, lengths, numbers of groups."""

from dataclasses import dataclass

PARTS = 8
"""Parts of a forward pass, of equally many layers: as many as there are groups at most."""
GRAPHS, EAGER = "graphs", "eager"
"""How a part is launched: as a CUDA graph, or kernel by kernel."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama in bfloat16, and of the blocks of its KV cache."""

    layers: int = 32
    hidden: int = 4096
    mlp: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    vocab: int = 128_256
    block_tokens: int = 16

    @property
    def block_shape(self) -> tuple[int, ...]:
        """[layers, KV heads, tokens, K and V of a token]: vLLM's layout BLHNC, in which layers that
        follow each other are neighbours."""
        return self.layers, self.kv_heads, self.block_tokens, 2 * self.head

    @property
    def block_bytes(self) -> int:
        return self.layers * self.kv_heads * self.block_tokens * 2 * self.head * 2


@dataclass(frozen=True)
class Plan:
    """One run. The first number of groups is 1: today's load, for all of which compute waits."""

    contexts: tuple[int, ...] = (8192, 100_000)
    new_tokens: tuple[int, ...] = (1, 512, 2048)
    groups: tuple[int, ...] = (1, 4, 8)
    shape: Shape = Shape()
    rounds: int = 12
    fixed_seconds: float = 0.007
    """In TTFT, beside load and forward pass: vLLM takes in the request, and answers."""
    lag_seconds: float = 0.004
    """From the submission of a load until vLLM can have queued compute behind it."""
