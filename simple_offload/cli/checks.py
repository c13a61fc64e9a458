"""What doctor found out, one thing at a time."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """Whether it is a problem."""

    OK = "ok"
    WARNING = "warning"
    """The server starts, and something is slower or less safe than it could be."""
    ERROR = "error"
    """The server would not start, or the connector would do nothing."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""


def ok(name: str, found: str) -> Check:
    return Check(name, Status.OK, found)


def warning(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.WARNING, found, advice)


def error(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.ERROR, found, advice)
