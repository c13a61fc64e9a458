"""LetGo: host blocks whose contents the device has let go of, until the tier moves them."""

from collections import deque

import numpy as np

from simple_offload.transfer import BlockIds


class LetGo:
    """Ids of blocks in the order in which the device has let go of their contents. Mostly requests
    find them again before their order matters: such a block counts at its last place only."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, BlockIds]] = deque()
        """Ids that were added together, each with their number, oldest first."""
        self._num_ids = 0
        self._last = np.zeros(0, np.int64)
        """By block id, the number of the last part with it."""
        self._next = 1

    def __len__(self) -> int:
        """Number of ids, repeated ones included."""
        return self._num_ids

    def grow(self, num_blocks: int) -> None:
        """Take ids below ``num_blocks`` from now on."""
        self._last.resize(num_blocks, refcheck=False)

    def add(self, block_ids: BlockIds) -> None:
        """Append ids."""
        if not len(block_ids):
            return  # nothing would ever remove it
        self._last[block_ids] = self._next
        self._parts.append((self._next, block_ids))
        self._next += 1
        self._num_ids += len(block_ids)

    def pop_oldest(self) -> list[int]:
        """Remove the oldest ids that were added together. Returns those not added again since."""
        number, block_ids = self._parts.popleft()
        self._num_ids -= len(block_ids)
        latest: list[int] = block_ids[self._last[block_ids] == number].tolist()
        return latest

    def clear(self) -> None:
        """Remove all ids."""
        self._parts.clear()
        self._num_ids = 0
