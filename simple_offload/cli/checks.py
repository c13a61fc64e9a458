"""The results of doctor's checks."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Status(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    """The server starts, but runs slower or less safely than it could."""
    ERROR = "error"
    """The server would not start, or the connector would do nothing."""


@dataclass(frozen=True)
class Check:
    """One result."""

    status: Status
    name: str
    found: str
    advice: str = ""
    """What to do; empty if there is no problem."""


ok, warning, error = (partial(Check, status) for status in Status)
