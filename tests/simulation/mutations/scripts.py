"""Situations: scripts adapted to show a bug that ordinary scripts seldom show."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.groups import PLAIN
from tests.simulation.script import Faults, Script

Situation = Callable[[Script], Script]

_NUM_HOST_BLOCKS = 300
"""Enough room for the blocks of all prompts."""


def ordinary(script: Script) -> Script:
    """The script as it was drawn."""
    return script


def write_hazards(script: Script) -> Script:
    """vLLM frees blocks that a step in flight may still touch, and allocates them again. For a
    consumer, vLLM itself holds such blocks."""
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        kv_role="kv_producer",
        async_scheduling=True,
        num_device_blocks=18 * len(script.shape.groups),
    )
    return replace(script, shape=shape, lag=0.9, copy_speed=0.9, aborts=0.2, faults=Faults())


def late_drafts(script: Script) -> Script:
    """A load begins after steps without tokens, while the drafter of an ended request may still
    write. This needs the V2 runner and one request at a time."""
    script = script.with_model(
        **PLAIN | {"windows": (0,), "draft": True, "num_drafted": 3, "num_ranks": 1}
    )
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        num_device_blocks=64,
        v2_runner=True,
        num_stages=1,
        lazy=False,
        store_threshold=1,
        max_num_seqs=1,
    )
    return replace(
        script, shape=shape, lag=0.8, copy_speed=0.5, arrivals=0.1, resets=0.0, faults=Faults()
    )


def shared_loads(script: Script) -> Script:
    """Two requests load the same blocks: one load fails, and the other request is aborted."""
    script = script.with_model(**PLAIN | {"windows": (0,)})
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        chunk_blocks=None,
        kv_role="kv_both",
        lazy=False,
        store_threshold=1,
        load_failures="recompute",
        max_num_seqs=6,
        num_device_blocks=40,
    )
    return replace(
        script,
        shape=shape,
        copy_speed=0.1,
        announcements=0.0,
        aborts=0.3,
        arrivals=0.9,
        num_requests=60,
        resets=0,
        faults=Faults(load_error=0.7),
    )


def failing_loads(script: Script) -> Script:
    """Requests load the same blocks one after the other, and most loads fail."""
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        load_failures="recompute",
        num_device_blocks=40 * len(script.shape.groups),
    )
    faults = Faults(load_error=0.7)
    return replace(script, shape=shape, copy_speed=0.9, arrivals=0.9, aborts=0, faults=faults)


def failing_stores(script: Script) -> Script:
    """Ranks end the same store in different steps, and some of them fail."""
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        num_ranks=max(2, script.shape.num_ranks),
        kv_role="kv_both",
        num_device_blocks=24 * len(script.shape.groups),
    )
    faults = Faults(store_error=0.3)
    return replace(script, shape=shape, copy_speed=0.3, arrivals=0.9, faults=faults)


def announced(script: Script) -> Script:
    """Loads are slow, and ranks announce them early."""
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        async_scheduling=True,
        max_num_seqs=6,
        num_device_blocks=24 * len(script.shape.groups),
    )
    return replace(
        script,
        shape=shape,
        copy_speed=0.1,
        announcements=0.6,
        arrivals=0.9,
        num_requests=60,
        faults=replace(script.faults, thread_death=0.0),
    )


def announced_states(script: Script) -> Script:
    """The same for a model that has states."""
    return announced(script.with_model(**PLAIN | {"windows": (0,), "num_states": 1}))


def growing(script: Script) -> Script:
    """Several ranks open host blocks while they serve."""
    shape = replace(
        script.shape,
        num_host_blocks=_NUM_HOST_BLOCKS,
        chunk_blocks=6,
        num_ranks=max(2, script.shape.num_ranks),
    )
    faults = Faults(no_memory=script.faults.no_memory)
    return replace(script, shape=shape, arrivals=0.9, faults=faults)


def asked_again(script: Script) -> Script:
    """Blocks are stored only once a second request has them."""
    return replace(script, shape=replace(script.shape, store_threshold=2))


def lazily(script: Script) -> Script:
    """Blocks are stored before the device evicts them."""
    return replace(script, shape=replace(script.shape, lazy=True, store_threshold=1))


def lazy_evictions(blocks_per_group: int = 160) -> Situation:
    """The device has many free blocks, and evicts blocks after lazy stores all the same."""

    def turn(script: Script) -> Script:
        script = lazily(script)
        shape = replace(
            script.shape,
            num_device_blocks=blocks_per_group * len(script.shape.groups),
            num_host_blocks=2000,
            chunk_blocks=None,
            max_num_batched_tokens=8,
            max_num_seqs=2,
        )
        return replace(
            script,
            shape=shape,
            copy_speed=0.9,
            arrivals=0.9,
            resets=0.0,
            aborts=0.01,
            num_requests=60,
            faults=Faults(),
        )

    return turn


def lazily_and_quickly(script: Script) -> Script:
    """Lazy stores without faults, in which a plain model's copies keep up."""
    script = lazily(script.with_model(**PLAIN | {"windows": (0,)}))
    shape = replace(
        script.shape,
        num_device_blocks=24,
        num_host_blocks=_NUM_HOST_BLOCKS,
        chunk_blocks=None,
        kv_role="kv_both",
    )
    return replace(
        script, shape=shape, copy_speed=0.9, arrivals=0.4, num_requests=60, faults=Faults()
    )


def lazy_evictions_in_time(script: Script) -> Script:
    """Blocks are stored before their parents, and nothing prevents those stores."""
    script = lazy_evictions(60)(script.with_model(**PLAIN | {"windows": (0,)}))
    shape = replace(script.shape, num_ranks=1, kv_role="kv_both", max_num_seqs=4)
    return replace(script, shape=shape, lag=0.0, aborts=0.0)


def with_sub_blocks(script: Script) -> Script:
    """Host blocks hold several device blocks."""
    # vLLM deals no windows out to ranks.
    model = {"windows": (0, 4), "num_states": 0, "match_unit": None, "context_parallel": False}
    return _with_model(script, model | {"num_sub_blocks": 4})


@dataclass(frozen=True)
class Engine:
    """A model, or a way to run it, that the bug needs to show: keywords of an otherwise plain
    Shape."""

    changes: dict[str, Any]
    """Keywords of the engine that shows the bug."""
    otherwise: dict[str, Any] = field(default_factory=dict)
    """Keywords of a similar engine that does not show the bug."""

    def __call__(self, script: Script) -> Script:
        return _with_model(script, PLAIN | self.changes)

    def without(self, script: Script) -> Script:
        """The same script on an engine that does not show the bug."""
        return self(script).with_model(**PLAIN | self.otherwise)


STATES = Engine({"num_states": 1}, otherwise={"windows": (0, 8)})
INNER_HITS = Engine(
    {"windows": (0,), "num_states": 1, "match_unit": 2},
    otherwise={"windows": (0, 8), "num_states": 1},
)
"""States, and hits that may end inside a block."""


def chained_windows(script: Script) -> Script:
    """Chained MTP modules and windows. Requests find on the device blocks that another one has
    loaded."""
    script = _with_model(
        script,
        PLAIN
        | {"windows": (0, 8), "draft": True, "chained": True, "num_drafted": 3}
        | {"retention": None, "num_ranks": 1},
    )
    shape = replace(script.shape, num_device_blocks=40 * len(script.shape.groups))
    return replace(
        script, shape=shape, arrivals=0.9, num_requests=60, copy_speed=0.9, faults=Faults()
    )


def _with_model(script: Script, changes: dict[str, Any]) -> Script:
    script = script.with_model(**changes, lazy=False, store_threshold=1)
    return replace(script, shape=replace(script.shape, num_host_blocks=_NUM_HOST_BLOCKS))
