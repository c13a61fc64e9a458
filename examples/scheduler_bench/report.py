"""The results as tables."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.table import Table

from examples.bench.tables import MISSING, make_table, optional, ratio
from examples.scheduler_bench.results import (
    LEAST,
    POOL,
    Kind,
    Play,
    Results,
    Sizes,
    figures,
    largest_rows,
    of_rival,
    rival_of,
)
from examples.scheduler_bench.sizes import REPLAYED
from examples.scheduler_bench.stopwatch import Hook
from simple_offload.memory import GIB

WIDTH = 200
"""Columns for the tables of all contenders. A narrower terminal wraps them; nothing is cut off."""

_SIZES = ("lru", "predicted", "replayed")

HOOKS = tuple(hook for hook in Hook if hook is not Hook.OTHER)


def cost_table(results: Results) -> Table:
    """One line for each kind and size: milliseconds, and ratios to rivals."""
    names = dict.fromkeys(name for row in results.rows for name in row.cells)
    headings = []
    for name in names:
        headings += [name, "x", "slowest"] if rival_of(name) in names else [name]
    table = make_table(
        *("", "size", *headings),
        caption="Milliseconds in the connector's hooks: decode, serving and conversations, of a\n"
        "step; else of one prompt. x: over its rival's; slowest: of the slowest step alone.\n"
        "vLLM's BlockPool: the pool's own methods for the same blocks.",
    )
    for kind in Kind:
        for row in (row for row in results.rows if row.kind is kind):
            cells = []
            for name in names:
                cost = row.cells.get(name)
                cells.append(MISSING if cost is None else _milliseconds(cost.seconds))
                if rival_of(name) in names:
                    cells.append(optional(of_rival(row, name), ".2f"))
                    cells.append(optional(of_rival(row, name, "slowest_step"), ".2f"))
            table.add_row(kind.value, f"{row.size:,}", *cells)
        table.add_section()
    return table


def hook_table(results: Results) -> Table:
    """By hook, at the largest size of each kind."""
    table = make_table(
        *("", "contender", *(hook.value for hook in HOOKS)),
        left=2,
        caption="The largest of each kind by hook, in milliseconds.",
    )
    for kind, row in largest_rows(results).items():
        for name, cost in row.cells.items():
            if name == POOL:
                continue  # it has no hooks
            cells = (_milliseconds(cost.by_hook.get(hook, 0.0)) for hook in HOOKS)
            table.add_row(kind.value, name, *cells)
        table.add_section()
    return table


def footprint_table(results: Results) -> Table:
    """One line for each contender."""
    table = make_table(
        *("tier", "blocks", "start, s", "x", "bytes/\nblock", "x", "more if\nfilled", "x"),
        caption="Scheduler side only, a process each. Start: processor time, median. Bytes of\n"
        "a device block's worth of the tier. x: over its rival's.",
    )
    forms = {"seconds_to_start": ".2f", "bytes_per_block": ".0f", "bytes_per_filled_block": ".0f"}
    for name, found in results.footprints.items():
        rival = results.footprints.get(rival_of(name))
        cells = []
        for key, form in forms.items():
            value = getattr(found, key)
            cells.append(optional(value, form))
            cells.append(optional(ratio(value, getattr(rival, key, None)), ".2f"))
        table.add_row(name, f"{found.tier_blocks:,}", *cells)
    return table


def hit_table(plays: Sequence[Play]) -> Table:
    """One line for each order and tier, in percent."""
    names = dict.fromkeys(name for play in plays for name in play.outcomes)
    table = make_table(
        *("turns", *(name.replace("-", "\n") for name in names)),
        caption="Hit rate: tokens loaded from the host tier, of those that were computed before\n"
        "and had left the device. In brackets: from device or host, of all computed before.",
    )
    for play in plays:
        found = [play.outcomes.get(name) for name in names]
        cells = (
            MISSING if each is None else f"{each.hit_rate:.1%} ({each.overall_hit_rate:.0%})"
            for each in found
        )
        table.add_row(play.name, *cells)
    return table


def found_table(plays: Sequence[Play]) -> Table:
    """A line for each contender of each play, in percent of the prompts' tokens."""
    table = make_table(
        *("contender", "device", "host", "found", "lost on\ndevice", "lost in\nhost"),
        *("LRU\nof H", "LRU of\nD + H", "best of\nD + H", "stored", "loaded", "copies"),
        *("pre-\nempted", "requests\n/s", "hooks, s"),
        caption="Prompt tokens in percent. Found: on the device or in the host tier. Lost:\n"
        "computed before, and evicted by the device when the tier did not have them, or by the\n"
        "tier. "
        "LRU, best: a cache of the tier's size (H), or the device's too (D), that gets the same\n"
        "requests, and one that knows the future. Stored, loaded: thousands of blocks.\n"
        "Copies: blocks of the tier that the device has too. Requests: by the engine's clock.",
    )
    for play in plays:
        table.add_row(play.name, style="bold")
        for name, outcome in play.outcomes.items():
            tokens = (
                *(outcome.device, outcome.host, outcome.found, outcome.unstored, outcome.evicted),
                *(outcome.lru_host, outcome.lru_both, outcome.optimal),
            )
            table.add_row(
                name,
                *(f"{100 * outcome.share(each):.1f}" for each in tokens),
                *(f"{blocks / 1000:.0f}" for blocks in (outcome.stored, outcome.loaded)),
                f"{outcome.shared:.0%}",
                f"{outcome.preempted:,}",
                f"{outcome.requests / outcome.seconds:.3g}" if outcome.seconds else MISSING,
                f"{outcome.hook_seconds:.1f}",
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


def agent_table(plays: Sequence[Play]) -> Table:
    """A line for each contender of each model and size of host memory."""
    table = make_table(
        *("contender", "device", "host", "computed", "stored", "GiB"),
        *("first turn", "p99", "later turn", "p99"),
        caption="Prompt tokens in percent, mean of the seeds and half of their range. Stored:\n"
        "thousands of host blocks. GiB: what the tier holds at the end. Milliseconds until the\n"
        "first token, by the engine's clock: mean and p99 of a session's first turns, and later.",
    )
    for play in plays:
        table.add_row(play.name, style="bold")
        for name, runs in play.runs.items():
            shares = (
                [
                    100 * run.share(tokens)
                    for tokens in (run.device, run.host, run.prompt - run.found)
                ]
                for run in runs
            )
            first = [figures(each.first_turns) for each in runs]
            later = [figures(each.later_turns) for each in runs]
            table.add_row(
                name,
                *(_spread(each, 1) for each in zip(*shares, strict=True)),
                f"{fmean(each.stored for each in runs) / 1000:.1f}",
                f"{fmean(each.host_bytes for each in runs) / GIB:.1f}",
                *(
                    _spread([1e3 * each[key] for each in turns if each], 0)
                    for turns in (first, later)
                    for key in ("mean", "p99")
                ),
            )
        table.add_section()
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return MISSING
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):,.{digits}f} ± {half:,.{digits}f}"


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


def sizes_table(sizes: Sequence[Sizes]) -> Table:
    """A line for each size of host memory, in percent of the prompts' tokens."""
    table = make_table(
        *("host memory", "LRU of\nD + H", "predicted", "replayed", "error", "worst"),
        *("agents\nwait", "error", "worst", "of that\norder"),
        caption="Prompt tokens found, in percent, mean of the seeds. All sizes are predicted from\n"
        "the replay with the memory that is named. Replayed: the requests come at the same times.\n"
        "Agents wait: they come when their agent has its answer, so memory changes their order.\n"
        "Of that order: predicted, too, but from a replay in which they come in that order.",
    )
    for each in sizes:
        table.add_row(each.name, style="bold")
        for factor in REPLAYED:
            runs = [run[factor] for run in each.runs]
            if not runs:
                continue
            errors = [run.predicted - run.replayed for run in runs]
            in_loop = [run.predicted - run.in_loop for run in runs]
            table.add_row(
                f"{factor:g} x",
                *(f"{100 * fmean(getattr(run, name) for run in runs):.1f}" for name in _SIZES),
                *(f"{100 * error:+.1f}" for error in (fmean(errors), max(errors, key=abs))),
                f"{100 * fmean(run.in_loop for run in runs):.1f}",
                *(f"{100 * error:+.1f}" for error in (fmean(in_loop), max(in_loop, key=abs))),
                f"{100 * fmean(run.of_order for run in runs):.1f}",
            )
        table.add_section()
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"
