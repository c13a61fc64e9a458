"""MissReason: why a prompt token was computed."""

from enum import IntEnum


class MissReason(IntEnum):
    """The first one that holds for a token's block. Blocks behind a missing one cannot be found
    either, and count with it where nothing else is known of them."""

    UNSEEN = 0
    """No request had this prefix, or so many came since that it is forgotten."""
    EVICTED = 1
    """The host tier had it, and evicted it."""
    NOT_STORED = 2
    """The device lost it before it was stored: too late, no room in the tier, or a failed copy."""
    BELOW_THRESHOLD = 3
    """Too few requests had had it by then (``store_threshold``)."""
    OVERLOAD = 4
    """It was bypassed: requests wanted more than the tier holds (``policy/reuse.py``)."""
    WISH = 5
    """Its request wished that no tier keeps it."""
    RESET = 6
    """The caches were reset."""
    LOAD_FAILED = 7
    """Its load failed, for this request or an earlier one."""
    NO_ROOM = 8
    """The tier has it, and the device had no room to load it beside what runs."""
    BOUNDARY = 9
    """The attention blocks are there, and not the window or state that a hit needs here."""
    OTHER_KEY = 10
    """The same tokens are known with another cache salt, LoRA adapter or image."""
    PROMPT_END = 11
    """No hit can end so late: the prompt's last token is computed, and a hit has whole blocks."""
    NOT_ASKED = 12
    """No cache was asked: the request skips them, its KV comes from another server, or the tier is
    switched off."""

    @property
    def label(self) -> str:
        """In metrics and reports."""
        return self.name.lower()
