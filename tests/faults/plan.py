"""FaultPlan: the planned faults of copies. Encoded as JSON between processes."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Fault(BaseModel):
    """A fault of some transfers of one direction, on one rank or all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    direction: Literal["load", "store"]
    action: Literal["fail", "delay", "kill"]
    """fail: an exception, and no copy. delay: the copy is made after ``polls``, when its end is
    polled. kill: the copy thread ends (SystemExit)."""
    first: int = Field(1, ge=1)
    """The first transfer that it hits; transfers count from 1 since the plan is set."""
    every: int | None = Field(None, ge=1)
    """Period of further hits, in transfers; None: no further hits."""
    times: int | None = Field(None, ge=1)
    """The largest number of hits; None: no limit."""
    polls: int = Field(0, ge=0)
    """Polls that find the transfer still running. With "fail", the exception comes after them, like
    an error that a device reports."""
    rank: int | None = None

    def hits(self, number: int) -> bool:
        """Whether it hits transfer ``number``."""
        past = number - self.first
        if self.every is None:
            return past == 0
        hits = past >= 0 and past % self.every == 0
        return hits and (self.times is None or past // self.every < self.times)


class FaultPlan(BaseModel):
    """Every transfer gets the first fault that hits it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()

    def for_rank(self, rank: int) -> "FaultPlan":
        """The faults of ``rank``."""
        return FaultPlan(faults=tuple(f for f in self.faults if f.rank in (None, rank)))

    def find(self, direction: str, number: int) -> Fault | None:
        """The fault of transfer ``number`` of ``direction``."""
        hits = (f for f in self.faults if f.direction == direction and f.hits(number))
        return next(hits, None)
