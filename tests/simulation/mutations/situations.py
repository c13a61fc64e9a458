"""Situations: scripts adapted to show a bug that ordinary scripts seldom show."""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.groups import PLAIN
from tests.simulation.script import Faults, Script
from tests.simulation.second_tier import DiskFaults


@dataclass(frozen=True, eq=False)
class Situation:
    """Changes to a script, in this order: another model, other pools, other keywords."""

    model: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``Script.with_model``."""
    device_blocks: int | None = None
    """Device blocks for each group of the model."""
    host_blocks: int | None = None
    """Host blocks for each group of the model."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``Script.varied``."""
    otherwise: dict[str, Any] | None = None
    """A similar model, in which the bug does not show: keywords of a Shape."""
    first_seed: int = 0
    """The first script to try: its bugs show soonest from there on."""

    def varied(self, **changes: Any) -> "Situation":
        """The same situation with these changes to the script too."""
        return replace(self, changes=self.changes | changes)

    def beginning_with(self, seed: int) -> "Situation":
        """The same situation, for a bug that an earlier script does not show."""
        return replace(self, first_seed=seed)

    def __call__(self, script: Script) -> Script:
        script = script.varied(**_UNLIKE)
        script = script.with_model(**self.model) if self.model else script
        num_groups = len(script.shape.groups)
        if self.device_blocks is not None:
            script = script.varied(num_device_blocks=self.device_blocks * num_groups)
        if self.host_blocks is not None:
            script = script.varied(num_host_blocks=self.host_blocks * num_groups)
        return script.varied(**self.changes)

    def draw(self, seed: int) -> Script:
        """The script of ``seed``, with these changes."""
        return self(Script.draw(seed).with_sub_blocks(1))

    def without(self, script: Script) -> Script:
        """The same script with a model that does not show the bug."""
        assert self.otherwise is not None
        return self(script).with_model(**PLAIN | self.otherwise)


_ROOM = {"num_host_blocks": 300}
"""Enough room for the blocks of all prompts."""
_EAGER = {"lazy": False, "store_threshold": 1}
_LAZY = {"lazy": True, "store_threshold": 1}
_EARLY = {"lazy": None, "store_threshold": 1}
_BUSY = {"arrivals": 0.9, "num_requests": 60}
_QUICK = {"copy_speed": 0.9, "faults": Faults()}

_FULL_ATTENTION = PLAIN | {"windows": (0,)}

TOKENS_ALONE = {"pictures": 0.0, "whole_pictures": False, "max_loras": 0, "embeddings": 0.0}
"""Prompts are tokens, for a model without adapters."""

USUAL_ENDS = {"num_stop_tokens": 0, "unread": 0.0, "long_prefill": 0, "watermark": 0.0}
USUAL_ENDS |= {"reserves_prompts": True, "chunked_prefill": True, "max_sessions": 1} | TOKENS_ALONE
"""Answers end at their lengths, all requests read the cache, vLLM's admission is the usual one, and
prompts are tokens."""

_UNLIKE = USUAL_ENDS | {"num_replicas": 1, "private": (), "second_tier": False, "wishes": 0.0}
_UNLIKE |= {"sessions": 0.0, "grammars": 0.0, "pauses": 0.0, "keeps_on_reset": True}
"""No two ranks have the same KV, nothing lies behind host memory, and no request has wishes. No
request waits for anything but blocks and loads."""

ORDINARY = Situation(first_seed=3)
"""The script as it was drawn."""

LOADING = ORDINARY.beginning_with(6)
"""The same, from a script on whose requests load."""

ADAPTERS = LOADING.varied(max_loras=2)
"""Most requests have a LoRA adapter."""

PICTURES = LOADING.varied(pictures=0.9)
"""Most prompts have pictures."""

EMBEDDINGS = LOADING.varied(embeddings=0.9)
"""Most prompts come as embeddings."""

WRITE_HAZARDS = Situation(
    device_blocks=18,
    changes=_ROOM
    | _QUICK
    | {"async_scheduling": True, "lag": 0.9, "aborts": 0.2}
    # For a consumer, vLLM itself holds such blocks.
    | {"kv_role": "kv_producer"},
    first_seed=3,
)
"""vLLM frees blocks that a step in flight may still touch, and allocates them again."""

LATE_DRAFTS = Situation(
    _FULL_ATTENTION | {"draft": True, "num_drafted": 3, "num_ranks": 1},
    device_blocks=32,
    changes=_ROOM
    | _EAGER
    # This needs the V2 runner and one request at a time.
    | {"v2_runner": True, "max_num_seqs": 1, "faults": Faults()}
    | {"lag": 0.8, "copy_speed": 0.5, "arrivals": 0.1, "resets": 0.0},
)
"""A load begins after steps without tokens, while the drafter of an ended request may still
write."""

SHARED_LOADS = Situation(
    _FULL_ATTENTION,
    device_blocks=40,
    changes=_ROOM
    | _EAGER
    | _BUSY
    | {"chunk_blocks": None, "kv_role": "kv_both", "load_failures": "recompute", "max_num_seqs": 6}
    | {"copy_speed": 0.1, "announcements": 0.0, "aborts": 0.3, "resets": 0.0}
    | {"faults": Faults(load_error=0.7)},
)
"""Two requests load the same blocks: one load fails, and the other request is aborted."""

FAILING_LOADS = Situation(
    device_blocks=40,
    changes=_ROOM
    | _QUICK
    | {"load_failures": "recompute", "arrivals": 0.9, "aborts": 0.0}
    | {"faults": Faults(load_error=0.7)},
    first_seed=2,
)
"""Requests load the same blocks one after the other, and most loads fail."""

FAILING_STORES = Situation(
    device_blocks=24,
    changes=_ROOM
    | {"num_ranks": 2, "num_stages": 1, "kv_role": "kv_both", "copy_speed": 0.3, "arrivals": 0.9}
    | {"faults": Faults(store_error=0.3)},
)
"""Ranks end the same store in different steps, and some of them fail."""

ANNOUNCED = Situation(
    device_blocks=24,
    changes=_ROOM
    | _BUSY
    | {"async_scheduling": True, "max_num_seqs": 6}
    | {"copy_speed": 0.1, "announcements": 0.6, "thread_death": 0.0},
    first_seed=6,
)
"""Loads are slow, and ranks announce them early."""

BY_LAYER = replace(ANNOUNCED, model=_FULL_ATTENTION)
"""The same for a model whose layers wait for loads one by one."""

ANNOUNCED_STATES = replace(ANNOUNCED, model=_FULL_ATTENTION | {"num_states": 1})
"""The same for a model that has states."""

GROWING = Situation(
    changes=_ROOM
    | {"chunk_blocks": 6, "num_ranks": 2, "num_stages": 1, "arrivals": 0.9, "faults": Faults()},
    first_seed=10,
)
"""Two ranks open host blocks while they serve."""

WISHES = Situation(
    changes=_ROOM | _QUICK | _BUSY | {"wishes": 0.9, "store_threshold": 1, "resets": 0.0},
    first_seed=9,
)
"""Most requests wish for something."""

ASKED_AGAIN = Situation(changes={"store_threshold": 2}, first_seed=3)
"""Blocks are stored only once a second request has them."""

_ONE_CHAIN = _FULL_ATTENTION | {"num_ranks": 1}

EVICTIONS = {
    lazy: Situation(
        _ONE_CHAIN,
        device_blocks=120,
        changes=_QUICK
        | _BUSY
        | _EARLY
        | {"lazy": lazy, "num_host_blocks": 1000, "chunk_blocks": None}
        | {"resets": 0.0, "aborts": 0.01, "max_num_batched_tokens": 8, "max_num_seqs": 2}
        | {"num_stages": 1, "kv_role": "kv_both", "max_answer_tokens": 12},
        first_seed=2,
    )
    for lazy in (None, True, False)
}
"""The device has many free blocks, and evicts blocks all the same. The tier has room for all. By
``lazy``."""

OVERLOAD_WITH_ROOM = EVICTIONS[None].varied(overload=True)
"""The same in an overload."""

OVERLOAD = replace(
    OVERLOAD_WITH_ROOM.varied(num_host_blocks=60, num_requests=100), device_blocks=40, first_seed=5
)
"""The tier is full, and few requests are stored."""

COPIES = Situation(
    _ONE_CHAIN,
    device_blocks=30,
    host_blocks=60,
    changes=_QUICK | _BUSY | _EARLY | {"chunk_blocks": None},
    first_seed=2,
)
"""The tier evicts what the device has too."""

VICTIMS = Situation(
    _ONE_CHAIN,
    device_blocks=30,
    changes=_ROOM
    | _BUSY
    | _LAZY
    | {"chunk_blocks": None, "max_num_seqs": 2}
    | {"max_num_batched_tokens": 8, "copy_speed": 0.3, "faults": Faults(), "resets": 0.0},
    first_seed=6,
)
"""Loads need more device blocks than are safe to evict."""

NO_ROOM = VICTIMS.varied(num_host_blocks=2)
"""The tier has no room for what they would evict."""

SESSIONS = Situation(
    _ONE_CHAIN,
    device_blocks=18,
    changes=_ROOM
    | _BUSY
    | _EAGER
    | {"chunk_blocks": None, "sessions": 0.9, "resets": 0.0, "aborts": 0.0}
    | {"copy_speed": 0.1, "announcements": 0.0, "faults": Faults()}
    | {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_answer_tokens": 12},
)
"""A streaming-input session holds blocks while it waits for input."""

DEVICE_RESETS = Situation(
    _ONE_CHAIN,
    device_blocks=40,
    changes=_ROOM
    | _EARLY
    | {"chunk_blocks": None, "resets": 0.1, "arrivals": 0.2, "num_requests": 60}
    | {"keeps_on_reset": False, "kv_role": "kv_producer", "copy_speed": 0.1, "faults": Faults()},
)
"""The device's cache is reset, also for new weights, and right behind an answer."""

SAME_PROMPTS = Situation(
    _ONE_CHAIN,
    device_blocks=60,
    changes=_ROOM
    | _BUSY
    | _EAGER
    | {"chunk_blocks": None, "max_num_seqs": 6, "stream": True, "kv_role": "kv_both"}
    | {"copy_speed": 0.1, "announcements": 0.0, "faults": Faults(), "resets": 0.05}
    | {"max_num_batched_tokens": 64, "priority": False},
    first_seed=1,
)
"""Many requests have a prompt that only the tier has. Its load takes long."""

FULL_DEVICE = Situation(
    _ONE_CHAIN,
    device_blocks=18,
    changes=_ROOM | _BUSY | _LAZY | {"chunk_blocks": None, "max_num_seqs": 6},
    first_seed=9,
)
"""Running requests have most of the device's blocks."""

AT_ONCE_AND_QUICKLY = Situation(
    _FULL_ATTENTION,
    device_blocks=24,
    changes=_ROOM
    | _EAGER
    | _QUICK
    | {"chunk_blocks": None, "kv_role": "kv_both", "arrivals": 0.4, "num_requests": 60},
    first_seed=2,
)
"""Stores at once, without faults, in which a plain model's copies keep up."""

_SMALL_TIER = Situation(
    device_blocks=20,
    host_blocks=24,
    changes=_QUICK | _BUSY | {"store_threshold": 1, "chunk_blocks": None},
    first_seed=6,
)

SMALL_TIER = _SMALL_TIER.varied(lazy=False)
"""Requests find more blocks than the tier can protect."""

WISHES_IN_A_SMALL_TIER = _SMALL_TIER.varied(wishes=0.9)
"""Most requests wish for something, and the tier evicts much."""

SUB_BLOCKS = Situation(
    # vLLM deals no windows out to ranks.
    {"windows": (0, 4), "num_states": 0, "match_unit": None, "context_parallel": False}
    | {"num_sub_blocks": 4},
    changes=_ROOM | _EAGER,
    first_seed=5,
)
"""Host blocks hold several device blocks."""


INSIDE_HOST_BLOCKS = replace(
    SUB_BLOCKS.varied(arrivals=0.9, num_requests=40, **_QUICK), device_blocks=40, first_seed=12
)
"""Loads begin inside host blocks: the device has the first sub-blocks."""

RESETS = Situation(changes=_ROOM | _QUICK | {"resets": 0.1, "arrivals": 0.9}, first_seed=6)
"""Both caches are reset often, also for new weights."""


def engine(otherwise: dict[str, Any] | None = None, first_seed: int = 0, **model: Any) -> Situation:
    """An engine that the bug needs to show, otherwise plain: keywords of a Shape."""
    return Situation(
        PLAIN | model, changes=_ROOM | _EAGER, otherwise=otherwise or {}, first_seed=first_seed
    )


STATES = engine(num_states=1, otherwise={"windows": (0, 8)}, first_seed=9)
INNER_HITS = engine(
    windows=(0,),
    num_states=1,
    match_unit=2,
    otherwise={"windows": (0, 8), "num_states": 1},
    first_seed=9,
)
"""States, and hits that may end inside a block."""

BOUNDARIES = Situation(PLAIN | {"windows": (0, 8)}, changes=_ROOM | _EAGER | _BUSY)
"""Requests leave windows at their ends, and others go on from there."""

LONG_HITS = replace(
    BOUNDARIES,
    model=PLAIN | {"windows": (0,), "num_states": 1, "match_unit": 2, "draft": True},
    first_seed=21,
)
"""The same for states beside a drafter: a hit may be longer than the next one at the end of its
request's prompt, and ends before the end that its request continues."""

CHAINED_WINDOWS = Situation(
    PLAIN
    | {"windows": (0, 8), "draft": True, "chained": True, "num_drafted": 3}
    | {"retention": None, "num_ranks": 1},
    device_blocks=40,
    changes=_ROOM | _EAGER | _BUSY | _QUICK,
    first_seed=4,
)
"""Chained MTP modules and windows. Requests find on the device blocks that another one has
loaded."""

_ALIKE = {"num_ranks": 2, "num_stages": 1, "chunk_blocks": None}
_COPYING = _BUSY | _ALIKE | {"kv_role": "kv_both", "resets": 0.0}

_REPLICAS = Situation(
    _FULL_ATTENTION | {"num_replicas": 2},
    device_blocks=24,
    changes=_ROOM | _EAGER | _COPYING,
    first_seed=9,
)

RANKS_WITH_THE_SAME_KV = _REPLICAS.varied(**_QUICK)
"""Two ranks share their host memory."""

SLOW_RANKS = _REPLICAS.varied(copy_speed=0.2, faults=Faults())
"""They end the same transfer in different steps."""

DYING_RANKS = _REPLICAS.varied(faults=Faults(thread_death=0.02)).beginning_with(8)
"""The copy thread of one of them dies while the other copies."""

OBJECTS = Situation(
    _FULL_ATTENTION,
    device_blocks=18,
    host_blocks=14,
    changes=_BUSY
    | _EAGER
    | {"second_tier": True, "chunk_blocks": None, "kv_role": "kv_both", "faults": Faults()}
    | {"disk_speed": 0.5, "disk_faults": DiskFaults(), "compute_speed": 0.2, "resets": 0.0},
    first_seed=3,
)
"""Host memory soon evicts what requests want again, and files behind it have that."""

OBJECTS_AND_DUPLICATES = OBJECTS.varied(lazy=None)
"""The same, beside an exclusive tier."""

BAD_OBJECTS = OBJECTS.varied(disk_faults=DiskFaults(short=0.1, wrong=0.2, failed=0.1, vanished=0.1))
"""Other bytes come back than were written, or none."""

FOREIGN_OBJECTS = OBJECTS.varied(disk_faults=DiskFaults(foreign=0.5)).beginning_with(2)
"""Whole objects of other keys come back."""

LATE_OBJECTS = OBJECTS.varied(disk_speed=0.1, aborts=0.0, compute_speed=1.0).beginning_with(8)
"""They come after the request has gone on."""

FROZEN = OBJECTS.varied(disk_faults=DiskFaults(freeze=0.05))
"""The engine stands still now and then, for an hour at most."""

NEW_WEIGHTS = OBJECTS.varied(resets=0.05).beginning_with(2)
"""The model gets new weights, and both caches are reset."""

MIXED_RANKS = Situation(
    PLAIN | {"windows": (0, 8), "num_replicas": 2, "private": (1,)},
    device_blocks=24,
    host_blocks=30,
    changes=_EAGER | _QUICK | _COPYING,
    first_seed=9,
)
"""They share host memory, but have different pages in one of two groups."""
