"""Scripts that pass, whatever faults they have."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.groups import MODELS, PLAIN, Kind, Reach
from tests.simulation.runner import Violation
from tests.simulation.script import Faults, Play, Script, play
from tests.simulation.shape import Shape

_NUM_SEEDS = 60
_PER_TEST = 10

shapes = st.builds(
    Shape,
    num_device_blocks=st.integers(64, 110),
    num_host_blocks=st.integers(2, 200),
    windows=st.sampled_from([(0,), (8,), (0, 8), (0, 6, 6)]),
    num_ranks=st.integers(1, 4),
    async_scheduling=st.booleans(),
    block_outermost=st.booleans(),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([8, 16, 32, 64]),
    kv_role=st.sampled_from(["kv_both", "kv_producer", "kv_consumer"]),
    load_failures=st.sampled_from(["recompute", "fail"]),
    max_model_len=st.just(48),
    chunk_blocks=st.sampled_from([None, 1, 5, 40]),
    early_chunks=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    num_handshakes=st.sampled_from([None, 0, 1, 2]),
    num_states=st.sampled_from([0, 0, 1, 2]),
    draft=st.sampled_from([False, False, True]),
    num_drafted=st.sampled_from([0, 0, 2]),
    scales=st.sampled_from([(), (), (2, 1)]),
    uneven_ranks=st.booleans(),
    retention=st.sampled_from([0, None, 2]),
    v2_runner=st.booleans(),
    priority=st.booleans(),
)
chances = st.sampled_from([0.0, 0.05, 0.3])
scripts_of_whole_blocks = st.builds(
    Script,
    seed=st.integers(0, 2**32),
    shape=shapes,
    num_requests=st.integers(1, 30),
    arrivals=st.sampled_from([0.1, 0.9]),
    aborts=chances,
    resets=chances,
    copy_speed=st.sampled_from([0.1, 0.5, 1.0]),
    lag=st.sampled_from([0.0, 0.5, 0.9]),
    announcements=st.sampled_from([0.0, 0.3, 1.0]),
    opening=st.sampled_from([0.05, 0.5]),
    faults=st.builds(
        Faults,
        load_error=chances,
        store_error=chances,
        thread_death=st.sampled_from([0.0, 0.0, 0.02]),
        repeated_hooks=chances,
        no_memory=chances,
    ),
)
scripts = st.builds(Script.with_sub_blocks, scripts_of_whole_blocks, st.sampled_from([1, 1, 2, 4]))


@pytest.mark.parametrize("first", range(0, _NUM_SEEDS, _PER_TEST))
def test_seeds(first: int) -> None:
    outcomes = [play(seed) for seed in range(first, first + _PER_TEST)]
    assert sum(outcome.num_finished for outcome in outcomes) > 0
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scripts)
def test_scripts(script: Script) -> None:
    Play(script).run()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models(model: dict[str, Any]) -> None:
    plays = [Play(Script.draw(seed).with_model(**PLAIN | model)) for seed in range(200, 212)]
    outcomes = [play.run() for play in plays]
    assert sum(outcome.num_finished for outcome in outcomes) > 0
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0
    # In vLLM, no hit ends inside a block of a window's group.
    inside = "match_unit" in model and 8 not in model["windows"]
    assert any(play.world.hits_inside_blocks for play in plays) == inside


def test_drawn_scripts_have_every_model() -> None:
    shapes = [Script.draw(seed).shape for seed in range(3 * _NUM_SEEDS)]
    kinds = {group.kind for shape in shapes for group in shape.groups}
    assert kinds == set(Kind)
    assert any(shape.mixed_pages for shape in shapes)
    assert any(shape.match_unit for shape in shapes)
    assert {group.reach for shape in shapes for group in shape.groups} == set(Reach)
    assert any(shape.chained and any(shape.windows) for shape in shapes)
    assert any(shape.draft_window for shape in shapes)
    assert any(all(group.kind is Kind.STATE for group in shape.groups) for shape in shapes)
    assert {shape.num_sub_blocks for shape in shapes} == {1, 2, 4}


def test_drawn_scripts_have_every_engine() -> None:
    shapes = [Script.draw(seed).shape for seed in range(3 * _NUM_SEEDS)]
    drafting = [shape for shape in shapes if shape.num_drafted]
    assert {shape.async_scheduling for shape in drafting} == {False, True}
    assert {shape.draft for shape in drafting} == {False, True}
    assert any(shape.num_states for shape in drafting)
    assert any(len(set(shape.block_sizes)) > 1 for shape in shapes)
    assert any(shape.num_shards > 1 for shape in shapes)
    assert any(shape.uneven_ranks for shape in shapes)
    assert {shape.retention for shape in shapes} == {0, None, 2}
    assert any(shape.retention_interval for shape in shapes)
    assert any(shape.v2_runner and shape.draft for shape in shapes)
    assert any(shape.priority for shape in shapes)
    assert any(s.num_stages > 1 and s.v2_runner and s.async_scheduling for s in shapes)
    assert any(shape.skips_store_hooks(0) for shape in shapes)


def test_in_some_drawn_scripts_answers_are_long() -> None:
    """Such answers outlast eager stores, which wait for eight blocks. Some lazy scripts have them
    too."""
    scripts = [Script.draw(seed) for seed in range(_NUM_SEEDS)]
    long = [s.shape for s in scripts if s.max_answer_tokens > 8 * max(s.shape.block_sizes)]
    assert {shape.lazy for shape in long} == {True, False}


def test_same_seed_same_run() -> None:
    assert [play(seed) for seed in range(8)] == [play(seed) for seed in range(8)]


def test_announced_loads() -> None:
    """Slow copies that the ranks announce at various times, and aborted requests."""
    num_holds = 0
    for seed in range(12):
        drawn = Script.draw(seed)
        shape = replace(drawn.shape, num_host_blocks=300, chunk_blocks=None, max_num_seqs=6)
        script = replace(
            drawn, shape=shape, copy_speed=0.1, announcements=0.4, arrivals=0.9, aborts=0.05
        )
        num_holds += Play(script).run().num_holds
    assert num_holds > 20


@pytest.mark.parametrize(
    ("model", "num_sub_blocks"), [({}, 2), ({"windows": (0, 8)}, 4), ({"draft": True}, 4)], ids=str
)
def test_sub_blocks(model: dict[str, Any], num_sub_blocks: int) -> None:
    """Host blocks of several device blocks. Loads begin and end inside them."""
    begun = ended = 0
    for seed in range(300, 305):
        script = Script.draw(seed).with_model(**PLAIN | {"windows": (0,), "lazy": False} | model)
        play = Play(script.with_sub_blocks(num_sub_blocks))
        play.run()
        begun += play.world.num_begun_inside
        ended += play.world.num_ended_inside
    assert min(begun, ended) > 0


def test_growing_tier() -> None:
    """Ranks open host memory while requests store and load."""
    outcomes = []
    for seed in range(12):
        drawn = Script.draw(seed)
        shape = replace(drawn.shape, num_host_blocks=200, chunk_blocks=3, early_chunks=())
        script = replace(drawn, shape=shape, arrivals=0.9, opening=0.1, num_requests=60)
        outcomes.append(Play(script).run())
    assert sum(outcome.num_opened for outcome in outcomes) > 100
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0


def test_preemption_storm() -> None:
    """Six requests run on a device pool that two of them fill."""
    script = replace(
        Script.draw(5),
        shape=Shape(num_device_blocks=18, max_model_len=60, max_num_seqs=6, num_host_blocks=100),
        copy_speed=0.5,
        arrivals=0.9,
        aborts=0.0,
        resets=0.0,
        num_requests=40,
    )
    outcome = Play(script.without_faults()).run()
    assert outcome.num_preemptions > 0
    assert outcome.num_blocks_loaded > 0
    assert outcome.num_finished == script.num_requests


def test_faults_happen_and_every_request_ends() -> None:
    script = replace(
        Script.draw(3),
        faults=Faults(load_error=0.5, store_error=0.3),
        shape=replace(Script.draw(3).shape, load_failures="recompute"),
        aborts=0.0,
        num_requests=40,
        arrivals=0.9,
    )
    outcome = Play(script).run()
    assert outcome.num_faults > 0
    assert outcome.num_finished == script.num_requests


def test_violation_names_its_seed() -> None:
    play_ = Play(Script.draw(11))
    play_.world.check = _always_wrong  # type: ignore[method-assign]
    with pytest.raises(Violation, match="seed 11, step 1: planted"):
        play_.run()


def _always_wrong() -> None:
    raise Violation("planted")
