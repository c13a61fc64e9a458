"""Pass, Outcome and the verdict: did offloading change any answer?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from examples.accuracy.evaluation import Evaluation, Score
from examples.accuracy.usage import Usage

LEAST_HITS = 0.9
"""Share of the second pass's prompts that must have been found in the host tier."""
LEAST_ACCURACY = 0.9
"""Of our models, without the connector: a model that recalls nothing proves nothing."""
SHOWN = 3
"""Number of differing samples that the verdict shows."""

Sample = tuple[str, int]
"""Task and number."""


@dataclass(frozen=True)
class Pass:
    """All samples once, on one server."""

    name: str
    evaluation: Evaluation
    usages: Sequence[Usage]
    """Of each prompt that was answered."""
    host_hit_tokens: int
    """Prompt tokens that came through the connector, by the server's metrics."""
    device_hit_tokens: int
    """Prompt tokens that were found on the device."""
    seconds: float
    tail_tokens: int
    """Largest number of tokens that are recomputed of a prompt that is found."""

    @property
    def prompt_tokens(self) -> int:
        return sum(usage.prompt_tokens for usage in self.usages)

    @property
    def hit_share(self) -> float:
        """Share of the prompts that were found in a cache but for their last tokens."""
        tails = [usage.prompt_tokens - usage.cached_tokens for usage in self.usages]
        return sum(tail <= self.tail_tokens for tail in tails) / len(tails) if tails else 0.0

    @property
    def main_score(self) -> Score:
        return self.evaluation.scores[0]


@dataclass(frozen=True)
class Outcome:
    """The same samples without the connector, with it, and with it again."""

    without: Pass
    first: Pass
    """Fills the host tier."""
    second: Pass
    """Starts with a filled host tier and an empty device."""
    least_accuracy: float = 0.0
    """Least share of right answers without the connector."""

    @property
    def passes(self) -> tuple[Pass, Pass, Pass]:
        return self.without, self.first, self.second

    @cached_property
    def problems(self) -> list[str]:
        """Faults of the connector, or of the run itself."""
        found = []
        accuracy = self.without.main_score.value
        if accuracy < self.least_accuracy:
            found.append(
                f"{accuracy:.1%} are right without the connector; with less than "
                f"{self.least_accuracy:.0%} the model is not fit to show anything"
            )
        for each in (self.first, self.second):
            found += disagreement(self.without, each)
        if self.second.hit_share <= LEAST_HITS:
            found.append(
                f"{self.second.hit_share:.1%} of the prompts of the {self.second.name} were "
                f"found, not more than {LEAST_HITS:.0%}"
            )
        elif not self.second.host_hit_tokens:
            found.append(f"nothing of the {self.second.name} came from the host tier")
        return found

    @property
    def passed(self) -> bool:
        return not self.problems


def agreeing(one: Pass, other: Pass) -> int:
    """Number of samples with the same answers, to the letter, in both."""
    answers = other.evaluation.answers
    return sum(answers.get(sample) == said for sample, said in one.evaluation.answers.items())


def disagreement(one: Pass, other: Pass) -> list[str]:
    """The differences of ``other`` from ``one``; empty if there are none."""
    ours, theirs = one.evaluation.answers, other.evaluation.answers
    if ours.keys() != theirs.keys():
        apart = len(ours.keys() ^ theirs.keys())
        return [f"{apart} samples were answered in only one of {one.name} and {other.name}"]
    different = [sample for sample in sorted(ours) if ours[sample] != theirs[sample]]
    if not different:
        return []
    text = f"{len(different)} of {len(ours)} answers of the {other.name} differ from those of "
    text += f"the run {one.name}:"
    shown = [
        f"\n  {task} {number}: {_short(ours[task, number])}, then {_short(theirs[task, number])}"
        for task, number in different[:SHOWN]
    ]
    return [text + "".join(shown)]


def _short(answers: Sequence[str]) -> str:
    text = " | ".join(answers)
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
