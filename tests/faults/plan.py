"""FaultPlan: which copies go wrong, and how. Travels as JSON."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class Fault(BaseModel):
    """What happens to some transfers of one direction on one rank (or on all)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    direction: Literal["load", "store"]
    action: Literal["fail", "delay", "kill"]
    """fail: nothing is copied, an exception comes instead. delay: the copy is made when its end
    is seen, after ``polls``. kill: the copy thread ends (SystemExit)."""
    first: int = Field(1, ge=1)
    """Number of the first transfer it happens to; they count from 1 when the plan comes into
    force."""
    every: int | None = Field(None, ge=1)
    """Then to every so many-th; None: to that one only."""
    times: int | None = Field(None, ge=1)
    """At most so many times."""
    polls: int = Field(0, ge=0)
    """How often the transfer says that it has not ended. With "fail", the exception comes after
    that, as it does where a device reports it."""
    rank: int | None = None

    def strikes(self, number: int) -> bool:
        """Whether it happens to transfer ``number``."""
        past = number - self.first
        if self.every is None:
            return past == 0
        strikes = past >= 0 and past % self.every == 0
        return strikes and (self.times is None or past // self.every < self.times)


class FaultPlan(BaseModel):
    """For every transfer, the first fault that strikes it happens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, *faults: Fault) -> Self:
        return cls(faults=faults)

    def of_rank(self, rank: int) -> "FaultPlan":
        """What of it concerns ``rank``."""
        return FaultPlan.of(*(f for f in self.faults if f.rank in (None, rank)))

    def find(self, direction: str, number: int) -> Fault | None:
        """What happens to transfer ``number`` of ``direction``."""
        fitting = (f for f in self.faults if f.direction == direction and f.strikes(number))
        return next(fitting, None)
