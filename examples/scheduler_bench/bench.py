"""One run: every part, every contender."""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from examples.bench.race import Race
from examples.bench.traces import read_trace
from examples.scheduler_bench.chat import run_chat
from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.costs import run_costs
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.footprint import run_footprints
from examples.scheduler_bench.plan import Order, Part
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import HitCount, HitRow, Outcome, Play, Results
from examples.scheduler_bench.turns import Workload, run_turns


def run(
    contenders: Sequence[Contender],
    parts: Collection[Part],
    results: Results,
    on_step: Callable[[str], None],
) -> None:
    """Fill ``results`` as its plan says. ``on_step`` gets the name of every step before it begins,
    and "done" at the end; ``results`` then holds all measurements so far."""
    start = time.monotonic()

    def begin(name: str) -> None:
        results.seconds = time.monotonic() - start
        on_step(name)

    race = Race(contenders)
    results.left_out, results.failures = race.left_out, race.failures
    begin("start")
    race.run("start", lambda each: Engine(each, Shape(device_blocks=64, host_blocks=64)).close())
    if Part.COST in parts:
        run_costs(race, results, begin)
    if Part.FOOTPRINT in parts:
        begin(f"a tier of {results.plan.footprint.tier_blocks} blocks")
        run_footprints(race, results)
    if Part.HITS in parts:
        run_hits(race, results, begin)
    if Part.CHAT in parts:
        run_chats(race, results, begin)
    if Part.TRACES in parts:
        run_traces(race, results, begin)
    begin("done")


def run_hits(race: Race[Contender], results: Results, begin: Callable[[str], None]) -> None:
    """Add hit rates to ``results``."""
    plan = results.plan.hits
    for one_offs in (False, True):
        for order in Order:
            for part in plan.host_parts:
                row = HitRow(order, one_offs, part)
                begin(f"hit rate, {row.name}")
                _count_hits(race, results, row)
                results.hit_rows.append(row)
                for name, count in row.counts.items():
                    if part >= 1 and count.possible and not count.host:
                        results.problems[f"{name}, {row.name}"] = (
                            f"of {count.possible} tokens that a tier of this size holds, none hit"
                        )


def _count_hits(race: Race[Contender], results: Results, row: HitRow) -> None:
    plan, delay = results.plan, results.plan.delay
    for seed in range(plan.seed, plan.seed + plan.hits.seeds):
        load = Workload(plan.hits, row.order, row.one_offs, seed)
        runs = race.run(
            row.name,
            partial(run_turns, load=load, host_part=row.host_part, delay=delay),
            lambda each: not each.for_traces and (row.one_offs or not each.for_one_offs),
        )
        for name, (count, outcome) in runs.items():
            row.counts[name] = row.counts.get(name, HitCount(0, 0, 0)) + count
            row.play.add(name, outcome)


def run_chats(race: Race[Contender], results: Results, begin: Callable[[str], None]) -> None:
    """Add chats to ``results``."""
    plan = results.plan
    for one_offs in (False, True):
        for factor in plan.chat.host_factors:
            _play(
                race,
                results.chats,
                f"host {factor:g} x device{', one-offs' if one_offs else ''}",
                range(plan.seed, plan.seed + plan.chat.seeds),
                partial(run_chat, plan=plan.chat, host_factor=factor, one_offs=one_offs),
                begin,
            )


def run_traces(race: Race[Contender], results: Results, begin: Callable[[str], None]) -> None:
    """Add replays of traces to ``results``."""
    plan = results.plan
    for trace in map(read_trace, plan.traces.files):
        for memory in plan.traces.memories:
            _play(
                race,
                results.traces,
                f"{trace.name}, {memory[0]:g}M / {memory[1]:g}M tokens",
                range(plan.seed, plan.seed + plan.traces.seeds),
                partial(replay, trace=trace, plan=plan.traces, memory=memory),
                begin,
            )


def _play(
    race: Race[Contender],
    plays: list[Play],
    name: str,
    seeds: range,
    run: Callable[..., Outcome],
    begin: Callable[[str], None],
) -> None:
    """Add a play with all ``seeds`` to ``plays``."""
    play = Play(name)
    plays.append(play)
    for seed in seeds:
        step = f"{name}, seed {seed}"
        begin(step)
        outcomes = race.run(
            step,
            partial(run, seed=seed),
            lambda each: not each.for_one_offs and each.num_sub_blocks == 1,
        )
        for contender, outcome in outcomes.items():
            play.add(contender, outcome)
