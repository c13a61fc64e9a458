"""Script: all events of a world, drawn from one seed."""

import random
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from simple_offload.backends.base import Direction
from simple_offload.vllm_compat import vllm_version
from tests.simulation import integrity, wishes
from tests.simulation.checks import COMPLETE
from tests.simulation.groups import PLAIN, Kind
from tests.simulation.identity import NUM_TOKENS
from tests.simulation.inputs import ADAPTERS, LONGEST_PICTURE, PICTURE, pictures_in
from tests.simulation.runner import Violation
from tests.simulation.second_tier import DiskFaults
from tests.simulation.shape import SAYS_REPLICAS, Shape
from tests.simulation.world import Rank, World

_PATIENCE = 400
"""Number of steps without progress of any request that counts as a hang, if nothing is held
back."""
_ENDURANCE = 5000
"""Number of steps in which no request ends that counts as a hang too, whatever goes on."""


_ATTENTION_ONLY = 0.5
DRAWN_MODELS: tuple[dict[str, Any], ...] = (
    {"num_states": 1},
    {"num_states": 2},
    {"num_states": 1, "windows": (8,)},
    {"num_states": 1, "windows": ()},
    {"num_states": 1, "draft": True},
    {"draft": True},
    {"draft": True, "windows": ()},
    {"draft": True, "draft_window": 8, "num_drafted": 2},
    {"draft": True, "chained": True, "num_drafted": 3},
    {"draft": True, "draft_window": 8, "chained": True, "num_drafted": 3},
    {"chunks": (8,)},
    {"chunks": (16,), "windows": (0,)},
    {"prompt_windows": (8,)},
    {"prompt_windows": (6,), "windows": ()},
    {"mixed_pages": True},
    {"num_states": 1, "windows": (0,), "match_unit": 2},
    {"num_states": 1, "windows": (0,), "match_unit": 1, "draft": True},
)
"""Groups that a script's model may have beside or instead of attention groups."""

_COMMON = 0.6
DRAWN_ENGINES: tuple[dict[str, Any], ...] = (
    {"num_drafted": 1},
    {"num_drafted": 3},
    {"num_drafted": 2, "async_scheduling": True},
    {"num_drafted": 2, "draft": True},
    {"num_drafted": 3, "draft": True, "async_scheduling": True},
    {"num_drafted": 2, "num_states": 1},
    {"scales": (1, 2)},
    {"scales": (2, 1, 4), "windows": (0, 8)},
    {"scales": (2, 1), "num_drafted": 2, "windows": (0, 8)},
    {"num_ranks": 3, "uneven_ranks": True},
    {"num_ranks": 2, "uneven_ranks": True, "mixed_pages": True, "num_drafted": 2},
    PLAIN | {"windows": (0,), "num_ranks": 2, "context_parallel": True},
    PLAIN
    | {"windows": (0, 0), "num_ranks": 2, "context_parallel": True, "num_drafted": 2}
    | {"scales": (1, 2)},
)
"""Other ways to run an engine, for any model."""

_ONE_CHAIN = 0.25
ONE_CHAIN_MODELS: tuple[dict[str, Any], ...] = (
    *[PLAIN | {"windows": (0,)}] * 3,
    PLAIN | {"windows": (0,), "ring": True},
    PLAIN | {"windows": (0,), "replay_window": 8},
    PLAIN | {"windows": (0,), "replay_window": 6, "ring": True},
)
"""Models with one group whose blocks are found: most that are served. The other parts of a script
leave them few of its draws."""


# The values that scripts draw; a number is the probability of True.
ENGINE: dict[str, Any] = {
    "async_scheduling": 0.5,
    "block_outermost": 0.5,
    "max_num_seqs": range(1, 7),
    "max_num_batched_tokens": (8, 16, 32, 64),
    "kv_role": ("kv_both", "kv_both", "kv_producer", "kv_consumer"),
    "load_failures": ("recompute", "fail"),
    "chunk_blocks": (None, None, None, 1, 6, 30),
}
TRAFFIC: dict[str, Any] = {
    "num_requests": range(10, 61),
    "arrivals": (0.1, 0.4, 0.9),
    "aborts": (0.0, 0.01, 0.1),
    "resets": (0.0, 0.0, 0.01, 0.05),
    "copy_speed": (0.1, 0.5, 0.9),
    "lag": (0.0, 0.3, 0.8),
    "announcements": (0.0, 0.5, 1.0),
    "opening": (0.1, 0.5, 1.0),
}
FAULTS: dict[str, Any] = {
    "load_error": (0.0, 0.1, 0.5),
    "store_error": (0.0, 0.1, 0.5),
    "thread_death": (0.0, 0.0, 0.01),
    "repeated_hooks": (0.0, 0.3),
    "no_memory": (0.0, 0.1),
}
POLICY: dict[str, Any] = {
    "lazy": (None, None, True, False),
    "store_threshold": (1, 1, 1, 2, 3),
}
# Parts that depend on no other part, by the name of their random stream.
STREAMS: dict[str, dict[str, Any]] = {
    # A few blocks, or more than a batch that is recorded at once.
    "answers": {"max_answer_tokens": (12, 12, 12, 12, 48)},
    "overload": {"overload": (False, False, True)},
    # Async scheduling does not expect such an end: the next step is on the device.
    "ends": {"num_stop_tokens": (0, 0, 4, 12)},
    "readers": {"unread": (0.0, 0.0, 0.2)},
    # What vLLM asks for before a request gets blocks.
    "admission": {
        "long_prefill": (0, 0, 5, 10),
        "watermark": (0.0, 0.0, 0.1),
        "reserves_prompts": 0.7,
    },
    "prefills": {"chunked_prefill": 0.5},
    "inputs": {
        "pictures": (0.0, 0.0, 0.5),
        "whole_pictures": 0.3,
        "max_loras": (0, 0, 1, 2),
        "embeddings": (0.0, 0.0, 0.3),
    },
    # Without KV events, less is known of the device's blocks.
    "events": {"kv_events": 0.5},
    "wishes": {"wishes": (0.0, 0.0, 0.3, 0.9)},
    "stream": {"stream": (False, True)},
    "several sessions": {"max_sessions": (1, 2, 4)},
    # vLLM's states in which a request holds blocks, or waits, and does not run.
    "states": {
        "sessions": (0.0, 0.0, 0.2, 0.6),
        "grammars": (0.0, 0.0, 0.2),
        "pauses": (0.0, 0.0, 0.05),
        "keeps_on_reset": 0.4,
    },
}
OPTIONS = ChainMap(ENGINE, TRAFFIC, FAULTS, POLICY, *STREAMS.values())


@dataclass(frozen=True)
class Faults:
    """Probabilities of failures, per copy or per step."""

    load_error: float = 0.0
    store_error: float = 0.0
    thread_death: float = 0.0
    repeated_hooks: float = 0.0
    no_memory: float = 0.0
    """Per chunk of host blocks."""


@dataclass(frozen=True)
class Script:
    """A seed, an engine, its requests and its faults."""

    seed: int
    shape: Shape
    num_requests: int = 12
    arrivals: float = 0.25
    stream: bool = False
    """Whether up to twice as many requests come, as long as one waits for its blocks."""
    max_answer_tokens: int = 12
    """The most tokens of an answer."""
    aborts: float = 0.02
    resets: float = 0.01
    copy_speed: float = 0.5
    """Probability that a waiting copy runs, per step and rank."""
    lag: float = 0.5
    """Probability that the compute stream lags behind the host for a while."""
    announcements: float = 0.0
    """Probability that a load in flight is announced as nearly done, per step and rank."""
    opening: float = 0.5
    """Probability that another chunk of host blocks is opened, per step and rank."""
    faults: Faults = field(default_factory=Faults)
    wishes: float = 0.0
    """Probability that a request wishes for something."""
    unread: float = 0.0
    """Probability that a request reads no prefix cache, as one for a prompt's logprobs."""
    sessions: float = 0.0
    """Probability that a request is a streaming-input session, if ``max_sessions`` are not there
    yet, and if the model has nothing but attention."""
    max_sessions: int = 1
    """The most of them at once. Fewer, if the device has no room for their longest inputs together:
    vLLM itself would come to a standstill."""
    pictures: float = 0.0
    """Probability that a piece of a prompt has a place for a picture."""
    embeddings: float = 0.0
    """Probability that a prompt comes as embeddings, if it has no pictures."""
    grammars: float = 0.0
    """Probability that a request waits for a grammar."""
    pauses: float = 0.0
    """Probability that vLLM is paused for a while, per step."""
    stretch: int = 1
    """Factor of the prompts' lengths."""
    overload: bool = False
    """Whether the policy sees an overload all the time. Few prompts do not show one."""
    disk_speed: float = 0.5
    """Probability that what the second tier is to do is done, per step."""
    disk_faults: DiskFaults = field(default_factory=DiskFaults)
    compute_speed: float = 1.0
    """Tokens per second that the second tier is told. The scripted model computes in no time."""

    @classmethod
    def draw(cls, seed: int) -> "Script":
        """A script that depends on ``seed`` alone."""
        rng = random.Random(seed)
        # The first stream draws the engine, its traffic and its faults.
        windows = rng.choice([(0,), (0,), (0, 8), (8,), (0, 6, 6), (0, 16), (12, 5)])
        faulty = rng.random() < 0.4
        num_ranks = rng.choice([1, 1, 2, 3, 4])
        script = cls(seed, Shape(windows=windows, num_ranks=num_ranks, max_model_len=60)).varied(
            num_device_blocks=rng.randint(18, 36) * len(windows),
            num_host_blocks=rng.choice([2, 5, 16, 40, 90, 300, 300]) * len(windows),
            **_draw(rng, ENGINE),
            early_chunks=tuple(rng.randint(0, 6) for _ in range(num_ranks)),
            num_handshakes=rng.choice([None, None, rng.randint(0, num_ranks)]),
            **_draw(rng, TRAFFIC),
            **(_draw(rng, FAULTS) if faulty else {}),
        )
        # Each later part has a stream of its own, so that a new part changes no other draw.
        rng = random.Random(f"{seed}: policy")
        script = script.varied(**_draw(rng, POLICY))
        # On a full device, all stores are early.
        factor = rng.choice([1] if script.shape.lazy is False else [1, 2, 4])
        script = script.varied(num_device_blocks=script.shape.num_device_blocks * factor)
        rng = random.Random(f"{seed}: model")
        if rng.random() >= _ATTENTION_ONLY:
            script = script.with_model(**rng.choice(DRAWN_MODELS))
        rng = random.Random(f"{seed}: engine")
        if rng.random() >= _COMMON:
            script = script.with_model(**rng.choice(DRAWN_ENGINES))
        script = script._with_runner(random.Random(f"{seed}: runner"))
        script = script.with_replicas(random.Random(f"{seed}: replicas"))
        for stream, options in STREAMS.items():
            script = script.varied(**_draw(random.Random(f"{seed}: {stream}"), options))
        script = script.with_sub_blocks(random.Random(f"{seed}: parts").choice([1, 1, 2, 4]))
        return script.with_second_tier(random.Random(f"{seed}: second tier"))._allowed()

    def with_one_chain(self) -> "Script":
        """The same script, maybe with one of ``ONE_CHAIN_MODELS`` and their usual host blocks."""
        rng = random.Random(f"{self.seed}: one chain")
        if rng.random() >= _ONE_CHAIN:
            return self
        num_drafted = self.shape.num_drafted
        script = self.with_sub_blocks(1).with_model(**rng.choice(ONE_CHAIN_MODELS))
        return script.varied(num_drafted=num_drafted)._allowed()

    def _allowed(self) -> "Script":
        """The same script without what is refused on this version of vLLM, or with a runner, and
        without what stops vLLM itself. With states, a chunk of a prefill ends with a block
        (``_mamba_block_aligned_split``); with chained modules, it leaves them tokens or none
        (``_reserve_prefill_lookahead``). Between the two, no token may be left to schedule."""
        shape, is_old = self.shape, vllm_version() < (0, 31)
        changes: dict[str, Any] = {}
        if vllm_version() < (0, 32):  # a session keeps hashes of a token that it discards
            changes |= {"sessions": 0.0}
        if shape.num_states:
            changes |= {"chained": False}
            changes |= {"match_unit": None, "context_parallel": False} if is_old else {}
        if shape.replay_window:
            changes |= {"replay_window": 0} if is_old else {"v2_runner": True}
        if shape.priority and self.faults.thread_death:
            # A request that is preempted in the step that has scheduled it leaves blocks that vLLM
            # finds and nothing has computed (vllm#57580): seldom, unless prompts come in parts. A
            # tier that is switched off leaves them to vLLM.
            changes |= {"long_prefill": 0}
        if shape.second_tier:
            changes |= {"max_loras": 0}
        elif shape.max_loras and (
            self.pictures or shape.num_states or shape.num_drafted or shape.num_stages > 1
        ):
            # Where a running request may have no tokens in a step, vLLM admits one with another
            # adapter, and stops.
            changes |= {"max_loras": len(ADAPTERS)}
        if shape.num_states or shape.max_num_batched_tokens < shape.max_model_len:
            changes |= {"chunked_prefill": True}
        if shape.num_states or shape.draft:
            # With a drafter, a prefill may stand still before a picture that does not fit a step.
            changes |= {"whole_pictures": False}
        return self.varied(**changes)

    def varied(self, **changes: Any) -> "Script":
        """The same script with other values of its own fields, its shape's and its faults'."""
        script = replace(self, **_fields_of(Script, changes))
        if changes.get("chunk_blocks") is not None:
            changes |= {"num_replicas": 1, "private": (), "second_tier": False}
        return replace(
            script,
            shape=replace(script.shape, **_fields_of(Shape, changes)),
            faults=replace(script.faults, **_fields_of(Faults, changes)),
        )

    def with_model(self, **changes: Any) -> "Script":
        """The same script with other groups, and as many blocks for each. ``changes``: to the
        shape."""
        before, script = len(self.shape.groups), self.varied(**changes)
        if script.shape.num_states:
            script = script.varied(num_sub_blocks=1)
        # vLLM has no chunked local attention beside blocks of several sizes.
        if script.shape.scales:
            script = script.varied(chunks=())
        after = len(script.shape.groups)
        return script.varied(
            num_device_blocks=self.shape.num_device_blocks // before * after,
            num_host_blocks=self.shape.num_host_blocks // before * after,
        )

    def _with_runner(self, rng: random.Random) -> "Script":
        """The same script with a model runner, pipeline stages, a policy and a retention drawn."""
        shape = self.shape
        v2_runner = rng.random() < 0.5
        divisors = [n for n in range(2, shape.num_ranks + 1) if shape.num_ranks % n == 0]
        num_stages = rng.choice([1, *divisors]) if shape.num_shards == 1 else 1
        return self.varied(
            v2_runner=v2_runner,
            num_stages=num_stages,
            # In vLLM, stages have this with the V2 runner only.
            async_scheduling=shape.async_scheduling and (v2_runner or num_stages == 1),
            priority=rng.random() < 0.2,
            retention=rng.choice([0, 0, None, 2]),
        )

    def with_replicas(self, rng: random.Random) -> "Script":
        """The same script, maybe with ranks that have the same KV in some groups, and share their
        host memory."""
        shape, size = self.shape, self.shape.tensor_parallel_size
        divisors = [n for n in range(2, size + 1) if size % n == 0]
        if not (divisors and SAYS_REPLICAS) or shape.num_shards > 1 or shape.uneven_ranks:
            return self
        if shape.chunk_blocks is not None or rng.random() < 0.3:
            return self  # such ranks open a chunk after each other, by themselves
        num_replicas = rng.choice(divisors)
        groups = range(len(shape.groups))
        private = [
            group
            for group in groups
            if (shape.groups[group].kind is Kind.STATE and num_replicas < size)
            or rng.random() < 0.3
        ]
        if len(private) == len(groups):
            return self
        # A block of a private group takes one for each rank.
        num_host_blocks = shape.num_host_blocks * (num_replicas if private else 1)
        return self.varied(
            num_replicas=num_replicas,
            private=tuple(private),
            num_host_blocks=num_host_blocks,
        )

    def with_second_tier(self, rng: random.Random) -> "Script":
        """The same script, maybe with objects behind host memory."""
        shape = self.shape
        is_possible = shape.num_stages == 1 and not shape.uneven_ranks
        if not is_possible or shape.chunk_blocks is not None or rng.random() < 0.4:
            return self
        faults = DiskFaults()
        if self.faults != Faults():
            faults = DiskFaults(
                **{each.name: rng.choice([0.0, 0.0, 0.05, 0.3]) for each in fields(DiskFaults)}
            )
            rare = {name: rng.choice([0.0, 0.0, 0.02]) for name in ("hang", "death", "freeze")}
            faults = replace(faults, **rare, raised=rng.choice([0.0, 0.0, 0.005]))
        script = self.varied(second_tier=True, private=())
        if rng.random() < 0.7:  # host memory loses what requests want again
            num_groups = len(shape.groups)
            script = script.varied(
                num_device_blocks=18 * num_groups,
                num_host_blocks=14 * num_groups * shape.num_sub_blocks,
                num_requests=60,
            )
        return replace(
            script,
            disk_speed=rng.choice([0.3, 0.6, 0.9]),
            disk_faults=faults,
            compute_speed=rng.choice([0.02, 0.1, 1.0]),
            resets=rng.choice([0.0, 0.0, self.resets]),  # it is off after the first one
        )

    @property
    def promises_no_loss(self) -> bool:
        """Whether stores must be in time while the device has enough free blocks, and the tier
        empty ones. Requests that wait for a second tier hold blocks of theirs meanwhile."""
        if self.shape.second_tier:
            return False
        can_keep_up = self.copy_speed >= 0.5 and self.faults == Faults()
        return can_keep_up and self.shape.store_threshold == 1 and not self.resets

    def with_sub_blocks(self, num_sub_blocks: int) -> "Script":
        """The same script with as many host blocks, each of ``num_sub_blocks`` device blocks. They
        have one device block if the model has states."""
        if self.shape.num_states:
            return self
        num_host_blocks = self.shape.num_host_blocks // self.shape.num_sub_blocks * num_sub_blocks
        return self.varied(num_sub_blocks=num_sub_blocks, num_host_blocks=num_host_blocks)

    def without_faults(self) -> "Script":
        """The same script without faults."""
        return replace(self, faults=Faults())


def _draw(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: rng.random() < values if isinstance(values, float) else rng.choice(values)
        for name, values in options.items()
    }


def _fields_of(part: type[Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: changes[name] for name in changes.keys() & part.__dataclass_fields__.keys()}


@dataclass
class Outcome:
    """The counts of a run, which show its coverage."""

    num_steps: int = 0
    num_blocks_loaded: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_faults: int = 0
    num_holds: int = 0
    num_holds_by_layer: int = 0
    """Loads in flight that compute had to wait for, counted on each rank."""
    num_read: int = 0
    """Objects that were read from a second tier."""
    num_opened: int = 0
    """Chunks of host blocks that were opened while the engine was running."""


class Play:
    """Plays a script in a world until every request has ended and the world is at rest."""

    def __init__(self, script: Script, make_world: Callable[[Shape], World] = World) -> None:
        self.script = script
        self.world = make_world(script.shape)
        self.world.keeps_up = script.promises_no_loss and self.world.is_ours
        self.world.promises_no_loss = self.world.keeps_up
        if script.overload and self.world.is_ours:
            integrity.pretend_overload(self.world.connector.scheduler)
        for rank in self.world.ranks:
            rank.device.estimate = lambda copy: self._chance(script.announcements)
        self._rng = random.Random(script.seed)
        self._wishes_rng = random.Random(f"{script.seed}: of requests")
        self._inputs_rng = random.Random(f"{script.seed}: of inputs")
        self._num_added = 0
        self._epoch = 0
        self._families = [self._prompt(8, 40) for _ in range(4)]
        self._histories: list[tuple[list[int], str | None]] = []
        self._prompts: list[tuple[list[int], str | None]] = []
        """Prompts to send again unchanged. A hit may then end inside a (host) block."""
        self._salts: dict[str, str | None] = {}
        self._seen: set[str] = set()
        self._outcome = Outcome()
        self._weights_due = False
        self._states_rng = random.Random(f"{script.seed}: of states")
        self._readers_rng = random.Random(f"{script.seed}: of readers")
        self._pause_left = 0
        shape = script.shape
        longest = (shape.max_model_len // shape.block_size + 1) * len(shape.groups)
        self._max_sessions = 0
        if script.sessions and shape.allows_sessions:
            self._max_sessions = min(script.max_sessions, shape.num_device_blocks // longest) or 1

    def run(self) -> Outcome:
        """Play the script. Raises Violation, or vLLM's own errors. Closes the world in any case."""
        world, script = self.world, self.script
        patience = _PATIENCE
        num_ended, last_end = 0, 0
        try:
            while self._num_added < script.num_requests or world.requests or world.has_work:
                before = self._progress()
                self._users()
                # From now on, slow copies and reads cannot be the reason of a standstill.
                hurry = patience < _PATIENCE // 2
                self._step(hurry)
                self._outcome.num_faults += world.disk.act(
                    self._rng, 1.0 if hurry else script.disk_speed, script.disk_faults
                )
                if hurry or not (world.requests or self._num_added < script.num_requests):
                    world.disk.finish()
                self._look()
                # A hang is no progress at all, or progress without end.
                patience = _PATIENCE if self._progress() != before else patience - 1
                assert patience, f"hang: {world.scheduler.requests} make no progress"
                if len(world.finished) > num_ended or not world.requests:
                    num_ended, last_end = len(world.finished), world.num_steps
                in_time = world.num_steps - last_end < _ENDURANCE
                assert in_time, f"hang: none of {list(world.requests)} ends"
            self._settle()
            faults = script.disk_faults
            may_be_off = faults.hang or faults.raised or faults.death or world.is_tier_reset
            if world.is_ours and not may_be_off and script.disk_speed >= 0.3:
                integrity.check_second_tier_is_on(world.connector.scheduler)
            world.check_at_rest()
            world.check_kept()
        except AssertionError as error:
            what = str(error) or "an assertion of vLLM"
            raise Violation(f"seed {script.seed}, step {world.num_steps}: {what}") from error
        finally:
            world.close()
        outcome = self._outcome
        outcome.num_steps = world.num_steps
        outcome.num_blocks_loaded = world.num_blocks_loaded
        outcome.num_requests = self._num_added
        outcome.num_finished = len(world.finished)
        outcome.num_read = world.disk.num_read
        devices = [rank.device for rank in world.ranks]
        outcome.num_holds = sum(device.num_holds for device in devices)
        outcome.num_holds_by_layer = sum(device.num_holds_by_layer for device in devices)
        return outcome

    def _step(self, hurry: bool) -> None:
        """As EngineCore does: no step where there is nothing to do."""
        world, script = self.world, self.script
        if self._states_rng.random() < script.disk_faults.freeze:
            world.wait(self._states_rng.choice([61.0, 3600.0]))
        if world.is_ours:
            integrity.set_compute_speed(world.connector.scheduler, script.compute_speed)
        if world.has_work:
            world.step(
                repeat_hooks=self._chance(script.faults.repeated_hooks),
                meanwhile=lambda rank: self._fate(rank, hurry),
            )
        else:
            world.wait()
        for rank in world.ranks:
            self._fate(rank, hurry)

    def _settle(self) -> None:
        """The steps of later requests end what a second tier has begun."""
        for _ in range(_PATIENCE):
            if not (self.world.has_disk_work or self.world.has_work):
                break
            self.world.disk.finish()
            self.world.step()
            for rank in self.world.ranks:
                self._fate(rank, hurry=True)

    # Users

    def _users(self) -> None:
        world, script = self.world, self.script
        self._pause()
        for request_id in [r for r in world.requests if world.requests[r].resumable]:
            self._resume(request_id)
        if self._states_rng.random() < 0.3:
            world.compile_grammar()
        goes_on = self._num_added < script.num_requests or (
            script.stream and self._num_added < 2 * script.num_requests and world.any_waits
        )
        may_add = goes_on and not self._weights_due
        if may_add and self._chance(script.arrivals):
            self._add_request()
        if world.requests and self._chance(script.aborts):
            world.abort(self._rng.choice(sorted(world.requests)))
        if self._chance(script.resets):
            self._reset()
        # As a weight update does: repeat until neither pool holds old blocks.
        idle = self._weights_due and not world.requests
        if idle and world.reset(tier=script.shape.keeps_on_reset):
            self._epoch += 1
            self._weights_due = False
            self._histories.clear()

    def _add_request(self) -> None:
        if self._prompts and self._chance(0.2):
            prompt, salt = self._rng.choice(self._prompts)
        elif self._histories and self._chance(0.4):
            prompt, salt = self._rng.choice(self._histories)
            prompt = prompt + self._prompt(1, 9)
        else:
            family = self._rng.choice(self._families)
            kept = len(family) if self._chance(0.8) else self._rng.randint(0, len(family))
            prompt = family[:kept] + self._prompt(1, 12)
            salt = self._rng.choice([None, None, "red", "blue"])
        max_tokens = self._rng.randint(1, self.script.max_answer_tokens)
        prompt = prompt[: self.script.shape.max_model_len - max_tokens - 1]
        request_id = f"r{self._num_added}"
        self._num_added += 1
        self._salts[request_id] = salt
        num_sub_blocks = self.script.shape.num_sub_blocks
        if num_sub_blocks > 1 and self._chance(0.3):
            host_block_size = num_sub_blocks * self.script.shape.block_size
            prompt = prompt[: max(1, len(prompt) // host_block_size) * host_block_size]
        if self.script.shape.match_unit is not None or num_sub_blocks > 1:
            self._prompts.append((prompt, salt))
        rng, is_session = self._wishes_rng, self._is_session()
        self.world.add_request(
            request_id,
            prompt,
            max_tokens,
            salt,
            self._epoch,
            wishes=wishes.draw(rng) if rng.random() < self.script.wishes else None,
            session_id=rng.choice(wishes.SESSIONS) if self.script.wishes else None,
            resumable=is_session,
            needs_grammar=self._states_rng.random() < self.script.grammars,
            reads_cache=self._readers_rng.random() >= self.script.unread,
            **self._inputs(prompt, is_session),
        )

    def _inputs(self, prompt: list[int], is_session: bool) -> dict[str, Any]:
        """What a request has beside tokens, as keywords of ``World.add_request``."""
        rng, script = self._inputs_rng, self.script
        pictures = pictures_in(prompt, rng)
        may_embed = not (pictures or is_session)
        return {
            "pictures": pictures,
            "adapter": rng.choice([None, *ADAPTERS]) if script.shape.max_loras else None,
            "as_embeddings": may_embed and rng.random() < script.embeddings,
        }

    def _is_session(self) -> bool:
        """Whether the request that comes is a session."""
        num_sessions = sum(each.resumable for each in self.world.requests.values())
        return (
            num_sessions < self._max_sessions and self._states_rng.random() < self.script.sessions
        )

    def _resume(self, session_id: str) -> None:
        """Maybe send more input to a session: mostly when it has answered. A session that has ended
        gets none, as vLLM would begin a new request."""
        session, rng = self.world.requests[session_id], self._states_rng
        waits = self.world.is_waiting_for_input(session_id)
        is_busy = session.streaming_queue or session.is_finished()
        if is_busy or rng.random() >= (0.3 if waits else 0.02):
            return
        tokens = self._prompt(1, 12)
        max_tokens = rng.randint(1, self.script.max_answer_tokens)
        most = self.script.shape.max_model_len - 1
        num_tokens = session.num_tokens + session.max_tokens + len(tokens) + max_tokens
        ends = self._weights_due or rng.random() < 0.2 or num_tokens > most
        tokens = [] if ends else tokens
        self.world.resume(session_id, tokens, max_tokens, pictures_in(tokens, self._inputs_rng))

    def _pause(self) -> None:
        """Maybe pause vLLM, or let it go on."""
        scheduler, rng = self.world.scheduler, self._states_rng
        if self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:
                scheduler.set_pause_state(PauseState.UNPAUSED)
        elif rng.random() < self.script.pauses:
            scheduler.set_pause_state(rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
            self._pause_left = rng.randint(1, 25)

    def _reset(self) -> None:
        world = self.world
        kind = self._rng.choice(["device", "both", "preempt", "weights"])
        if kind == "weights":
            self._weights_due = True
        elif kind == "preempt":
            # vLLM refuses this while requests wait for loads or blocks are held elsewhere.
            held = world.loading or world.ids_in_flight()
            held = held or world.connector.has_pending_push_work()
            if not held and not world.scheduler.defer_block_free:
                world.reset(tier=self._states_rng.random() < 0.3, preempt=True)
        else:
            world.reset(tier=kind == "both")

    # Fate

    def _fate(self, rank: Rank, hurry: bool) -> None:
        """Let the device run some of its queued work."""
        device, faults = rank.device, self.script.faults
        if self.world.can_open(rank) and (hurry or self._chance(self.script.opening)):
            self.world.open_chunk(rank, granted=not self._chance(faults.no_memory))
            self._outcome.num_opened += 1
        while not self._chance(self.script.lag) and device.compute_one():
            pass
        for direction in Direction:
            if self._chance(faults.thread_death):
                device.fatal[direction] += 1
                self._outcome.num_faults += 1
            while device.can_copy(direction) and (hurry or self._chance(self.script.copy_speed)):
                first = device.copies[direction][0]
                likely = faults.load_error if direction is Direction.LOAD else faults.store_error
                fail_after = None
                if not first.nearly_done and self._chance(likely):
                    fail_after = self._rng.randint(0, len(first.transfer.host_blocks))
                    self._outcome.num_faults += 1
                device.copy_one(direction, fail_after)

    # Looking

    def _look(self) -> None:
        world = self.world
        world.check_step()
        for request_id in sorted(set(world.finished) - self._seen):
            self._seen.add(request_id)
            world.check_finished(request_id)
            tokens, status = world.finished[request_id]
            story = world.stories[request_id]
            failed = status == RequestStatus.FINISHED_ERROR
            assert not failed or self._outcome.num_faults, f"{request_id} failed without a fault"
            if status in COMPLETE:
                history = story.tokens[: story.num_prompt_tokens] + tokens
                self._histories.append((history, self._salts[request_id]))

    def _progress(self) -> tuple[int, ...]:
        requests = self.world.requests.values()
        preemptions = [request.num_preemptions for request in requests]
        self._outcome.num_preemptions = max(self._outcome.num_preemptions, sum(preemptions))
        return (
            len(self.world.finished),
            self._num_added,
            *(request.num_computed_tokens for request in requests),
            *preemptions,
            *(len(c) for rank in self.world.ranks for c in rank.device.copies.values()),
            self.world.disk.num_read,
            self._outcome.num_opened,
        )

    def _prompt(self, least: int, most: int) -> list[int]:
        count = self._rng.randint(least, most) * self.script.stretch
        tokens = [self._rng.randrange(NUM_TOKENS) for _ in range(count)]
        rng = self._inputs_rng
        if rng.random() < self.script.pictures:
            start = rng.randrange(count)
            end = min(count, start + rng.randint(1, LONGEST_PICTURE))
            tokens[start:end] = [PICTURE] * (end - start)
        return tokens

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


def play(seed: int) -> Outcome:
    """Play the script of ``seed``. Raises Violation, whose message names the seed."""
    return Play(Script.draw(seed).with_one_chain()).run()
