"""Pass, Outcome and the verdict, as a table, as JSON and in a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from examples.accuracy.evaluation import Evaluation
from examples.bench.tables import make_table

LEAST_HITS = 0.9
"""More than this share of the second pass's prompt tokens must have been found. Prompts share their
beginning, so the device counts as well as the host tier."""
METRICS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "host_hit_tokens": "vllm:external_prefix_cache_hits_total",
    "device_hit_tokens": "vllm:prefix_cache_hits_total",
}
"""The server's counters of prompt tokens: of all, and of those found in the host tier and on the
device."""
SHOWN = 3
"""Number of differing samples that the verdict shows."""

Sample = tuple[str, int]
"""Task and number."""


@dataclass(frozen=True)
class Pass:
    """All samples once, on one server."""

    name: str
    evaluation: Evaluation
    tokens: Mapping[str, int]
    """By key of METRICS, the prompt tokens of this pass."""
    seconds: float

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that were found, in the host tier or on the device."""
        found = self.tokens["host_hit_tokens"] + self.tokens["device_hit_tokens"]
        return found / max(1, self.tokens["prompt_tokens"])


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

    def different(self, one: Pass) -> list[Sample]:
        """The samples that ``one`` answers in other letters than the pass without the connector, or
        that one of both has not answered."""
        known, found = self.without.evaluation.answers, one.evaluation.answers
        return sorted(
            each for each in known.keys() | found.keys() if known.get(each) != found.get(each)
        )

    def to_json(self) -> dict[str, Any]:
        """Everything but the answers, which lie beside as lm_eval wrote them."""
        num_samples = len(self.without.evaluation.answers)
        return {
            "passed": not self.problems,
            "problems": self.problems,
            "samples": num_samples,
            "passes": {
                each.name: {
                    **each.evaluation.scores,
                    "same_answers": num_samples - len(self.different(each)),
                    **each.tokens,
                    "hit_share": each.hit_share,
                    "seconds": each.seconds,
                }
                for each in (self.without, self.first, self.second)
            },
        }

    @cached_property
    def problems(self) -> list[str]:
        """Faults of the connector, or of the run itself."""
        found = []
        accuracy = next(iter(self.without.evaluation.scores.values()))
        if accuracy < self.least_accuracy:
            found.append(
                f"{accuracy:.1%} are right without the connector; with less than "
                f"{self.least_accuracy:.0%} the model is not fit to show anything"
            )
        for each in (self.first, self.second):
            if different := self.different(each):
                shown = [
                    f"\n  {task} {number}: {self._answer(self.without, task, number)}, then "
                    f"{self._answer(each, task, number)}"
                    for task, number in different[:SHOWN]
                ]
                found.append(
                    f"{len(different)} of {len(self.without.evaluation.answers)} answers of the "
                    f"{each.name} differ from those of the run without:{''.join(shown)}"
                )
        if self.second.hit_share <= LEAST_HITS:
            found.append(
                f"{self.second.hit_share:.1%} of the prompt tokens of the {self.second.name} were "
                f"found, not more than {LEAST_HITS:.0%}"
            )
        elif not self.second.tokens["host_hit_tokens"]:
            found.append(f"nothing of the {self.second.name} came from the host tier")
        return found

    def _answer(self, one: Pass, task: str, number: int) -> str:
        return repr(" | ".join(one.evaluation.answers.get((task, number), ["no answer"])))[:60]


def outcome_table(outcome: Outcome) -> Table:
    """A line for each number, a column for each pass."""
    rows: dict[str, dict[str, str]] = {}
    for name, numbers in outcome.to_json()["passes"].items():
        for key, value in numbers.items():
            text = f"{value:,.4f}".rstrip("0").rstrip(".")
            rows.setdefault(key, {"": key.replace("_", " ")})[name] = text
    return make_table(rows.values())


def verdict(outcomes: Mapping[str, Outcome]) -> str:
    """PASSED or FAILED, and why."""
    problems = [
        f"- {model}: {problem}"
        for model, outcome in outcomes.items()
        for problem in outcome.problems
    ]
    if problems:
        return "\n".join(["FAILED", *problems])
    samples = sum(len(outcome.without.evaluation.answers) for outcome in outcomes.values())
    found, total = (
        sum(outcome.second.tokens[name] for outcome in outcomes.values())
        for name in ("host_hit_tokens", "prompt_tokens")
    )
    return (
        f"PASSED: all {samples} samples are answered alike without the connector, with it, and "
        f"once more when {found} of {total} prompt tokens came from the host tier."
    )
