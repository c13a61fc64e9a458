"""One run: every part, every contender."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product

from examples.bench.connectors import Contender
from examples.bench.race import Race
from examples.bench.traces import read_trace
from examples.scheduler_bench.agents import PROMPT_TOKENS, bytes_of_a_token, run_agents
from examples.scheduler_bench.chat import run_chat
from examples.scheduler_bench.costs import run_costs
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import CONTENDERS_OF
from examples.scheduler_bench.planned import plan_models
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import LEAST, Outcome, Play, Results
from examples.scheduler_bench.sizes import replay_sizes


def run(
    contenders: Sequence[Contender],
    parts: Collection[str],
    results: Results,
    on_step: Callable[[str], None],
) -> None:
    """Fill ``results`` as its plan says. ``on_step`` gets the name of every step before it begins;
    ``results`` then holds all measurements so far."""
    race = Race(contenders, results, on_step)
    race.run("start", lambda each: Engine(each, Shape(device_blocks=64, host_blocks=64)).close())
    if "cost" in parts:
        run_costs(race, results)
    if "chat" in parts:
        _run_chats(race, results)
    if {"traces", "sizes"} & set(parts):
        _run_traces(race, parts, results)
    if {"models", "bytes"} & set(parts):
        _run_models(race, parts, results)


def _play(
    race: Race[Contender],
    results: Results,
    name: str,
    once: Callable[..., Outcome],
    part: str,
) -> None:
    """Add the outcomes of all seeds."""
    played = Play(name)
    results.plays.append(played)
    for seed in range(results.plan.seeds):
        found = race.run(f"{name}, seed {seed}", partial(once, seed=seed), CONTENDERS_OF[part])
        for contender, outcome in found.items():
            played.runs.setdefault(contender, []).append(outcome)


def _run_chats(race: Race[Contender], results: Results) -> None:
    plan = results.plan
    for one_offs, factor in product((False, True), plan.chat.host_factors):
        name = f"host {factor:g} x device{', one-offs' if one_offs else ''}"
        once = partial(run_chat, plan=plan.chat, host_factor=factor, one_offs=one_offs)
        _play(race, results, name, once, "chat")


def _run_traces(race: Race[Contender], parts: Collection[str], results: Results) -> None:
    plan = results.plan
    for trace, memory in product(map(read_trace, plan.traces.files), plan.traces.memories):
        name = f"{trace.name}, {memory[0]:g}M / {memory[1]:g}M tokens"
        if "traces" in parts:
            once = partial(replay, trace=trace, plan=plan.traces, memory=memory)
            _play(race, results, name, once, "traces")
        if "sizes" in parts:
            runs = results.sizes[name] = []
            for seed in range(plan.seeds):
                sizes = partial(
                    replay_sizes, trace=trace, plan=plan.traces, memory=memory, seed=seed
                )
                step = f"sizes, {name}, seed {seed}"
                runs += race.run(step, sizes, CONTENDERS_OF["sizes"]).values()


def _run_models(race: Race[Contender], parts: Collection[str], results: Results) -> None:
    plan = results.plan
    race.begin("plans of models")
    for model, planned in zip(plan.models, plan_models(plan.models), strict=True):
        if "bytes" in parts:
            count = partial(bytes_of_a_token, planned=planned)
            step = f"bytes of {model.title}"
            found = race.run(step, count, CONTENDERS_OF["bytes"])
            found[LEAST] = planned.least_bytes(PROMPT_TOKENS)
            results.bytes[model.title] = found
        if "models" in parts:
            for gib in model.host_gib:
                name = f"{model.title} on {model.num_ranks}, {gib:g} GiB"
                once = partial(
                    run_agents, model=model, planned=planned, host_gib=gib, plan=plan.agents
                )
                _play(race, results, name, once, "models")
