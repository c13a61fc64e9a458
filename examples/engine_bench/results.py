"""The results of all runs: medians, the floor of a hit, problems, and the table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from examples.bench.tables import MISSING, Runs, cells_with_ratios, make_table, medians
from examples.engine_bench.plan import PRESETS, Part, Plan


@dataclass(frozen=True)
class Metric:
    """One number of one part."""

    part: Part
    key: str
    title: str
    unit: str = "ms"
    scale: float = 1e3
    """Factor to the unit: 1e3 from seconds to milliseconds."""


METRICS = (
    Metric("ttft", "cold", "TTFT, prompt never seen"),
    Metric("ttft", "host_hit", "TTFT, hit in the host tier"),
    Metric("ttft", "device_hit", "TTFT, hit on the device"),
    Metric("ttft", "at_once", "all evicted prompts at once", "s", 1),
    Metric("ttft", "stored_per_token", "stored by all ranks for a token", "bytes", 1),
    Metric("ttft", "tokens_in_64_gib", "tokens in 64 GiB of host memory", "millions", 1e-6),
    Metric("ttft", "store_rate", "stores, each rank", "GB/s", 1e-9),
    Metric("ttft", "load_rate", "loads, each rank", "GB/s", 1e-9),
    Metric("ttft", "start", "engine start", "s", 1),
    *(
        Metric("grown", f"ttft_{count}", f"TTFT, hit with {count} new tokens")
        for count in sorted({count for plan in PRESETS.values() for count in plan.new_tokens})
    ),
    Metric("grown", "ttft_beside", "TTFT of such hits while others decode"),
    Metric("grown", "gap_p99", "token gap of those, p99"),
    Metric("grown", "gap_max", "token gap of those, max"),
    Metric("idle", "tokens_per_second", "throughput without hits", "tokens/s", 1),
    Metric("mix", "ttft", "TTFT of hits while others decode"),
    Metric("mix", "gap_p50", "token gap of those, p50"),
    Metric("mix", "gap_p99", "token gap of those, p99"),
    Metric("mix", "gap_max", "token gap of those, max"),
    Metric("turns", "first_ttft", "chat: TTFT of first turns"),
    Metric("turns", "later_ttft", "chat: TTFT of later turns"),
    Metric("turns", "later_ttft_p99", "chat: the same, p99"),
    Metric("turns", "token_time", "chat: time a token"),
    Metric("turns", "requests_per_second", "chat: requests", "1/s", 1),
    Metric("traces", "tokens_per_second", "agents: prompts and answers", "tokens/s", 1),
    Metric("traces", "requests_per_second", "agents: requests", "1/s", 1),
    Metric("traces", "ttft_p50", "agents: TTFT of later requests, p50"),
    Metric("traces", "ttft_p99", "agents: the same, p99"),
    Metric("traces", "share_cached", "agents: prompt tokens not computed", "%", 100),
    Metric("restart", "hit", "restart: TTFT, hit in the files"),
    Metric("restart", "found", "restart: tokens of those not computed", "%", 100),
    *(
        Metric("restart", f"lookups_{result}", f"restart: lookups, {result}", "requests", 1)
        for result in ("hit", "miss", "late", "slower")
    ),
    Metric("restart", "fetch", "restart: fetches bring", "tokens/s", 1),
    Metric("restart", "compute", "restart: computing brings", "tokens/s", 1),
    Metric("restart", "first_ttft", "restart, chat: TTFT of first turns"),
    Metric("restart", "later_ttft", "restart, chat: TTFT of later turns"),
    Metric("restart", "requests_per_second", "restart, chat: requests", "1/s", 1),
)


def medians_by_contender(runs: Runs) -> dict[str, dict[str, float]]:
    """By contender and "part.key", the median over the runs that have the number."""
    return {
        contender: medians(
            [
                {
                    f"{part}.{key}": value
                    for part, numbers in run["numbers"].items()
                    for key, value in numbers.items()
                }
                for run in each
            ]
        )
        for contender, each in runs.items()
    }


def floor_seconds(
    by_contender: Mapping[str, Mapping[str, float]], plan: Plan, bytes_per_second: float | None
) -> float | None:
    """The least time of a hit in the host tier: a hit on the device (the fastest contender's), and
    its bytes in one contiguous copy, of which each rank copies its share. None without a measured
    copy or a hit on the device."""
    hits = [each["ttft.device_hit"] for each in by_contender.values() if "ttft.device_hit" in each]
    if bytes_per_second is None or not hits:
        return None
    return min(hits) + plan.hit_bytes / plan.tensor_parallel / bytes_per_second


def problems(runs: Runs, plan: Plan, parts: Iterable[Part], num_runs: int) -> list[str]:
    """The reasons why the numbers prove nothing, one line each. ``num_runs``: the number of runs
    that each contender should have."""
    found = []
    for contender, each in runs.items():
        if len(each) != num_runs:
            found.append(f"{contender}: {len(each)} of {num_runs} runs")
        for number, one in enumerate(each, start=1):
            found += [f"{contender}, run {number}: lost a request: {lost}" for lost in one["lost"]]
            hits_expected = contender != "none" and set(parts) != {"idle"}
            if hits_expected and one["external_hits"] == 0:
                found.append(f"{contender}, run {number}: the connector got no hits")
            restart = one["numbers"].get("restart")
            # With "auto", ours rightly reads nothing where computing is quicker.
            if restart and restart["found"] == 0 and contender != "ours-files":
                found.append(f"{contender}, run {number}: nothing was found in the files")
    return found + _different_answers(runs, plan)


def _different_answers(runs: Runs, plan: Plan) -> list[str]:
    """A line for each contender about the first prompt that got different answers."""
    answers: dict[tuple[Any, ...], tuple[str, list[int]]] = {}
    found: dict[str, str] = {}
    for contender, rounds in runs.items():
        for number, one in enumerate(rounds, start=1):
            who = f"{contender} in run {number}"
            for reply in one["replies"]:
                shape = () if plan.compare_shapes else (reply["cached"],)
                first, tokens = answers.setdefault(
                    (one.get("repeat", 0), reply["id"], *shape), (who, reply["tokens"])
                )
                if tokens != reply["tokens"]:
                    found.setdefault(
                        contender,
                        f"{who} answered {reply['id']!r} ({reply['cached']} cached tokens) with "
                        f"{reply['tokens']}, {first} with {tokens}",
                    )
    return list(found.values())


def bench_table(
    by_contender: Mapping[str, Mapping[str, float]], floor: float | None, title: str
) -> Table:
    """Medians, each with its ratio to the first contender's. ``floor`` in seconds."""
    table = make_table("", *by_contender, title=title)
    for metric in METRICS:
        values = [each.get(f"{metric.part}.{metric.key}") for each in by_contender.values()]
        if any(value is not None for value in values):
            table.add_row(
                f"{metric.title}, {metric.unit}", *cells_with_ratios(values, metric.scale)
            )
        if metric.key == "host_hit" and floor is not None:
            over = [MISSING if value is None else f"{value / floor:.2f}x" for value in values]
            table.add_row(f"  the same over its floor of {floor * 1e3:.1f} ms", *over)
    return table
