"""RankPool: the ranks that share one host memory."""

import mmap
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from simple_offload.backends.base import Direction
from simple_offload.config import ConfigError
from simple_offload.logs import get_logger
from simple_offload.shared_memory import SEAL_BYTES, Address, SharedMemory
from simple_offload.transfer import Transfer

logger = get_logger(__name__)


_PART_ALIGNMENT = 64
"""Of a rank's pages in a row. The copy kernel needs 16 for its largest words."""


class Peers(Protocol):
    """The ranks of this rank's tensor parallel group."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by number. Waits until each has called this."""


class TensorParallelPeers:
    """vLLM's tensor parallel group."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        self._group = get_tp_group()

    @property
    def rank(self) -> int:
        return int(self._group.rank_in_group)

    def gather(self, value: Any) -> list[Any]:
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self._group.world_size
        all_gather_object(values, value, group=self._group.cpu_group)
        return values


class Row(NamedTuple):
    """Where this rank's pages of a host block lie, in memory that has the pages of all ranks side
    by side. A second tier reads and writes whole rows."""

    num_bytes: int
    """From one row to the next."""
    start: int
    """Of this rank's pages in a row."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """Ranks of one machine that have the same KV. Each stores a stripe of what all have, and loads
    all that it needs. In memory with rows, ranks with other KV have other parts of each row."""

    place: int = 0
    """This rank's number among those with the same KV."""
    size: int = 1
    memory: SharedMemory | None = None
    """None: this rank has memory of its own."""
    peers: Peers | None = None
    row: Row | None = None
    """None: the memory has pages of these ranks only, and those of a region side by side."""
    is_first: bool = True
    """Whether this rank puts the memory's pages in place."""
    num_sharing: int = 1
    """Ranks that have the memory."""
    address: Address | None = None
    """Where the scheduler's process finds rows, on the rank that tells it."""

    @classmethod
    def meet(cls, peers: Peers, kind: Hashable, node: int | None = None) -> "RankPool":
        """The pool of all ranks with an equal ``kind`` on this machine; with an equal ``node`` too,
        if all pools are of one size then. If a rank cannot open the memory, each has its own."""
        # All ranks use as many blocks as the smallest memory has.
        by_node = Counter(peers.gather((this_machine(), kind, node)))
        if len(set(by_node.values())) == 1:
            kind = kind, node
        _, ranks, _, memory, failures = _meet(peers, kind)
        if failures and len(ranks) > 1:
            logger.warning(
                "%d ranks have the same KV but cannot share host memory, so each has a copy: %s",
                len(ranks),
                failures[0],
            )
        if failures or len(ranks) == 1:
            if memory is not None:
                memory.close()
            return cls(peers=peers)
        place = ranks.index(peers.rank)
        return cls(place, len(ranks), memory, peers, is_first=place == 0, num_sharing=len(ranks))

    @classmethod
    def meet_in_rows(cls, peers: Peers, kind: Hashable, num_bytes: int) -> "RankPool":
        """The pool of all ranks with an equal ``kind``, in a memory of rows that all ranks have.
        ``num_bytes``: of this rank's pages of a block. Raises ConfigError if the ranks cannot share
        memory."""
        num_ranks, ranks, news, memory, failures = _meet(peers, "rows", (kind, num_bytes))
        if len(ranks) < num_ranks:
            failures.append(f"only {len(ranks)} of {num_ranks} ranks are on this machine")
        failures = [each for of_rank in peers.gather(failures) for each in of_rank]
        if memory is None or failures:
            if memory is not None:
                memory.close()
            raise ConfigError(
                f"second_tier: its objects have the pages of all ranks, so these must share "
                f"memory: {failures[0]}. Allowed: one machine for all ranks, or no second_tier"
            )
        starts: dict[Hashable, int] = {}
        end = 0
        for each_kind, each_bytes in news:
            if each_kind not in starts:
                starts[each_kind] = end
                end += -(-each_bytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
        alike = [rank for rank, (each_kind, _) in enumerate(news) if each_kind == kind]
        is_first = peers.rank == 0
        return cls(
            alike.index(peers.rank),
            len(alike),
            memory,
            peers,
            Row(row_bytes(end), starts[kind]),
            is_first=is_first,
            num_sharing=num_ranks,
            address=memory.address if is_first else None,
        )

    def free(self) -> None:
        """Give the memory back."""
        if self.memory is not None:
            self.memory.free()

    def meet_again(self, error: Exception | None = None) -> None:
        """Wait for the other ranks: the first one has opened memory by then. ``error``: why this
        rank cannot start. Raises RuntimeError if another one cannot."""
        if self.peers is None:
            return
        errors = self.peers.gather(None if error is None else f"{type(error).__name__}: {error}")
        for rank, each in enumerate(errors):
            if each is not None and rank != self.peers.rank:
                raise RuntimeError(f"tensor parallel rank {rank} cannot start: {each}")

    @contextmanager
    def others_wait(self) -> Iterator[None]:
        """A context in which the other ranks wait for this one to ``meet_again``. They hear of an
        error."""
        try:
            yield
        except Exception as error:
            with suppress(RuntimeError):  # another one's
                self.meet_again(error)
            raise

    def own_part(self, direction: Direction, transfer: Transfer) -> Transfer:
        """The pairs of ``transfer`` that this rank copies. A load: all. A store: a stripe of the
        pairs that the pool shares, and all pairs of private groups."""
        by_place = transfer.by_place
        host_blocks = transfer.host_blocks if by_place is None else by_place[self.place]
        if direction is Direction.LOAD or self.size == 1:
            return replace(transfer, host_blocks=host_blocks, by_place=None)
        shared = np.arange(len(host_blocks))
        chosen = shared[:0]
        if by_place is not None:
            is_shared = (by_place == by_place[0]).all(axis=0)
            shared, chosen = np.flatnonzero(is_shared), np.flatnonzero(~is_shared)
        start, stop = (len(shared) * place // self.size for place in (self.place, self.place + 1))
        chosen = np.concatenate([chosen, shared[start:stop]])
        return replace(
            transfer,
            device_blocks=transfer.device_blocks[chosen],
            host_blocks=host_blocks[chosen],
            by_place=None,
        )


def row_bytes(num_bytes: int) -> int:
    """Bytes of a row for ``num_bytes`` of pages: with room for a seal, and a multiple of a page of
    memory, which direct I/O asks for."""
    return -(-(num_bytes + SEAL_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _meet(
    peers: Peers, kind: Hashable, news: Any = None
) -> tuple[int, list[int], list[Any], SharedMemory | None, list[str]]:
    """Meet the ranks with an equal ``kind`` on this machine, and open the memory of the first of
    them. Returns the number of all ranks, the ranks with this kind, their news, the memory (None if
    this rank cannot open it), and their failures."""
    memory, address, failure = None, None, None
    try:
        memory = SharedMemory.create()
        address = memory.address
    except OSError as error:
        failure = str(error)
    met = peers.gather(((this_machine(), kind), address, news))
    ranks = [rank for rank, (of_rank, *_) in enumerate(met) if of_rank == met[peers.rank][0]]
    if (address := met[ranks[0]][1]) is not None and ranks[0] != peers.rank:
        if memory is not None:
            memory.close()
        try:
            memory = SharedMemory.open(address)
        except OSError as error:
            memory, failure = None, str(error)
    all_failures = peers.gather(failure)
    failures = [all_failures[rank] for rank in ranks if all_failures[rank]]
    return len(met), ranks, [met[rank][2] for rank in ranks], memory, failures


def this_machine() -> Hashable:
    """Equal for processes that can see each other."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, Path("/proc/self/ns/pid").stat().st_ino
