"""The results as tables and as plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from examples.bench.tables import (
    MISSING,
    in_order,
    make_figure,
    make_table,
    optional,
    ratio,
    save_figure,
)
from examples.scheduler_bench.plan import Order
from examples.scheduler_bench.results import (
    GOAL,
    POOL,
    HitRow,
    Kind,
    Play,
    Results,
    largest_rows,
    of_rival,
    rival_of,
)
from examples.scheduler_bench.stopwatch import Hook

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "ours": "tab:blue",
    "ours-128": "tab:purple",
    "ours-eager": "tab:pink",
    "ours-lazy": "tab:cyan",
    "ours-threshold": "tab:green",
    "builtin": "tab:orange",
    "builtin-lazy": "tab:red",
    "offloading": "tab:olive",
    "offloading-arc": "tab:brown",
    "none": "tab:gray",
    POOL: "silver",
}
_TITLES = {
    Kind.DECODE: "a step, by requests that decode",
    Kind.SERVING: "a step, by requests that are served",
    Kind.CONVERSATIONS: "the same, longer prompts and answers",
    Kind.STORED: "a prompt that is stored, by tokens",
    Kind.LOADED: "a prompt that is loaded, by tokens",
    Kind.STORED_FULL: "a prompt stored in a full tier, by its blocks",
    Kind.LOADED_FULL: "a prompt loaded from a full tier, by its blocks",
}
WIDTH = 160
"""Columns for the tables of all contenders. A narrower terminal wraps them; nothing is cut off."""

HOOKS = tuple(hook for hook in Hook if hook is not Hook.OTHER)


def cost_table(results: Results) -> Table:
    """One line for each kind and size: milliseconds, and ratios to rivals."""
    names = in_order((name for row in results.rows for name in row.cells), _COLORS)
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


def hit_table(results: Results) -> Table:
    """One line for each order and tier, in percent."""
    names = in_order((name for row in results.hit_rows for name in row.counts), _COLORS)
    table = make_table(
        *("turns", "tier", *(name.replace("-", "\n") for name in names)),
        caption="Tokens loaded from the host tier, of those that were computed before and had\n"
        "left the device. In brackets: from device or host, of all that were computed before.",
    )
    for one_offs in (False, True):
        for order in Order:
            for row in results.hit_rows:
                if row.order is order and row.one_offs is one_offs:
                    turns = f"{order.value}{', one-offs' if one_offs else ''}"
                    cells = (_hit_rates(row, name) for name in names)
                    table.add_row(turns, f"{row.host_part:.0%}", *cells)
            table.add_section()
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
                if figures := waits.figures():
                    ms = {key: f"{1e3 * value:,.0f}" for key, value in figures.items()}
                    table.add_row(
                        *(name, turns, f"{figures['requests']:,.0f}", ms["mean"]),
                        *(f"{ms['least_mean']} - {ms['greatest_mean']}", ms["p50"], ms["p99"]),
                        *(ms["worst"], f"{ms['least_worst']} - {ms['greatest_worst']}"),
                        *(ms["until_blocks"], ms["load"], ms["compute"]),
                        *(f"{figures[key]:,.0f}" for key in ("passed_most", "passed_sum")),
                        f"{outcome.seconds:,.1f}",
                    )
        table.add_section()
    return table


def _hit_rates(row: HitRow, name: str) -> str:
    count = row.counts.get(name)
    return MISSING if count is None else f"{count.rate:.1%} ({count.overall_rate:.0%})"


def save_cost_plot(path: Path, results: Results) -> None:
    """Write a PNG: a panel for each kind, a line for each contender."""
    kinds = list(largest_rows(results))
    lines = (len(kinds) + 1) // 2
    figure = make_figure(13, 4.2 * lines)
    panels = list(figure.subplots(lines, 2, squeeze=False).flat)
    for kind, axes in zip(kinds, panels, strict=False):
        _plot_kind(axes, results, kind)
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    figure.suptitle(f"Time in the connector's hooks, {results.machine.get('date', '')[:10]}")
    save_figure(path, figure)


def _plot_kind(axes: "Axes", results: Results, kind: Kind) -> None:
    rows = [row for row in results.rows if row.kind is kind]
    for name in in_order((name for row in rows for name in row.cells), _COLORS):
        points = [(row.size, row.cells[name].seconds * 1e3) for row in rows if name in row.cells]
        sizes, milliseconds = zip(*points, strict=True)
        axes.plot(sizes, milliseconds, marker="o", color=_COLORS.get(name), label=name)
        if name == "builtin":
            goal = [GOAL * each for each in milliseconds]
            axes.plot(sizes, goal, color="black", linestyle=":", label=f"{GOAL:.2f} of builtin")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes_here = sorted({row.size for row in rows})
    axes.set_xticks(sizes_here, [f"{size:,}" for size in sizes_here])
    axes.minorticks_off()
    axes.set(ylabel="ms", title=_TITLES[kind])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def save_hit_plot(path: Path, results: Results) -> None:
    """Write a PNG: hit rate by size of the tier, a panel for each order and mix."""
    panels = sorted({(row.one_offs, row.order.value) for row in results.hit_rows})
    figure = make_figure(5.2 * len(panels), 4.4)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (one_offs, order) in zip(grid, panels, strict=True):
        rows = [r for r in results.hit_rows if r.one_offs is one_offs and r.order.value == order]
        for name in in_order((name for row in rows for name in row.counts), _COLORS):
            points = [(r.host_part, r.counts[name].rate) for r in rows if name in r.counts]
            parts, rates = ([100 * each for each in values] for values in zip(*points, strict=True))
            axes.plot(parts, rates, marker="o", color=_COLORS.get(name), label=name)
        axes.set_xticks(sorted({row.host_part * 100 for row in rows}))
        title = f"{order}{', one-offs between' if one_offs else ''}"
        axes.set(xlabel="host tier, % of the working set", title=title, ylim=(0, 102))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    grid[0].set_ylabel("hit rate of the host tier, %")
    save_figure(path, figure)


def save_found_plot(path: Path, plays: Sequence[Play]) -> None:
    """Write a PNG: tokens found by contender, a panel for each play, with the bounds as lines."""
    figure = make_figure(4.2 * len(plays), 4.4)
    grid = figure.subplots(1, len(plays), squeeze=False, sharey=True)[0]
    for axes, play in zip(grid, plays, strict=True):
        names = in_order(play.outcomes, _COLORS)
        for place, name in enumerate(names):
            outcome = play.outcomes[name]
            device, host = (100 * outcome.share(each) for each in (outcome.device, outcome.host))
            axes.bar(place, device, color=_COLORS.get(name), alpha=0.5)
            axes.bar(place, host, bottom=device, color=_COLORS.get(name))
        first = next(iter(play.outcomes.values()))
        for tokens, line, label in (
            (first.lru_host, ":", "LRU of host"),
            (first.lru_both, "--", "LRU of device + host"),
            (first.optimal, "-", "best of device + host"),
        ):
            axes.axhline(
                100 * first.share(tokens), color="black", linestyle=line, linewidth=1, label=label
            )
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axes.set_title(play.name, fontsize="small")
        axes.legend(fontsize="x-small")
    grid[0].set_ylabel("prompt tokens found, % (pale: on the device)")
    save_figure(path, figure)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"
