"""The results of doctor's checks."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    """The server starts, but runs slower or less safely than it could."""
    ERROR = "error"
    """The server would not start, or the connector would do nothing."""


@dataclass(frozen=True)
class Check:
    """One result."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty if there is no problem."""


def ok(name: str, found: str) -> Check:
    return Check(name, Status.OK, found)


def warning(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.WARNING, found, advice)


def error(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.ERROR, found, advice)
