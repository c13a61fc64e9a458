"""What ``simple-offload watch`` shows of a server: a page for a terminal, or plain lines."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simple_offload.cli.advice import advise
from simple_offload.cli.console import size_text
from simple_offload.cli.scrape import PREFIX, PROMPT_TOKENS, TTFT, Scrape

_STYLES = {"device": "green", "host": "cyan", "second_tier": "blue", "compute": "red"}
"""By source of prompt tokens."""
_NUM_REASONS = 9
"""A page has to fit a terminal; the others are the rarest."""
_NONE = "-"


@dataclass(frozen=True)
class View:
    """A server at one time."""

    url: str
    now: Scrape
    recent: Scrape | None = None
    """What was counted since the scrape before. None at first, and after the server's restart."""
    seconds: float = 0.0
    """How long that was."""
    hour: Scrape | None = None
    """What was counted in the last hour. None before an hour has passed."""
    problem: str = ""
    """Why the server does not answer any more; empty if it does."""


@dataclass(frozen=True)
class _Row:
    name: str
    cells: tuple[str, ...]
    share: float | None = None
    """The length of a bar."""
    style: str = ""


@dataclass(frozen=True)
class _Section:
    title: str
    columns: tuple[str, ...]
    rows: list[_Row]
    bar_width: int = 7


def page(view: View) -> RenderableType:
    """For a terminal of any width; 100 columns and 24 lines are best."""
    prompts, missed, curve, speeds = map(_table, _sections(view))
    tiers = Table.grid(padding=(0, 2))
    for name, text in _tiers(view):
        tiers.add_row(Text(name, style="bold"), text)
    return Group(
        Text(_headline(view), style="bold"),
        Text(
            view.problem or f"▶ {advise(view.now, view.hour)}",
            style="red" if view.problem else "yellow",
        ),
        tiers,
        "",
        Columns([Group(prompts, "", missed), Group(curve, "", speeds)], padding=(0, 2)),
    )


def lines(view: View) -> Iterator[str]:
    """For a pipe: a block of lines with the same content."""
    yield _headline(view)
    if view.problem:
        yield view.problem
        return
    yield f"advice: {advise(view.now, view.hour)}"
    for name, text in _tiers(view):
        yield f"{name.lower()}: {text}"
    for section in _sections(view):
        for row in section.rows:
            parts = zip(section.columns, row.cells, strict=True)
            cells = ", ".join(f"{column} {cell}" for column, cell in parts if cell)
            yield " ".join(f"{section.title.lower()} {row.name}: {cells}".split())


def _headline(view: View) -> str:
    models = ", ".join(sorted(view.now.by("model_name", PROMPT_TOKENS)))
    num_engines = len(view.now.by("engine", PROMPT_TOKENS))
    several = f", {num_engines} engines" if num_engines > 1 else ""
    return f"{time.strftime('%H:%M:%S')}  {models}{several}  {view.url}"


def _tiers(view: View) -> Iterator[tuple[str, str]]:
    now = view.now
    capacity, used, pinned = (
        now.total(f"{PREFIX}{name}_blocks") for name in ("capacity", "used", "pinned")
    )
    size = size_text(now.total(f"{PREFIX}host_memory_bytes"))
    blocks = f"{used:,.0f} of {capacity:,.0f} blocks, {pinned:,.0f} pinned"
    yield "Host memory", f"{size}, {_share(used, capacity)} full: {blocks}"
    name = f"{PREFIX}second_tier_bytes_total"
    read, written = (now.total(name, direction=each) for each in ("read", "write"))
    is_used = now.total(f"{PREFIX}second_tier_pays") > 0
    if is_used or read or written:
        speeds = (
            now.mean(f"{PREFIX}{each}_tokens_per_second") for each in ("second_tier", "compute")
        )
        yield (
            "Second tier",
            f"{'in use' if is_used else 'not in use'}: "
            "{:,.0f} tokens/s (compute {:,.0f}); ".format(*speeds)
            + f"{size_text(read)} read, {size_text(written)} written",
        )


def _sections(view: View) -> Iterator[_Section]:
    """Prompt tokens, those computed, the predicted curve, speeds."""
    scrapes = [view.now, *([view.recent] if view.recent else [])]
    columns = ("since start", f"last {view.seconds:.1f} s")[: len(scrapes)]
    prompts = [each.total(PROMPT_TOKENS) for each in scrapes]

    def tokens(name: str, label: str, value: str, style: str) -> _Row:
        counts = [each.total(name, **{label: value}) for each in scrapes]
        cells = (
            f"{_count(part)} {_share(part, of):>4}"
            for part, of in zip(counts, prompts, strict=True)
        )
        return _Row(value.replace("_", " "), tuple(cells), _ratio(counts[0], prompts[0]), style)

    sources = [tokens(PROMPT_TOKENS, "source", each, style) for each, style in _STYLES.items()]
    yield _Section("Prompt tokens", columns, sources)
    name = f"{PREFIX}missed_tokens_total"
    reasons = view.now.by("reason", name)
    most = sorted((each for each in reasons if reasons[each]), key=lambda each: -reasons[each])
    missed = [tokens(name, "reason", each, "red") for each in most[:_NUM_REASONS]]
    yield _Section("Computed because", columns, missed)
    yield _Section("Hits by host memory", ("",), list(_curve(view.now)), bar_width=20)
    yield _Section("Speed", columns, list(_speeds(scrapes, view.seconds)))


def _curve(now: Scrape) -> Iterator[_Row]:
    num_bytes = now.total(f"{PREFIX}host_memory_bytes")
    ratios = now.hit_ratios()
    for times, ratio in ratios.items():
        name = f"{size_text(times * num_bytes)}{' (now)' * (times == 1)}" if times else "none"
        yield _Row(name, (f"{ratio:.0%}",), ratio, "green" if times == 1 else "cyan")
    if not ratios:
        yield _Row("any size", ("more prompts are needed",))


def _speeds(scrapes: list[Scrape], seconds: float) -> Iterator[_Row]:
    """``seconds``: time of the second scrape, if there are two."""
    for direction in ("load", "store"):
        num_bytes = [each.total(f"{PREFIX}bytes_total", direction=direction) for each in scrapes]
        copying = [
            each.total(f"{PREFIX}transfer_seconds_sum", direction=direction) for each in scrapes
        ]
        yield _Row(f"{direction}s while copying", tuple(map(_bandwidth, num_bytes, copying)))
        if len(scrapes) > 1:
            average = _bandwidth(num_bytes[1], seconds)
            yield _Row(f"{direction}s on average", ("", average))
    sums = ([each.total(f"{TTFT}_{part}") for part in ("sum", "count")] for each in scrapes)
    means = (total / num if num else math.nan for total, num in sums)
    yield _Row("TTFT mean", tuple(map(_time, means)))
    yield _Row("TTFT p99", tuple(_time(each.quantile(TTFT, 0.99)) for each in scrapes))


def _table(section: _Section) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(section.title, no_wrap=True, min_width=16)
    for column in section.columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column()
    for row in section.rows:
        bar = (
            ""
            if row.share is None
            else Bar(1.0, 0.0, row.share, width=section.bar_width, color=row.style)
        )
        table.add_row(row.name, *row.cells, bar)
    return table


def _count(num: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M")):
        if num >= factor:
            return f"{num / factor:,.1f}{letter}"
    return f"{num:,.0f}"


def _ratio(part: float, of: float) -> float:
    return part / of if of else 0.0


def _share(part: float, of: float) -> str:
    return f"{part / of:.0%}" if of else _NONE


def _bandwidth(num_bytes: float, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.3g} GB/s" if seconds and num_bytes else _NONE


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return _NONE
    return f"{1e3 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
