"""One run: every part, every contender."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import product

from examples.bench.race import Race
from examples.bench.traces import read_trace
from examples.scheduler_bench.agents import run_agents
from examples.scheduler_bench.chat import run_chat
from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.costs import run_costs
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.footprint import run_footprints
from examples.scheduler_bench.plan import Order, Part
from examples.scheduler_bench.planned import plan_models
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import LEAST, Outcome, Play, Results, Sizes
from examples.scheduler_bench.sizes import replay_sizes
from examples.scheduler_bench.token_bytes import bytes_of_a_token
from examples.scheduler_bench.turns import run_turns


def run(
    contenders: Sequence[Contender],
    parts: Collection[Part],
    results: Results,
    on_step: Callable[[str], None],
) -> None:
    """Fill ``results`` as its plan says. ``on_step`` gets the name of every step before it begins,
    and "done" at the end; ``results`` then holds all measurements so far."""
    race = Race(contenders, on_step)
    results.left_out, results.failures = race.left_out, race.failures
    race.run("start", lambda each: Engine(each, Shape(device_blocks=64, host_blocks=64)).close())
    if Part.COST in parts:
        run_costs(race, results)
    if Part.FOOTPRINT in parts:
        run_footprints(race, results)
    _run_plays(race, parts, results)
    if Part.SIZES in parts:
        _run_sizes(race, results)
    if {Part.MODELS, Part.BYTES} & set(parts):
        _run_models(race, parts, results)
    race.begin("done")


def _play(
    race: Race[Contender],
    plays: list[Play],
    name: str,
    once: Callable[..., Outcome],
    part: Part,
    seeds: Iterable[int],
    *,
    one_offs: bool = True,
) -> Play:
    """Add the outcomes of all seeds to ``plays``."""

    def takes_part(contender: Contender) -> bool:
        return part in contender.parts and (one_offs or not contender.for_one_offs)

    played = Play(name)
    plays.append(played)
    for seed in seeds:
        found = race.run(f"{name}, seed {seed}", partial(once, seed=seed), takes_part)
        for contender, outcome in found.items():
            played.add(contender, outcome)
    return played


def _run_models(race: Race[Contender], parts: Collection[Part], results: Results) -> None:
    plan = results.plan
    race.begin("plans of models")
    planned = list(zip(plan.models, plan_models(plan.models), strict=True))
    if Part.BYTES in parts:
        for model, its in planned:
            count = partial(bytes_of_a_token, planned=its, plan=plan.bytes)
            step = f"bytes of {model.title}"
            found = race.run(step, count, lambda each: Part.BYTES in each.parts)
            results.bytes[model.title] = {**found, LEAST: its.least_bytes(plan.bytes.prompt_tokens)}
    if Part.MODELS in parts:
        seeds = range(plan.seed, plan.seed + plan.agents.seeds)
        for model, its in planned:
            for gib in model.host_gib:
                name = f"{model.title} on {model.num_ranks}, {gib:g} GiB"
                once = partial(run_agents, model=model, planned=its, host_gib=gib, plan=plan.agents)
                _play(race, results.models, name, once, Part.MODELS, seeds)


def _run_plays(race: Race[Contender], parts: Collection[Part], results: Results) -> None:
    plan = results.plan
    play = partial(_play, race, seeds=range(plan.seed, plan.seed + plan.seeds))

    if Part.HITS in parts:
        for one_offs, order, share in product((False, True), Order, plan.hits.host_parts):
            name = f"{order.value}{', one-offs' if one_offs else ''}, tier {share:.0%}"
            once = partial(
                run_turns, plan=plan.hits, order=order, one_offs=one_offs, host_part=share
            )
            played = play(results.hits, name, once, Part.HITS, one_offs=one_offs)
            for contender, outcome in played.outcomes.items():
                possible = outcome.known - outcome.known_on_device
                if share >= 1 and possible and not outcome.known_in_host:
                    results.problems[f"{contender}, {name}"] = (
                        f"of {possible} tokens that a tier of this size holds, none hit"
                    )
    if Part.CHAT in parts:
        for one_offs, factor in product((False, True), plan.chat.host_factors):
            name = f"host {factor:g} x device{', one-offs' if one_offs else ''}"
            once = partial(run_chat, plan=plan.chat, host_factor=factor, one_offs=one_offs)
            play(results.chats, name, once, Part.CHAT)
    if Part.TRACES in parts:
        for trace, memory in product(map(read_trace, plan.traces.files), plan.traces.memories):
            name = f"{trace.name}, {memory[0]:g}M / {memory[1]:g}M tokens"
            once = partial(replay, trace=trace, plan=plan.traces, memory=memory)
            play(results.traces, name, once, Part.TRACES)


def _run_sizes(race: Race[Contender], results: Results) -> None:
    plan = results.plan
    for trace, memory in product(map(read_trace, plan.traces.files), plan.traces.memories):
        name = f"{trace.name}, {memory[0]:g}M / {memory[1]:g}M tokens"
        by_contender: dict[str, Sizes] = {}
        for seed in range(plan.seed, plan.seed + plan.seeds):
            step = f"sizes, {name}, seed {seed}"
            once = partial(replay_sizes, trace=trace, plan=plan.traces, memory=memory, seed=seed)
            for contender, run in race.run(
                step, once, lambda each: Part.SIZES in each.parts
            ).items():
                if contender not in by_contender:
                    by_contender[contender] = Sizes(f"{contender}, {name}")
                    results.sizes.append(by_contender[contender])
                by_contender[contender].runs.append(run)
