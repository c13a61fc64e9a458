"""The results as tables."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.table import Table

from examples.bench.tables import MISSING, make_table, optional, ratio
from examples.scheduler_bench.results import LEAST, RIVAL, Kind, Play, Results, Size, figures
from examples.scheduler_bench.sizes import REPLAYED

WIDTH = 200
"""Columns for the tables of all contenders. A narrower terminal wraps them; nothing is cut off."""


def cost_table(results: Results) -> Table:
    """One line for each kind and size: milliseconds, and ratios to the rival."""
    names = dict.fromkeys(name for row in results.rows for name in row.cells)
    headings = (heading for name in names for heading in ([name] if name == RIVAL else [name, "x"]))
    table = make_table(
        *("", "size", *headings),
        caption="Milliseconds in the connector's hooks: decode, serving and conversations, of a\n"
        f"step; else of one prompt. x: over {RIVAL}'s.\n"
        "vLLM's BlockPool: the pool's own methods for the same blocks.",
    )
    for kind in Kind:
        for row in (row for row in results.rows if row.kind is kind):
            cells = []
            for name in names:
                seconds = row.cells.get(name)
                cells.append(MISSING if seconds is None else f"{seconds * 1e3:.3f}")
                if name != RIVAL:
                    cells.append(optional(ratio(seconds, row.cells.get(RIVAL)), ".2f"))
            table.add_row(kind.value, f"{row.size:,}", *cells)
        table.add_section()
    return table


def footprint_table(results: Results) -> Table:
    """One line for each contender."""
    table = make_table(
        *("tier", "blocks", "start, s", "x", "bytes/\nblock", "x", "more if\nfilled", "x"),
        caption="Scheduler side only, a process each. Start: processor time, median. Bytes of\n"
        f"a device block's worth of the tier. x: over {RIVAL}'s.",
    )
    forms = {"seconds_to_start": ".2f", "bytes_per_block": ".0f", "bytes_per_filled_block": ".0f"}
    rival = results.footprints.get(RIVAL)
    for name, found in results.footprints.items():
        cells = []
        for key, form in forms.items():
            value = getattr(found, key)
            cells.append(optional(value, form))
            cells.append(optional(ratio(value, getattr(rival, key, None)), ".2f"))
        table.add_row(name, f"{found.tier_blocks:,}", *cells)
    return table


def found_table(plays: Sequence[Play]) -> Table:
    """A line for each contender of each play, in percent of the prompts' tokens."""
    table = make_table(
        *("contender", "device", "host", "found", "of a run", "lost on\ndevice", "lost in\nhost"),
        *("LRU", "best", "stored", "pre-\nempted"),
        caption="Prompt tokens in percent. Found: on the device or in the host tier. Of a run:\n"
        "least and greatest of the seeds. Lost: computed before, and evicted by the device when\n"
        "the tier did not have them, or by the tier. LRU, best: a cache of both sizes that gets\n"
        "the same requests, and one that knows the future. Lost tokens and these caches are not\n"
        "counted for hybrid models. Stored: thousands of host blocks.",
    )
    for play in plays:
        table.add_row(play.name, style="bold")
        for name, outcome in play.outcomes.items():
            of_runs = [run.share(run.found) for run in play.runs[name]]
            tokens = (outcome.unstored, outcome.evicted, outcome.lru, outcome.optimal)
            table.add_row(
                name,
                *(_percent(outcome.share(each)) for each in (outcome.device, outcome.host)),
                _percent(outcome.share(outcome.found)),
                f"{_percent(min(of_runs))} - {_percent(max(of_runs))}",
                *(_percent(outcome.share(each)) if outcome.optimal else MISSING for each in tokens),
                f"{outcome.stored / 1000:.1f}",
                f"{outcome.preempted:,}",
            )
        table.add_section()
    return table


def wait_table(plays: Sequence[Play]) -> Table:
    """Two lines for each contender of each play: first turns and later ones."""
    table = make_table(
        *("contender", "turns", "requests", "mean", "of a run", "p50", "p99", "worst", "of a run"),
        *("until\nblocks", "load", "com-\npute", "passed", "in all", "finish, s"),
        left=2,
        caption="Milliseconds until the first token, by the engine's clock: a step takes its time\n"
        "and more for each token, and copies of one direction follow each other. Later turns:\n"
        "half of the prompt or more was computed before. Of a run: least and greatest of the\n"
        "seeds. Passed: requests that came later and got blocks first, the most for one request,\n"
        "and all. Finish: all runs together.",
    )
    for play in plays:
        table.add_row(play.name, style="bold")
        for name, outcome in play.outcomes.items():
            for turns, waits in (("first", outcome.first_turns), ("later", outcome.later_turns)):
                if found := figures(waits):
                    ms = {key: f"{1e3 * value:,.0f}" for key, value in found.items()}
                    table.add_row(
                        *(name, turns, f"{found['requests']:,.0f}", ms["mean"]),
                        *(f"{ms['least_mean']} - {ms['greatest_mean']}", ms["p50"], ms["p99"]),
                        *(ms["worst"], f"{ms['least_worst']} - {ms['greatest_worst']}"),
                        *(ms["until_blocks"], ms["load"], ms["compute"]),
                        *(f"{found[key]:,.0f}" for key in ("passed_most", "passed_sum")),
                        f"{outcome.seconds:,.1f}",
                    )
        table.add_section()
    return table


def bytes_table(sizes: Mapping[str, Mapping[str, float]]) -> Table:
    """A line for each model."""
    names = dict.fromkeys(name for each in sizes.values() for name in each)
    table = make_table(
        *("model", *names, "ours / least"),
        caption="Host bytes of a prompt's token on the whole server, with all that the connector\n"
        "keeps. Least: the chain and one boundary, no padding, one copy of what ranks share.",
    )
    for model, by_name in sizes.items():
        cells = (optional(by_name.get(name), ",.0f") for name in names)
        table.add_row(model, *cells, optional(ratio(by_name.get("ours"), by_name[LEAST]), ".2f"))
    return table


def sizes_table(sizes: Mapping[str, Sequence[Mapping[float, Size]]]) -> Table:
    """A line for each size of host memory, in percent of the prompts' tokens."""
    table = make_table(
        *("host memory", "LRU of\nD + H", "predicted", "replayed", "error", "worst"),
        *("agents\nwait", "error", "worst", "of that\norder"),
        caption="Prompt tokens found, in percent, mean of the seeds. All sizes are predicted from\n"
        "the replay with the memory that is named. Replayed: the requests come at the same times.\n"
        "Agents wait: they come when their agent has its answer, so memory changes their order.\n"
        "Of that order: predicted, too, but from a replay in which they come in that order.",
    )
    for name, by_seed in sizes.items():
        table.add_row(name, style="bold")
        for factor in REPLAYED if by_seed else ():
            runs = [run[factor] for run in by_seed]
            cells = [
                _percent(fmean(getattr(run, key) for run in runs)) for key in ("lru", "predicted")
            ]
            for key in ("replayed", "in_loop"):
                found = [getattr(run, key) for run in runs]
                errors = [run.predicted - each for run, each in zip(runs, found, strict=True)]
                worst = max(errors, key=abs)
                cells += [
                    _percent(fmean(found)),
                    f"{100 * fmean(errors):+.1f}",
                    f"{100 * worst:+.1f}",
                ]
            table.add_row(f"{factor:g} x", *cells, _percent(fmean(run.of_order for run in runs)))
        table.add_section()
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
