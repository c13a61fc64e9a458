"""The outcome as a table, as JSON and in a sentence."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.accuracy.results import Outcome, Pass, agreeing


def outcome_table(outcome: Outcome) -> Table:
    """One line a pass and score: shares with their standard errors, tokens as counts."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("", "metric", "score", "±", "same\nanswers"):
        table.add_column(heading, justify="left" if heading in ("", "metric") else "right")
    for heading in ("prompt\ntokens", "from\nhost", "from\ndevice", "prompts\nfound", "seconds"):
        table.add_column(heading, justify="right")
    for each in outcome.passes:
        for number, score in enumerate(each.evaluation.scores):
            error = "" if score.error is None else f"{score.error:.4f}"
            row = ["" if number else each.name, f"{score.task} {score.metric}"]
            row += [f"{score.value:.4f}", error]
            table.add_row(*row, *([""] * 6 if number else _facts(outcome, each)))
    return table


def _facts(outcome: Outcome, each: Pass) -> list[str]:
    total = len(outcome.without.evaluation.answers)
    same = "" if each is outcome.without else f"{agreeing(outcome.without, each)}/{total}"
    return [
        same,
        str(each.prompt_tokens),
        str(each.host_hit_tokens),
        str(each.device_hit_tokens),
        f"{each.hit_share:.1%}",
        f"{each.seconds:.0f}",
    ]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Everything but the answers, which lie beside as lm_eval wrote them."""
    return {
        "passed": outcome.passed,
        "problems": outcome.problems,
        "samples": len(outcome.without.evaluation.answers),
        "passes": {each.name: _pass_json(outcome, each) for each in outcome.passes},
    }


def _pass_json(outcome: Outcome, each: Pass) -> dict[str, Any]:
    return {
        "scores": [vars(score) for score in each.evaluation.scores],
        "same_answers": agreeing(outcome.without, each),
        "prompts": len(each.usages),
        "prompt_tokens": each.prompt_tokens,
        "host_hit_tokens": each.host_hit_tokens,
        "device_hit_tokens": each.device_hit_tokens,
        "hit_share": each.hit_share,
        "seconds": each.seconds,
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
    prompts = [usage for outcome in outcomes.values() for usage in outcome.second.usages]
    tokens = sum(outcome.second.host_hit_tokens for outcome in outcomes.values())
    return (
        f"PASSED: all {samples} samples are answered alike without the connector, with it, and "
        f"from the host tier, from which {tokens} tokens of {len(prompts)} prompts came."
    )
