"""The results of all measurements: numbers by contender and agents, problems, tables and plots."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table

from examples.agent_bench.plan import Plan
from examples.agent_bench.play import Played
from examples.bench.agents import working_set
from examples.bench.connectors import COLORS
from examples.bench.counters import SOURCES, with_loaded_bytes
from examples.bench.replies import latencies
from examples.bench.tables import Runs, make_figure, numbers_table, save_figure

MOST_CLIENT_BUSY = 0.8
"""A client that computes for a larger share of the time measures itself."""
CROWDED = 1.5
"""With a working set of more than this times the device's KV, a connector must have hits."""

ROWS = (
    ("requests", "requests", 1),
    ("ttft_p50", "TTFT, p50, ms", 1e3),
    ("ttft_p90", "TTFT, p90, ms", 1e3),
    ("ttft_p99", "TTFT, p99, ms", 1e3),
    ("tpot_mean", "TPOT, mean, ms", 1e3),
    ("tpot_p99", "TPOT, p99, ms", 1e3),
    ("requests_per_second", "requests/s", 1),
    ("answer_tokens_per_second", "answer tokens/s", 1),
    ("tokens_per_second", "all tokens/s", 1),
    ("device_hit_share", "prompt tokens from the device, %", 1e2),
    ("external_hit_share", "prompt tokens from the connector, %", 1e2),
    ("computed_share", "prompt tokens computed, %", 1e2),
    ("endless_share", "... by an endless cache, %", 1e2),
    ("loaded_bytes", "loaded, GB", 1e-9),
    ("stored_bytes", "stored, GB", 1e-9),
    ("device_multiple", "working set, times the device's KV", 1),
    ("host_multiple", "working set, times the host tier", 1),
    ("client_busy", "the client's processor time, %", 1e2),
)
"""A number's name, its title with the unit, and the factor to that unit."""
PLOT = "agents.png"

ByAgents = Mapping[int, Mapping[str, float]]
"""Numbers, by the number of agents."""


def numbers(played: Played, counted: Mapping[str, float], plan: Plan) -> dict[str, float]:
    """Of one measurement. ``counted`` by the server meanwhile; empty if it does not tell.

    TTFT and TPOT are those of all requests that were sent in its time. Throughput counts what
    came in its time: a prompt with its first token, and tokens of an answer as if they had come at
    equal distances.
    """
    found: dict[str, float] = {
        "requests": len(played.answered),
        "client_busy": played.client_busy,
        **with_loaded_bytes(counted, plan.kv_bytes_per_token),
    }
    if played.answered:
        found |= latencies([each.reply for each in played.answered])
    num_requests = num_prompt = 0
    num_answer = 0.0
    for each in played.answered:
        reply, first = each.reply, each.at + each.reply.ttft
        if first > played.seconds:
            continue
        num_requests += 1
        num_prompt += reply.prompt_tokens
        num_answer += 1
        if reply.answer_tokens > 1:
            took = reply.latency - reply.ttft
            share = min(1.0, (played.seconds - first) / took) if took else 1.0
            num_answer += share * (reply.answer_tokens - 1)
    found["requests_per_second"] = num_requests / played.seconds
    found["answer_tokens_per_second"] = num_answer / played.seconds
    found["tokens_per_second"] = (num_prompt + num_answer) / played.seconds
    by_source = {name: counted[name] for name in SOURCES.values() if name in counted}
    if all_tokens := sum(by_source.values()):
        for name, value in by_source.items():
            found[name.replace("_tokens", "_share")] = value / all_tokens
    per_token = plan.kv_bytes_per_token
    room = plan.device_tokens, plan.host_bytes / (per_token or 1)
    before = working_set(played.first, *room)
    needed = working_set([*played.first, *(each.request for each in played.answered)], *room)
    if prompt_tokens := needed.prompt_tokens - before.prompt_tokens:
        found["endless_share"] = (needed.new_tokens - before.new_tokens) / prompt_tokens
    found["working_set_tokens"] = needed.new_tokens
    found["device_multiple"] = needed.device_multiple
    if per_token is not None:
        found["host_multiple"] = needed.host_multiple
    return found


def summaries(runs: Runs) -> dict[str, dict[int, dict[str, float]]]:
    """By contender and number of agents."""
    return {
        contender: {each["agents"]: each["numbers"] for each in measured}
        for contender, measured in runs.items()
        if measured
    }


def problems(runs: Runs, plan: Plan, connected: Iterable[str]) -> list[str]:
    """The reasons why the numbers prove nothing, one line each. ``connected``: the contenders with
    a connector; the one called none has none."""
    found = []
    for contender, measured in runs.items():
        if len(measured) != len(plan.agents):
            found.append(f"{contender}: {len(measured)} of {len(plan.agents)} measurements")
        for each in measured:
            who, values = f"{contender}, {each['agents']} agents", each["numbers"]
            found += [f"{who}: lost a request: {lost}" for lost in each["lost"]]
            if not values["requests"]:
                found.append(f"{who}: nothing was asked after the agents' first requests")
            elif (busy := values["client_busy"]) > MOST_CLIENT_BUSY:
                found.append(
                    f"{who}: the client computed for {busy:.0%} of the time, and measured itself"
                )
            if contender == "none" and values.get("external_hit_tokens"):
                found.append(f"{who}: hits of a connector, and there is none")
        crowded = [
            each["numbers"] for each in measured if each["numbers"]["device_multiple"] > CROWDED
        ]
        hits = sum(each.get("external_hit_tokens", 0) for each in crowded)
        if contender in connected and crowded and not hits:
            found.append(f"{contender}: the connector got no hits")
    return found


def point_table(by_contender: Mapping[str, ByAgents], agents: int, title: str) -> Table:
    """One line a number, one column a contender."""
    found = {name: each[agents] for name, each in by_contender.items() if agents in each}
    shown = {name for each in found.values() for name in each}
    rows = [row for row in ROWS if row[0] in shown]
    return numbers_table(found, rows, {"requests"}, title)


def save_plot(directory: Path, by_contender: Mapping[str, ByAgents], title: str) -> Path:
    """Throughput and TTFT over the number of agents, as PNG. Raises ImportError without
    matplotlib."""
    figure = make_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for contender, by_agents in by_contender.items():
        agents, color = sorted(by_agents), COLORS.get(contender)
        for axes, name, style in (
            (left, "tokens_per_second", "o-"),
            (right, "ttft_p50", "o-"),
            (right, "ttft_p99", "o:"),
        ):
            points = [(each, by_agents[each][name]) for each in agents if name in by_agents[each]]
            label = contender if axes is left else f"{contender}, {name.removeprefix('ttft_')}"
            scale = 1e3 if axes is right else 1
            axes.plot(
                [each for each, _ in points],
                [value * scale for _, value in points],
                style,
                color=color,
                label=label,
            )
    left.set(title=title, xlabel="agents", ylabel="all tokens/s", ylim=(0, None))
    right.set(title=title, xlabel="agents", ylabel="TTFT, ms", yscale="log")
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
        axes.legend(fontsize="small")
    save_figure(directory / PLOT, figure)
    return directory / PLOT
