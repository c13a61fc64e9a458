"""The outcome as a table, as JSON and in a sentence."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.accuracy.evaluation import Score
from examples.accuracy.results import Outcome, agreeing


def outcome_table(outcome: Outcome) -> Table:
    """A column for each pass: scores with their standard errors, then where prompts came from."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for each in outcome.passes:
        table.add_column(each.name, justify="right", no_wrap=True)
    for rows in zip(*(each.evaluation.scores for each in outcome.passes), strict=False):
        table.add_row(f"{rows[0].task}\n  {rows[0].metric}", *(f"\n{_score(row)}" for row in rows))
    total = len(outcome.without.evaluation.answers)
    same = [f"{agreeing(outcome.without, each)}/{total}" for each in outcome.passes]
    table.add_row("same answers as without", "", *same[1:])
    table.add_row("prompt tokens", *(f"{each.prompt_tokens}" for each in outcome.passes))
    table.add_row(
        "  found in the host tier", *(f"{each.host_hit_tokens}" for each in outcome.passes)
    )
    table.add_row(
        "  found on the device", *(f"{each.device_hit_tokens}" for each in outcome.passes)
    )
    table.add_row("prompts found", *(f"{each.hit_share:.1%}" for each in outcome.passes))
    table.add_row("seconds", *(f"{each.seconds:.0f}" for each in outcome.passes))
    return table


def _score(score: Score) -> str:
    error = "" if score.error is None else f" ± {score.error:.4f}"
    return f"{score.value:.4f}{error}"


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Everything but the answers, which lie beside as lm_eval wrote them."""
    return {
        "passed": outcome.passed,
        "problems": outcome.problems,
        "samples": len(outcome.without.evaluation.answers),
        "passes": {
            each.name: {
                "scores": [vars(score) for score in each.evaluation.scores],
                "same_answers": agreeing(outcome.without, each),
                "prompts": len(each.usages),
                "prompt_tokens": each.prompt_tokens,
                "host_hit_tokens": each.host_hit_tokens,
                "device_hit_tokens": each.device_hit_tokens,
                "hit_share": each.hit_share,
                "seconds": each.seconds,
            }
            for each in outcome.passes
        },
    }


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
    tokens = sum(outcome.second.host_hit_tokens for outcome in outcomes.values())
    total = sum(outcome.second.prompt_tokens for outcome in outcomes.values())
    return (
        f"PASSED: all {samples} samples are answered alike without the connector, with it, and "
        f"once more when {tokens} of {total} prompt tokens came from the host tier."
    )
