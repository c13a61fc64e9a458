"""Scenes of vLLM's engine while copies fail, are late, or lose their threads. They run in a child
process, one after another on one engine."""

import logging
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.engine.compare import compare
from tests.engine.live import LiveEngine, clean_up_process
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.engine.workloads import shared_prefix_asks
from tests.faults.backend import Fault
from tests.faults.connector import SimpleCPUOffloadConnector
from tests.simulation import integrity

NEVER = 10**9
"""Number of polls of a transfer that ends only when it is waited for."""

OLD = shared_prefix_asks("old", seed=6, tails=3, max_tokens=12)
"""Requests of every scene: they hit on the device or the host, or are recomputed."""


def new_asks(number: int) -> tuple[Ask, ...]:
    """Requests of one scene only: their blocks have to be stored."""
    return shared_prefix_asks(
        f"new{number}", seed=100 + number, system_lengths=(140, 75), tails=2, max_tokens=6
    )


class ConnectorLog(logging.Handler):
    """Collects the connector's log messages in this process, from WARNING on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Stage(LiveEngine):
    """An engine with the connector with faults, and the right answers to its requests."""

    def __init__(self, spec: EngineSpec, expected: dict[str, Answer]) -> None:
        super().__init__(spec)
        self._expected = expected
        self._asked: set[str] = set()
        # Afterwards, since vLLM replaces all handlers when an engine starts.
        self._log = ConnectorLog()
        logging.getLogger("vllm.simple_offload").addHandler(self._log)
        assert self.offload is not None
        self.side = self.offload
        connector = get_kv_transfer_group()
        assert isinstance(connector, SimpleCPUOffloadConnector)
        self.connector, self.backend = connector, connector.faults
        self.inject = self.backend.set_plan

    def submit(self, asks: Iterable[Ask]) -> None:
        asks = tuple(asks)
        self._asked |= {ask.id for ask in asks}
        super().submit(asks)

    def abort_all(self) -> None:
        """Abort every open request."""
        self._asked -= {ask.id for ask in self._open.values()}
        self.llm.abort_request(list(self._open))
        self._open.clear()

    def store_old(self) -> None:
        """Let OLD be in the host tier and not on the device."""
        self.inject()
        self.play(OLD)
        self.reset_device()

    def num_in_flight(self) -> int:
        """Number of transfers that some rank has not reported."""
        return len(integrity.ids_in_flight(self.side))

    def num_loading(self) -> int:
        """Number of loads in flight."""
        return integrity.num_in_flight(integrity.loads_of(self.side))

    def num_storing(self) -> int:
        """Number of stores in flight."""
        return integrity.num_in_flight(integrity.stores_of(self.side))

    def is_copying_both_ways(self) -> bool:
        return bool(self.num_loading() and self.num_storing())

    def rest(self, *, num_errors: int = 0) -> list[str]:
        """Come to rest: every request has ended, with the right answer or in an error, and nothing
        is held. Returns the connector's log messages since the last rest."""
        self.step_until(lambda: not self._open)
        self.drain()
        answers, errors = self.answers, set(self.errors)
        assert answers.keys() | errors == self._asked
        assert len(self.errors) == len(errors) == num_errors
        assert answers.keys().isdisjoint(errors)
        found = compare({ask_id: self._expected[ask_id] for ask_id in answers}, answers)
        assert not found.wrong, "\n".join(found.wrong)
        assert not self.left(), self.left()
        messages = self._log.messages
        self.answers, self.errors, self._asked, self._log.messages = {}, [], set(), []
        assert not any("\n" in line for line in messages)
        return messages


def num_lines(log: Sequence[str], pattern: str) -> int:
    """Number of messages that have the pattern."""
    return sum(re.search(pattern, line) is not None for line in log)


def assert_every_failed_copy_is_named(stage: Stage, log: Sequence[str], least: int) -> None:
    """At least ``least`` copies of each direction have failed, and the log has each of them."""
    for kind in ("load", "store"):
        count = stage.backend.injected[f"{kind} fail"]
        assert count >= least
        assert num_lines(log, rf"^{kind} \d+ of \d+ blocks failed .*InjectedError") == count
        assert num_lines(log, rf"^{kind.title()} \d+ failed on a rank: ") == count


def failed_copies(stage: Stage) -> None:
    """Failed loads are recomputed."""
    stage.play(OLD)
    assert stage.rest() == []
    stage.reset_device()
    stage.inject(
        Fault("load", "fail", first=1, every=3),
        Fault("load", "fail", first=3, every=3, polls=3),
        Fault("store", "fail", first=2, every=3),
        Fault("store", "fail", first=3, every=3, polls=4),
    )
    stage.play((*OLD, *new_asks(1)))
    assert_every_failed_copy_is_named(stage, stage.rest(), least=3)


def late_copies(stage: Stage) -> None:
    stage.inject()
    stage.reset_device()
    stage.inject(
        Fault("load", "delay", every=1, polls=6), Fault("store", "delay", every=1, polls=9)
    )
    stage.play((*new_asks(2), *OLD))
    assert stage.rest() == []
    assert stage.backend.injected["load delay"] >= 3
    assert stage.backend.injected["store delay"] >= 3


STORES_HANG = Fault("store", "delay", every=1, polls=60)
LOADS_HANG = Fault("load", "delay", every=1, polls=60)


def resets_while_copying(stage: Stage) -> None:
    """vLLM refuses them. A store in flight at a reset of both tiers is not committed after it."""
    for number, both in ((3, False), (4, True)):
        num_cached = stage.side.tier.num_used
        stage.inject(STORES_HANG)
        stage.play(new_asks(number))
        assert stage.num_storing() > 0
        assert stage.reset(both=both) is False, "vLLM empties a cache whose blocks are being stored"
        assert stage.rest() == []
        assert stage.reset() is True
        assert both or stage.side.tier.num_used > num_cached
    assert stage.side.tier.num_used == 0

    stage.store_old()
    stage.inject(LOADS_HANG)
    stage.submit(OLD)
    stage.step_until(stage.num_loading)
    assert stage.reset(both=True) is False
    assert stage.rest() == []


def resets_of_running_requests(stage: Stage) -> None:
    """vLLM preempts them, but does not wait for transfers."""
    stage.store_old()
    stage.inject(STORES_HANG, LOADS_HANG)
    stage.submit((*new_asks(5), *OLD))
    stage.step_until(stage.is_copying_both_ways)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        stage.reset(both=True, running=True)
    assert stage.rest() == []

    stage.inject()
    stage.submit((*new_asks(6), *OLD))
    stage.step_until(lambda: len(stage.scheduler.running) > 1)
    stage.step_until(lambda: stage.num_in_flight() == 0)
    assert len(stage.scheduler.running) > 1
    assert stage.reset(both=True, running=True) is True
    assert stage.side.tier.num_used == 0
    assert stage.rest() == []


def a_pause_and_a_sleep_while_copying(stage: Stage) -> None:
    """A sleep is a pause. Transfers end meanwhile, and nothing else runs."""
    stage.store_old()
    stage.inject(
        Fault("load", "delay", every=1, polls=30), Fault("store", "delay", every=1, polls=5)
    )
    stage.submit((*OLD[:2], *new_asks(7), *OLD[2:]))
    stage.step_until(stage.is_copying_both_ways)
    # The only level on CPUs: vLLM pauses its scheduler, and keeps requests and caches.
    stage.core.sleep(level=0, mode="keep")
    assert stage.core.is_scheduler_paused()
    assert stage.num_in_flight() > 1
    # Only the connector's work keeps the engine stepping.
    while stage.scheduler.has_requests():
        assert stage.step() == 0
    assert stage.num_in_flight() == 0
    assert stage.core.wake_up(["scheduling"])
    assert stage.rest() == []


def aborts_while_copying(stage: Stage) -> None:
    stage.reset_device()
    stage.inject(
        Fault("load", "fail", first=1, every=2, polls=30),
        Fault("load", "delay", first=2, every=2, polls=30),
        Fault("store", "fail", every=1, polls=30),
    )
    stage.submit((*OLD[:2], *new_asks(8), *OLD[2:]))
    stage.step_until(stage.is_copying_both_ways)
    stage.abort_all()
    assert_every_failed_copy_is_named(stage, stage.rest(), least=1)
    stage.inject()
    stage.play(OLD)
    assert stage.rest() == []


def a_thread_that_dies(stage: Stage) -> None:
    """The host tier is switched off: no more copies."""
    stage.reset_device()
    stage.inject(Fault("load", "kill", first=2))
    stage.play((*OLD, *new_asks(9)))
    log = stage.rest()
    assert stage.backend.injected["load kill"] == 1
    assert num_lines(log, "^The load thread has died: no more copies$") == 1
    assert num_lines(log, r"^load \d+ of \d+ blocks failed .*SystemExit") == 1
    assert num_lines(log, "the host tier is switched off") == 1
    assert stage.side.tier.num_used == 0

    stage.inject()
    stage.reset_device()
    stage.play((*OLD, *new_asks(10)))
    assert stage.rest() == []
    assert set(stage.backend.num_copies.values()) == {0}
    assert stage.reset(both=True) is True, "a disabled tier prevents a reset"


def under_fail_a_failed_load_ends_its_request_in_an_error(stage: Stage) -> None:
    """Blocks that could not be read are not offered again."""
    stage.play(OLD)
    assert stage.rest() == []
    stage.reset_device()
    stage.inject(
        Fault("load", "fail", first=2),
        Fault("load", "fail", first=4, polls=3),
        Fault("store", "fail", every=2),
    )
    stage.play((*OLD, *new_asks(1)))
    stage.rest(num_errors=2)
    assert stage.backend.injected["load fail"] == 2

    stage.inject()
    stage.reset_device()
    stage.play((*OLD, *new_asks(2)))
    assert stage.rest() == []


def a_shutdown_waits_for_copies_under_way(stage: Stage) -> None:
    """The copies end only when waited for. Every engine here is shut down twice."""
    stage.reset_device()
    stage.inject(
        Fault("load", "delay", every=1, polls=NEVER), Fault("store", "delay", every=1, polls=NEVER)
    )
    stage.submit(new_asks(3)[:1])
    stage.step_until(stage.num_storing)
    stage.submit(OLD)
    stage.step_until(stage.num_loading)
    assert stage.is_copying_both_ways()
    stage.shut_down()
    stage.connector.shutdown()
    assert stage.backend.num_open == 0


Scene = Callable[[Stage], None]
RECOMPUTE: tuple[Scene, ...] = (
    failed_copies,
    late_copies,
    resets_while_copying,
    resets_of_running_requests,
    a_pause_and_a_sleep_while_copying,
    aborts_while_copying,
    a_thread_that_dies,
)
"""Scenes with the policy "recompute", in their order."""
FAIL: tuple[Scene, ...] = (
    under_fail_a_failed_load_ends_its_request_in_an_error,
    a_shutdown_waits_for_copies_under_way,
)
"""Scenes with the policy "fail", in their order."""


def play_plain(spec: EngineSpec) -> dict[str, Answer]:
    """The answers of an engine without the connector to the requests of all scenes."""
    engine = LiveEngine(spec)
    engine.play(OLD)
    for number in range(1, 11):
        engine.play(new_asks(number))
    engine.shut_down()
    clean_up_process()
    return engine.answers


def play_scenes(
    spec: EngineSpec, scenes: Sequence[Scene], expected: dict[str, Answer]
) -> dict[str, str | None]:
    """The problem of each scene that was played, or None; a problem ends the play."""
    problems: dict[str, str | None] = {}
    threads_before = set(threading.enumerate())
    stage = Stage(spec, expected)
    for scene in scenes:
        try:
            scene(stage)
        except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
            problems[scene.__name__] = traceback.format_exc()
            break
        problems[scene.__name__] = None
    stage.shut_down()
    stage.connector.shutdown()
    stage.shut_down()
    survivors = set(threading.enumerate()) - threads_before
    assert not survivors, survivors
    clean_up_process()
    return problems


def play_all(plain: EngineSpec, recompute: EngineSpec, fail: EngineSpec) -> dict[str, str | None]:
    """The problems of both policies' scenes."""
    expected = play_plain(plain)
    return play_scenes(recompute, RECOMPUTE, expected) | play_scenes(fail, FAIL, expected)
