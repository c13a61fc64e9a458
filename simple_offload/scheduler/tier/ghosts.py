"""Ghosts: whether requests want contents back that have left the tier."""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash

NUM_FOLLOWED = 64
"""Ghosts that are followed at a time."""
NUM_AVERAGED = 256
"""Ghosts whose ends are averaged. A request wants many of them at once, so fewer say little."""


class Ghosts:
    """Follows a sample of the contents that have left, by their hashes (Megiddo and Modha, "ARC: a
    self-tuning, low overhead replacement cache", FAST 2003).

    A ghost ends when a request wants it, or when others have left that fill its lifetime. Then more
    room would not have kept it long enough.
    """

    def __init__(self) -> None:
        self._since: dict[bytes, int] = {}
        """By hash of a ghost, how many contents had left before it. Oldest first."""
        self.share_wanted = 0.0
        """Of the last ghosts, the share that requests wanted back: an exponential average."""

    def add(self, keys: Sequence[BlockHashWithGroupId], num_before: int, lifetime: int) -> None:
        """Contents with ``keys`` have left, ``num_before`` others before them. A ghost lives until
        ``lifetime`` more have left."""
        period = max(1, lifetime // NUM_FOLLOWED)
        for place in range(-num_before % period, len(keys), period):
            self._since.setdefault(get_block_hash(keys[place]), num_before + place)
        oldest = num_before + len(keys) - lifetime
        over = [block_hash for block_hash, since in self._since.items() if since < oldest]
        self._end(over, 0.0)

    def on_request(self, block_hashes: Sequence[bytes]) -> None:
        """A request wants contents with ``block_hashes``."""
        if self._since:  # else each hash is looked at in vain
            self._end(self._since.keys() & block_hashes, 1.0)

    def _end(self, block_hashes: Sequence[bytes] | set[bytes], wanted: float) -> None:
        for block_hash in block_hashes:
            del self._since[block_hash]
            self.share_wanted += (wanted - self.share_wanted) / NUM_AVERAGED
