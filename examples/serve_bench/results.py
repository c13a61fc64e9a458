"""The results of all measurements: numbers, medians, problems, tables and the plot."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from examples.bench.connectors import Contender
from examples.bench.tables import Row, cells_with_ratios, make_table, medians, spread
from examples.serve_bench.client import SOURCES, Reply
from examples.serve_bench.plan import Plan
from examples.serve_bench.workloads import DEVICE_HIT, FIRST_TURN, HOST_HIT, LATER_TURNS, plays

MOST_DIFFERENT = 0.05
"""Share of the answers of turns that may be others than the first contender's; none elsewhere.
Chance decides which requests of conversations share a step, and with it the rounding of sums."""
CROWDED = 1.5
"""With a working set of more than this times the device's KV, a connector must have hits."""

ROWS = (
    ("requests", "requests", 1),
    ("at_once_seconds", "all evicted prompts at once, s", 1),
    ("tpot_mean", "TPOT, mean, ms", 1e3),
    ("tpot_p99", "TPOT, p99, ms", 1e3),
    ("gap_p50", "token gap of decodes beside, p50, ms", 1e3),
    ("gap_p99", "token gap of decodes beside, p99, ms", 1e3),
    ("gap_worst", "token gap of decodes beside, worst, ms", 1e3),
    ("requests_per_second", "requests/s", 1),
    ("answer_tokens_per_second", "answer tokens/s", 1),
    ("tokens_per_second", "all tokens/s", 1),
    ("prompt_tokens", "prompt tokens", 1),
    ("device_hit_share", "... from the device, %", 1e2),
    ("external_hit_share", "... from the connector, %", 1e2),
    ("computed_share", "... computed, %", 1e2),
    ("endless_share", "... computed by an endless cache, %", 1e2),
    ("loaded_bytes", "loaded, GB", 1e-9),
    ("stored_bytes", "stored, GB", 1e-9),
    ("load_rate", "loads of a rank, GB/s", 1e-9),
    ("store_rate", "stores of a rank, GB/s", 1e-9),
    ("lookups_hit", "lookups in files, hit", 1),
    ("lookups_miss", "lookups in files, miss", 1),
    ("lookups_late", "lookups in files, late", 1),
    ("lookups_slower", "lookups in files, slower", 1),
    ("device_multiple", "working set, times the device's KV", 1),
    ("host_multiple", "working set, times the host tier", 1),
    ("preemptions", "preemptions", 1),
    ("client_busy", "the client's processor time, %", 1e2),
)
"""A number's name, its heading with the unit, and the factor to that unit."""
COUNTS = frozenset({"requests", "prompt_tokens", "preemptions"})
"""Whole numbers, shown without ratios."""
STATISTICS = ("mean", "p50", "p90", "p99", "worst")
PLOT = "ttft.png"

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By contender, its runs in their order."""
Times = Mapping[str, Mapping[str, float]]
"""By kind of request, the statistics of its TTFT in seconds."""


@dataclass(frozen=True)
class Summary:
    """One workload of one contender: medians over its measurements."""

    ttft: Times
    numbers: Mapping[str, float]


Summaries = Mapping[str, Mapping[str, Summary]]
"""By contender and workload."""


# Of one measurement


def ttft_of(replies: Sequence[Reply]) -> Times:
    """TTFT by kind of request; for turns also of all, and of all later ones."""
    found: dict[str, list[float]] = {}
    if any(reply.kind == FIRST_TURN for reply in replies):
        found["all"] = [reply.ttft for reply in replies]
        found[LATER_TURNS] = [reply.ttft for reply in replies if reply.kind != FIRST_TURN]
    for kind in dict.fromkeys(reply.kind for reply in replies):
        found[kind] = [reply.ttft for reply in replies if reply.kind == kind]
    return {kind: spread(values, 50, 90, 99) for kind, values in found.items() if values}


def numbers_of(
    replies: Sequence[Reply], found: Mapping[str, float], counted: Mapping[str, float], plan: Plan
) -> dict[str, float]:
    """``found`` by the workload, ``counted`` by the engine, and what follows from them.

    With ``seconds`` there is a throughput of what came in that time: a prompt with its first
    token, and tokens of an answer as if they had come at equal distances. Where a connector does
    not report its loads, they are computed from its hits.
    """
    numbers: dict[str, float] = {"requests": len(replies), **found, **counted}
    if tpot := [reply.tpot for reply in replies if reply.tpot is not None]:
        numbers |= {f"tpot_{name}": value for name, value in spread(tpot, 99).items()}
    if "seconds" in found:
        numbers |= _throughput(replies, found["seconds"])
    by_source = {name: counted.get(name, 0.0) for name in SOURCES.values()}
    if all_tokens := sum(by_source.values()):
        numbers["prompt_tokens"] = all_tokens
        for name, value in by_source.items():
            numbers[name.replace("_tokens", "_share")] = value / all_tokens
    if plan.rank_bytes_per_token is not None and by_source["external_hit_tokens"]:
        of_all_ranks = plan.rank_bytes_per_token * plan.tensor_parallel
        numbers.setdefault("loaded_bytes", by_source["external_hit_tokens"] * of_all_ranks)
    for way, done in (("load", "loaded"), ("store", "stored")):
        if counted.get(f"{done}_bytes") and counted.get(f"{done}_seconds"):
            numbers[f"{way}_rate"] = counted[f"{done}_bytes"] / counted[f"{done}_seconds"]
    return numbers


def _throughput(replies: Iterable[Reply], seconds: float) -> dict[str, float]:
    num_requests = num_prompt = 0
    num_answer = 0.0
    for reply in replies:
        first, took = reply.at + reply.ttft, reply.latency - reply.ttft
        if first <= seconds:
            share = min(1.0, (seconds - first) / took) if took else 1.0
            num_requests += 1
            num_prompt += reply.prompt_tokens
            num_answer += 1 + share * (reply.answer_tokens - 1)
    return {
        "requests_per_second": num_requests / seconds,
        "answer_tokens_per_second": num_answer / seconds,
        "tokens_per_second": (num_prompt + num_answer) / seconds,
    }


# Of all measurements


def summaries(runs: Runs) -> dict[str, dict[str, Summary]]:
    """Of those measurements that have replies."""
    found: dict[str, dict[str, Summary]] = {}
    for contender, run in runs.items():
        answered = [each for each in run if each["replies"]]
        for name in dict.fromkeys(each["workload"] for each in answered):
            same = [each for each in answered if each["workload"] == name]
            kinds = dict.fromkeys(kind for each in same for kind in each["ttft"])
            ttft = {
                kind: medians([each["ttft"][kind] for each in same if kind in each["ttft"]])
                for kind in kinds
            }
            numbers = medians([each["numbers"] for each in same])
            found.setdefault(contender, {})[name] = Summary(ttft, numbers)
    return found


def problems(runs: Runs, plan: Plan, contenders: Sequence[Contender]) -> list[str]:
    """The reasons why the numbers prove nothing, one line each."""
    found: list[str] = []
    for contender in contenders:
        run = runs[contender.name]
        again = contender.has_files and "restart" in plan.workloads
        for name in plays(plan) | (plays(plan, again=True) if again else {}):
            done = sum(each["workload"] == name for each in run)
            if done != (wanted := plan.rounds * plan.repeats):
                found.append(f"{contender.name}, {name}: {done} of {wanted} measurements")
        for each in run:
            who = f"{contender.name}, {each['workload']}, {_which(each)}"
            found += [f"{who}: {problem}" for problem in _problems_of(each, plan, contender)]
    return found + list(_different_answers(runs, plan))


def _which(each: Mapping[str, Any]) -> str:
    return f"round {each['round']}, repeat {each['repeat'] + 1}"


def _problems_of(each: Mapping[str, Any], plan: Plan, contender: Contender) -> Iterator[str]:
    yield from (f"lost a request: {lost}" for lost in each["lost"])
    numbers, workload = each["numbers"], each["workload"]
    if not each["lost"] and not numbers["requests"]:
        yield "nothing was asked after the agents' first requests"
    if dry := numbers.get("dry_agents"):
        yield f"{dry} agents had no request left before the time was over"
    if (busy := numbers.get("client_busy", 0)) > plan.most_client_busy:
        yield f"the client computed for {busy:.0%} of the time, and measured itself"
    hits = numbers.get("external_hit_tokens", 0)
    if contender.name == "none" and hits:
        yield "hits of a connector, and there is none"
    # With "auto", ours rightly reads no files where computing is quicker.
    slow_files = (workload, contender.name) == ("restart", "ours-files")
    needless = workload in ("idle", "stores") or slow_files
    crowded = numbers.get("device_multiple", CROWDED + 1) > CROWDED
    if contender.connector and not (hits or needless or plan.fits) and crowded:
        yield "the connector got no hits"


def _different_answers(runs: Runs, plan: Plan) -> Iterator[str]:
    """A line for each measurement with too many answers other than those of the first."""
    answers: dict[tuple[Any, ...], tuple[str, str]] = {}
    for contender, run in runs.items():
        for each in run:
            who = f"{contender}, {each['workload']}, {_which(each)}"
            compared = [reply for reply in each["replies"] if reply["compared"]]
            different = []
            for reply in compared:
                shape = () if plan.exact else (reply["cached_tokens"],)
                key = (each["repeat"], reply["id"], *shape)
                first, answer = answers.setdefault(key, (who, reply["answer"]))
                if answer != reply["answer"]:
                    different.append(
                        f"{reply['id']} ({reply['cached_tokens']} cached tokens) got "
                        f"{reply['answer']!r}, in {first} {answer!r}"
                    )
            by_chance = each["workload"].startswith("turns") and plan.clients > 1
            most = MOST_DIFFERENT * len(compared) if by_chance else 0
            if len(different) > most:
                yield f"{who}: {len(different)} of {len(compared)} answers differ: {different[0]}"


def floor_line(by_contender: Summaries, plan: Plan, bytes_per_second: float | None) -> str | None:
    """The least time of a hit in the host tier, and each contender's beside it. The least is a hit
    on the device (the fastest contender's), and a rank's bytes in one contiguous copy. None without
    such a copy or such hits."""
    hits = {
        name: by_workload["ttft"].ttft
        for name, by_workload in by_contender.items()
        if "ttft" in by_workload and {HOST_HIT, DEVICE_HIT} <= by_workload["ttft"].ttft.keys()
    }
    if bytes_per_second is None or plan.rank_bytes_per_token is None or not hits:
        return None
    num_bytes = plan.prompt_tokens * plan.rank_bytes_per_token
    floor = min(each[DEVICE_HIT]["p50"] for each in hits.values()) + num_bytes / bytes_per_second
    over = [f"{name} {each[HOST_HIT]['p50'] / floor:.2f}x" for name, each in hits.items()]
    return (
        f"Least time of a hit in the host tier: {floor * 1e3:.1f} ms, with a copy at "
        f"{bytes_per_second / 1e9:.1f} GB/s. {', '.join(over)}"
    )


def start_line(runs: Runs) -> str:
    """Seconds from an engine's start until it answers, medians."""
    starts = {
        name: median(each["start_seconds"] for each in run) for name, run in runs.items() if run
    }
    return f"Start, s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in starts.items())}"


# Tables and the plot


def workload_tables(by_contender: Summaries, name: str, title: str, base: str) -> Iterator[Table]:
    """TTFT by kind of request, and the other numbers, of one workload. Ratios are those to the
    contender ``base``; there are none if it has lost a request before."""
    each = {who: found[name] for who, found in by_contender.items() if name in found}
    times: list[Row] = []
    for kind in dict.fromkeys(kind for summary in each.values() for kind in summary.ttft):
        of_kind = {who: found.ttft[kind] for who, found in each.items() if kind in found.ttft}
        columns = {
            statistic: cells_with_ratios(
                {who: of_kind.get(who, {}).get(statistic) for who in (base, *of_kind)}, 1e3
            )
            for statistic in STATISTICS
        }
        for who in of_kind:
            head = {"": kind if who == next(iter(of_kind)) else "", " ": who}
            times.append(head | {statistic: cells[who] for statistic, cells in columns.items()})
    yield make_table(times, left=2, title=f"{name}: TTFT, ms. {title}")
    others: list[Row] = []
    for number, heading, scale in ROWS:
        values = {
            who: each[who].numbers.get(number) if who in each else None for who in (base, *each)
        }
        if any(values.values()):
            cells = cells_with_ratios(values, scale)
            if number in COUNTS:
                cells = dict.fromkeys(values) | {
                    who: f"{value:,.0f}" for who, value in values.items() if value is not None
                }
            others.append({"": heading, **cells})
    yield make_table(others, title=name)


def save_plot(folder: Path, by_contender: Summaries) -> Path:
    """TTFT by kind of request, a picture for each workload, as PNG. Raises ImportError without
    matplotlib."""
    from matplotlib.figure import Figure  # takes a second

    names = list(dict.fromkeys(name for found in by_contender.values() for name in found))
    figure = Figure(figsize=(8, 4 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        for number, (contender, found) in enumerate(by_contender.items()):
            ttft = found[name].ttft if name in found else {}
            for statistic, style in (("mean", "o-"), ("p99", "o:")):
                values = [times[statistic] * 1e3 for times in ttft.values()]
                label = f"{contender}, {statistic}"
                axes.plot(list(ttft), values, style, color=f"C{number}", label=label)
        axes.set(title=name, ylabel="TTFT, ms", ylim=(0, None))
        axes.legend(fontsize="small")
    figure.savefig(folder / PLOT, dpi=120)
    return folder / PLOT
