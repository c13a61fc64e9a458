"""Shape: what engine a world has."""

from dataclasses import dataclass
from typing import Literal

from tests.simulation.device import KVMemory
from tests.simulation.groups import Group, Kind

NUM_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """An engine: its pools, its model's groups, and how it is run.

    ``windows``: a group of attention layers each, 0 for full attention, else a window in tokens.
    ``num_states``: that many groups of state layers. ``draft``: a drafter's group as well.
    ``mixed_pages``: the layers of each group have pages of different sizes. ``match_unit``: how
    many tokens a hash covers, if fewer than a block: with states, hits may end inside a block.
    """

    num_device_blocks: int = 24
    num_host_blocks: int = 40
    block_size: int = 4
    windows: tuple[int, ...] = (0,)
    num_ranks: int = 1
    async_scheduling: bool = False
    block_outermost: bool = False
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    load_failures: Literal["recompute", "fail"] = "recompute"
    max_model_len: int = 80
    num_states: int = 0
    draft: bool = False
    mixed_pages: bool = False
    match_unit: int | None = None
    chunk_blocks: int | None = None
    """Host blocks that a rank opens at a time; None: all at start."""
    early_chunks: tuple[int, ...] = ()
    """By rank, how many chunks beyond the first are open before the handshake, none if not said."""
    num_handshakes: int | None = None
    """Of how many ranks the scheduler hears before the first step; None: of all."""

    @property
    def hash_size(self) -> int:
        """Tokens that a hash covers."""
        return self.match_unit or self.block_size

    @property
    def groups(self) -> list[Group]:
        """The model's groups, in vLLM's order."""
        attention = [Group(Kind.ATTENTION, window) for window in self.windows]
        drafts = [Group(Kind.DRAFT)] if self.draft else []
        return [*attention, *drafts, *[Group(Kind.STATE)] * self.num_states]

    @property
    def widths(self) -> tuple[int, ...]:
        """By layer, the slots of 8 bytes that a token takes."""
        return tuple(layer + 1 if self.mixed_pages else 1 for layer in range(NUM_LAYERS))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of all layers on a rank."""
        return self.block_size * 8 * sum(self.widths)

    def make_memory(self) -> KVMemory:
        """One rank's KV cache."""
        return KVMemory(
            self.num_device_blocks,
            self.block_size,
            self.widths,
            len(self.groups),
            self.block_outermost,
        )
