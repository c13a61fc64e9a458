"""Scripts pass, whatever faults they have."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from simple_offload import metrics
from tests.conftest import daily
from tests.simulation.groups import MODELS, PLAIN
from tests.simulation.mutations.situations import (
    BAD_OBJECTS,
    EVICTIONS,
    MIXED_RANKS,
    OBJECTS,
    OVERLOAD,
    SAME_PROMPTS,
    TOKENS_ALONE,
    USUAL_ENDS,
)
from tests.simulation.runner import Violation
from tests.simulation.script import (
    DRAWN_ENGINES,
    DRAWN_MODELS,
    ONE_CHAIN_MODELS,
    OPTIONS,
    Faults,
    Play,
    Script,
    play,
)
from tests.simulation.second_tier import ScriptedDisk
from tests.simulation.shape import Shape
from tests.simulation.world import World

_NUM_SEEDS = 20
_PER_TEST = 10

_SCRIPTS = [Script.draw(seed) for seed in range(300)]


def played(scripts: Iterable[Script]) -> list[World]:
    """The worlds of these scripts, after their ends."""
    worlds = []
    for script in scripts:
        play = Play(script)
        play.run()
        worlds.append(play.world)
    return worlds


@pytest.mark.parametrize("first", range(0, _NUM_SEEDS, _PER_TEST))
def test_seeds(first: int) -> None:
    outcomes = [play(seed) for seed in range(first, first + _PER_TEST)]
    assert sum(outcome.num_finished for outcome in outcomes) > 0
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0


@pytest.mark.parametrize("name", daily(MODELS, 3))
def test_models(name: str) -> None:
    model = MODELS[name]
    play = Play(Script.draw(295).with_model(**PLAIN | model))
    outcome = play.run()
    assert outcome.num_finished > 0
    assert outcome.num_blocks_loaded > 0
    # In vLLM, no hit ends inside a block of a window's group.
    inside = "match_unit" in model and 8 not in model["windows"]
    assert bool(play.world.hits_inside_blocks) == inside


def test_states_of_free_blocks_leave_room() -> None:
    """Their blocks were free already, and only the reserve was left (step 146)."""
    model = MODELS["states, and hits inside blocks"]
    Play(Script.draw(208).with_model(**PLAIN | model)).run()


@pytest.mark.parametrize("name", OPTIONS)
def test_scripts_draw_every_value(name: str) -> None:
    values = OPTIONS[name]
    drawn = {_value(script, name) for script in _SCRIPTS}
    assert drawn >= ({False, True} if isinstance(values, float) else set(values))


def _value(script: Script, name: str) -> Any:
    (owner,) = [o for o in (script, script.shape, script.faults) if hasattr(o, name)]
    return getattr(owner, name)


@pytest.mark.parametrize("keywords", [*DRAWN_MODELS, *DRAWN_ENGINES], ids=str)
def test_scripts_draw_every_model_and_engine(keywords: dict[str, Any]) -> None:
    assert any(
        all(getattr(script.shape, name) == value for name, value in keywords.items())
        for script in _SCRIPTS
    )


def test_every_model_of_one_chain_is_played() -> None:
    """Most of these scripts have the policy ``BeforeEviction``."""
    pairs = [(script, script.with_one_chain()) for script in _SCRIPTS]
    shapes = [played.shape for drawn, played in pairs if played is not drawn]
    assert len(shapes) > 50
    for model in ONE_CHAIN_MODELS:
        wanted = {**model, "num_sub_blocks": 1, "lazy": None}
        del wanted["num_drafted"]  # as drawn before
        alike = [s for s in shapes if all(getattr(s, name) == wanted[name] for name in wanted)]
        assert {shape.kv_events for shape in alike} == {False, True}


def test_scripts_draw_combinations() -> None:
    shapes = [script.shape for script in _SCRIPTS]
    assert {shape.retention for shape in shapes} == {0, None, 2}
    assert any(shape.retention_interval for shape in shapes)
    assert any(shape.v2_runner and shape.draft for shape in shapes)
    assert any(shape.priority and shape.long_prefill for shape in shapes)
    assert any(script.pictures and script.shape.whole_pictures for script in _SCRIPTS)
    assert any(script.sessions and script.max_sessions > 1 for script in _SCRIPTS)
    assert any(s.num_stages > 1 and s.v2_runner and s.async_scheduling for s in shapes)
    assert any(shape.skips_store_hooks(0, 1) for shape in shapes)
    assert {shape.num_sub_blocks for shape in shapes} == {1, 2, 4}
    assert any(shape.num_replicas > 1 and not shape.private for shape in shapes)
    assert any(shape.private for shape in shapes)
    behind = [script for script in _SCRIPTS if script.shape.second_tier]
    assert len(behind) > 25
    assert any(script.shape.num_replicas > 1 for script in behind)
    assert any(script.shape.num_states for script in behind)
    assert any(script.disk_faults.hang for script in behind)
    # Long answers outlast eager stores, which wait for eight blocks.
    long = [s.shape for s in _SCRIPTS if s.max_answer_tokens > 8 * max(s.shape.block_sizes)]
    assert {shape.lazy for shape in long} == {None, True, False}


def test_same_seed_same_run() -> None:
    outcome = play(6)
    assert outcome.num_blocks_loaded > 0
    assert play(6) == outcome


def test_announced_loads() -> None:
    """Slow copies that the ranks announce at various times, and aborted requests."""
    changes = {"num_host_blocks": 300, "chunk_blocks": None, "max_num_seqs": 6, "copy_speed": 0.1}
    changes |= {"announcements": 0.4, "arrivals": 0.9, "aborts": 0.05}
    plays = [Play(script.varied(**changes)) for script in (_SCRIPTS[0], _SCRIPTS[6])]
    outcomes = [play.run() for play in plays]
    assert sum(outcome.num_holds for outcome in outcomes) > 20
    assert sum(outcome.num_holds_by_layer for outcome in outcomes) > 10


@pytest.mark.parametrize(
    ("model", "num_sub_blocks"), [({}, 2), ({"windows": (0, 8)}, 4), ({"draft": True}, 4)], ids=str
)
def test_sub_blocks(model: dict[str, Any], num_sub_blocks: int) -> None:
    """Host blocks of several device blocks. Loads begin and end inside them."""
    drawn = [
        Script.draw(seed).with_model(**PLAIN | {"windows": (0,)} | model) for seed in (300, 302)
    ]
    num_blocks = 40 * len(drawn[0].shape.groups)
    changes = {"num_requests": 60, "num_device_blocks": num_blocks, "num_host_blocks": 200}
    worlds = played(
        each.varied(**changes | TOKENS_ALONE).with_sub_blocks(num_sub_blocks) for each in drawn
    )
    assert sum(world.num_begun_inside for world in worlds) > 0
    assert sum(world.num_ended_inside for world in worlds) > 0


@pytest.mark.parametrize("overload", [False, True])
@pytest.mark.parametrize("lazy", [None, True, False])
def test_no_block_leaves_both_caches(lazy: bool | None, overload: bool) -> None:
    """Stores are in time while copies are fast and the tier has empty blocks. With these seeds,
    requests find blocks at the front of the device's queue just before others load."""
    scripts = [EVICTIONS[lazy](Script.draw(seed)) for seed in (12, 28, 52)]
    worlds = played(script.varied(overload=overload) for script in scripts)
    assert sum(world.num_evicted for world in worlds) > 50


@pytest.mark.parametrize("lazy", [None, True])
def test_in_an_overload_what_requests_hit_is_stored(lazy: bool | None) -> None:
    """Also what was bypassed when it was computed (``promises.FoundOnDevice``)."""
    worlds = played(OVERLOAD.draw(seed).varied(lazy=lazy) for seed in range(400, 403))
    assert sum(world.found.num_evicted for world in worlds) > 30


def test_requests_with_one_prompt_share_its_load() -> None:
    """They wait for it, and few others pass them meanwhile (``promises.Answers``)."""
    worlds = played(SAME_PROMPTS(Script.draw(seed)) for seed in range(400, 403))
    assert sum(world.answers.num_asked_again for world in worlds) > 10


def test_ranks_that_share_host_memory_but_for_one_group() -> None:
    """The tier evicts much, and a host block stands for one or two (``CpuTier.allocate_for``)."""
    worlds = played(MIXED_RANKS.draw(seed) for seed in range(9, 12))
    assert sum(world.num_blocks_loaded for world in worlds) > 100


def test_hashes_move_away_from_running_states() -> None:
    """No store of such a block is under way (``promises.MovedHashes``)."""
    model = {"windows": (0,), "num_states": 1, "match_unit": 2}
    changes = {"num_requests": 40, "arrivals": 0.9, "context_parallel": False, "second_tier": False}
    changes |= TOKENS_ALONE
    scripts = [Script.draw(seed).with_model(**model).varied(**changes) for seed in range(30, 34)]
    worlds = played(script._allowed() for script in scripts)
    assert sum(world.moved.num_moved for world in worlds) > 10


def test_growing_tier() -> None:
    """Ranks open host memory while requests store and load."""
    changes = {"num_host_blocks": 200, "chunk_blocks": 3, "early_chunks": ()}
    changes |= {"arrivals": 0.9, "opening": 0.1, "num_requests": 60}
    outcomes = [Play(script.varied(**changes)).run() for script in _SCRIPTS[:6]]
    assert sum(outcome.num_opened for outcome in outcomes) > 100
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_second_world_finds_the_objects_of_the_first(is_faulty: bool) -> None:
    """The requests are the same, and the caches small."""
    situation = BAD_OBJECTS if is_faulty else OBJECTS
    num_fetched = []
    for seed in (503, 505):
        disk = ScriptedDisk()
        for _ in range(2):
            play = Play(situation(Script.draw(seed)), partial(World, disk=disk))
            play.run()
            num_fetched.append(play.world.ledger(metrics.FETCHED))
    assert sum(num_fetched[1::2]) > (0 if is_faulty else 5)
    assert is_faulty or sum(num_fetched[1::2]) > sum(num_fetched[::2])


def test_a_hit_after_a_preemption_is_no_answer_of_one_s_own() -> None:
    """A request goes on behind its prompt, with contents that others have found too, and releases
    its answer."""
    play(12_500_050)


def test_reports_name_tokens_of_the_second_tier() -> None:
    """The world checks each report (``World._note_report``)."""
    worlds = played(OBJECTS(Script.draw(seed)).varied(wishes=0.9) for seed in (505, 506))
    reports = [report for world in worlds for report in world.reports.values()]
    for source in ("device", "host", "second_tier", "compute"):
        assert sum(report[source] for report in reports) > 0, source


@pytest.mark.parametrize(
    "seed", [51031, 110022, 1500073, 2300075, 2500123, 2900278, 6200111, 8100146, 8200253, 9700069]
)
def test_seeds_that_failed(seed: int) -> None:
    """51031: a session's block was the last one with its contents before the step that computed it.

    1500073: a request that wished for a report failed with its load.

    110022: a device block had been the last one of a host block that was never recorded.

    2300075: a boundary behind the end of a request's prompt, which it had hit, counted as earlier.

    2500123: a second conversation went on from a boundary that the first had released.

    2900278: a request that was preempted before its announced load had ended had a second one.

    6200111: blocks of a private group took more room, and too many others stayed protected.

    8100146: a miss of contents that the device still had when the tier was reset was unseen.

    8200253: a read that ended after the second tier's process waited for its check for ever.
    9700069: with a boundary, a drafter's block behind it was released, of another conversation.

    What scripts have drawn since then is left out."""
    Play(Script.draw(seed).varied(**USUAL_ENDS)).run()


def test_preemption_storm() -> None:
    """Six requests run on a device pool that two of them fill."""
    shape = Shape(num_device_blocks=18, max_model_len=60, max_num_seqs=6, num_host_blocks=100)
    script = replace(_SCRIPTS[5], shape=shape, faults=Faults()).varied(
        copy_speed=0.5, arrivals=0.9, aborts=0.0, resets=0.0, num_requests=40
    )
    outcome = Play(script).run()
    assert outcome.num_preemptions > 0
    assert outcome.num_blocks_loaded > 0
    assert outcome.num_finished == outcome.num_requests


def test_faults_happen_and_every_request_ends() -> None:
    script = _SCRIPTS[3].varied(
        faults=Faults(load_error=0.5, store_error=0.3),
        load_failures="recompute",
        aborts=0.0,
        num_requests=40,
        arrivals=0.9,
    )
    outcome = Play(script).run()
    assert outcome.num_faults > 0
    assert outcome.num_finished == outcome.num_requests


def test_violation_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(world: World) -> None:
        raise Violation("planted")

    monkeypatch.setattr(World, "check_step", planted)
    with pytest.raises(Violation, match=r"seed 11, step \d: planted"):
        play(11)
