"""RankPool: the ranks that share one host memory."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from simple_offload.backends.base import Direction
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer
from simple_offload.worker.shared_memory import SharedMemory

logger = get_logger(__name__)


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


@dataclass(frozen=True, slots=True)
class RankPool:
    """Ranks of one machine that have the same KV. Each stores a stripe of what all have, and loads
    all that it needs."""

    place: int = 0
    """This rank's number among them. The first one puts the memory's pages in place."""
    size: int = 1
    memory: SharedMemory | None = None
    """None: this rank has memory of its own."""
    peers: Peers | None = None

    @classmethod
    def meet(cls, peers: Peers, kind: Hashable) -> "RankPool":
        """The pool of all ranks with an equal ``kind`` on this machine. If one of them cannot open
        the memory, each has its own."""
        memory, address, failure = None, None, None
        try:
            memory = SharedMemory.create()
            address = memory.address
        except OSError as error:
            failure = str(error)
        met = peers.gather(((_machine(), kind), address))
        ranks = [rank for rank, (of_rank, _) in enumerate(met) if of_rank == met[peers.rank][0]]
        if (address := met[ranks[0]][1]) is not None and ranks[0] != peers.rank:
            if memory is not None:
                memory.close()
            try:
                memory = SharedMemory.open(address)
            except OSError as error:
                memory, failure = None, str(error)
        all_failures = peers.gather(failure)
        failures = [all_failures[rank] for rank in ranks if all_failures[rank]]
        if memory is not None and (failures or len(ranks) == 1):
            memory.close()
        if failures and len(ranks) > 1:
            logger.warning(
                "%d ranks have the same KV but cannot share host memory, so each has a copy: %s",
                len(ranks),
                failures[0],
            )
        if failures or len(ranks) == 1:
            return cls(peers=peers)
        return cls(ranks.index(peers.rank), len(ranks), memory, peers)

    def free(self) -> None:
        """Give the memory back."""
        if self.memory is not None:
            self.memory.free()

    @property
    def is_first(self) -> bool:
        """Whether this rank puts the memory's pages in place."""
        return self.place == 0

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


def _machine() -> Hashable:
    """Equal for processes that can see each other."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, Path("/proc/self/ns/pid").stat().st_ino
