"""Fetch ahead: what a request gets from the second tier, how long it waits, and whose bytes are
taken."""

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.fs import manager
from vllm.v1.request import Request

from simple_offload import metrics
from simple_offload.second_tier.second_tier import SecondTier
from tests.scheduler.work import count_work
from tests.second_tier.conftest import ROW_BYTES, Clock, MakeServer, Server
from tests.simulation.second_tier import DiskFaults, ScriptedDisk

MINUTE = 60.0


@pytest.fixture
def disk() -> ScriptedDisk:
    """Instead of files: it does what it is told when the test says so."""
    return ScriptedDisk()


def compute(server: Server, clock: Clock) -> None:
    """Let it know that compute takes a second for 250 tokens."""
    number = server.step(250)
    assert number is not None
    clock.now += 1
    server.second_tier.speeds.on_step_ended(number)


@pytest.fixture
def server(serve: MakeServer, disk: ScriptedDisk) -> Server:
    """A server with "abcdef" on that disk, and nothing in host memory."""
    server = serve(disk=disk)
    server.put_behind("abcdef")
    return server


def answer(server: Server) -> None:
    """Answer all questions."""
    server.behind.answer(random.Random(0), 1.0)


def end(server: Server, place: int = 0) -> None:
    """End the read or write at this place of those under way."""
    server.behind.end(server.behind.jobs[place], random.Random(0), DiskFaults())
    server.step()


def is_on(server: Server) -> bool:
    """Whether the tier is used."""
    return server.second_tier.is_on


def go_on(server: Server, clock: Clock, seconds: float) -> None:
    """The engine steps, and time passes."""
    for _ in range(int(seconds)):
        clock.now += 1
        server.step()


def begin(server: Server, prompt: str = "abcdef") -> Request:
    """A request that waits for reads under way."""
    request = server.request(prompt)
    assert server.ask(request)
    answer(server)
    server.step()
    assert server.ask(request)
    return request


def results(server: Server) -> dict[str, float]:
    """How requests came out of their waits."""
    counts = {
        result: server.counted(metrics.SECOND_TIER_LOOKUPS, result)
        for result in metrics.SERIES[metrics.SECOND_TIER_LOOKUPS].labels["result"]
    }
    return {result: count for result, count in counts.items() if count}


# Round trips


@pytest.mark.parametrize(
    ("windows", "fetched"), [((0,), "abcdef"), ((8,), "ef"), ((0, 8), "abcdeeff")]
)
def test_a_restarted_server_finds_what_the_first_one_wrote(
    serve: MakeServer, windows: tuple[int, ...], fetched: str
) -> None:
    """As much as a lookup needs, head first, and it is not written again."""
    first = serve(windows=windows)
    first.put("abcdef")
    first.settle()
    num_bytes = 6 * len(windows) * ROW_BYTES
    assert first.counted(metrics.SECOND_TIER_BYTES, "write") == num_bytes
    first.empty()
    assert (first.find("abcdefg"), first.fetch("abcdefg")) == (0, 6)
    first.stop()
    second = serve(windows=windows)
    assert second.fetch("abcdefg") == 6
    assert "".join(second.fetched) == fetched
    assert results(second) == {"hit": 1}
    assert second.counted(metrics.FETCHED) == len(fetched)
    assert second.counted(metrics.SECOND_TIER_BYTES, "read") == len(fetched) * ROW_BYTES
    second.settle()
    assert second.counted(metrics.SECOND_TIER_BYTES, "write") == 0
    assert second.num_pinned == 0


def test_servers_of_one_directory_find_each_others_objects(serve: MakeServer) -> None:
    one, two, other_model = serve(), serve(), serve(salt=b"\1" * 32)
    one.put("abc")
    two.put("abxy")
    one.settle()
    two.settle()
    assert (one.fetch("abxyz"), two.fetch("abcd")) == (4, 3)
    assert other_model.fetch("abc") == 0
    assert results(other_model) == {"miss": 1}


@pytest.mark.parametrize("windows", [(0,), (8,), (0, 8), (8, 12)])
def test_a_request_finds_what_memory_and_files_have_together(
    serve: MakeServer, windows: tuple[int, ...]
) -> None:
    rng, prompt = random.Random(0), "abcdefghijkl"
    server, both = (serve(windows=windows, num_blocks=40, salt=bytes([i] * 32)) for i in range(2))
    for _ in range(20):
        server.empty()
        server.put(prompt)
        server.settle()
        both.put(prompt)
        share = rng.random()
        for group in server.groups.ids:
            for key in server.keys(prompt, group):
                in_memory, in_file = rng.random() < share, rng.random() < share
                if not in_memory:
                    server.drop(key)
                if not in_file:
                    Path(*server.objects.paths([server.objects.name(key)])).unlink()
                if not in_memory and not in_file:
                    both.drop(key)
        assert server.fetch(prompt) == both.find(prompt)


def test_a_long_prompt_is_fetched_as_far_as_it_is_there(serve: MakeServer) -> None:
    """A request asks for the first blocks, and for the others if one is found."""
    prompt = "abcdefghijklmnopqrstuvwxyz"
    server = serve()
    server.put_behind(prompt)
    server.path(prompt[:24]).unlink()
    assert server.fetch(prompt) == 23
    assert server.fetch("xyz") == 0
    assert results(server) == {"hit": 1, "miss": 1}


def test_a_prompt_is_fetched_as_far_as_there_is_room(serve: MakeServer) -> None:
    """Its head, and what the tier has of it, which the request holds."""
    large = serve()
    large.put("abcdefgh")
    large.settle()
    small = serve(num_blocks=5)
    assert small.fetch("abcdefgh") == 5
    small.empty()
    small.put("abc")
    small.put("x")
    small.put("y")
    assert small.fetch("abcdefgh") == 5
    assert small.num_pinned == 0


def test_a_prompt_for_which_there_is_no_room_is_a_miss(
    serve: MakeServer, disk: ScriptedDisk
) -> None:
    """All host blocks are in use."""
    server = serve(disk=disk, num_blocks=8)
    server.put_behind("abcdef")
    others = server.fill()
    request = server.request("abcdef")
    assert server.ask(request)
    answer(server)
    server.step()
    assert not server.ask(request)
    assert results(server) == {"miss": 1}
    server.tier.unpin(others)


# Reads


def test_reads_that_overtake_each_other_are_found_head_first(
    serve: MakeServer, disk: ScriptedDisk
) -> None:
    """A read has up to 16 MiB."""
    server = serve(disk=disk, num_blocks=6, row_bytes=8 << 20)
    server.put_behind("abcdef")
    request = begin(server)
    found = []
    for place in (2, 0, 0):  # of those that are left: the last read, the first, the second
        end(server, place)
        found.append(server.find("abcdef"))
    assert found == [0, 2, 6]
    assert not server.ask(request)
    assert results(server) == {"hit": 1}


def test_requests_with_a_common_prefix_fetch_it_once(server: Server) -> None:
    first = begin(server)
    second = begin(server, "abcx")
    assert len(server.behind.jobs) == 1
    end(server)
    assert not server.ask(first)
    assert not server.ask(second)
    assert results(server) == {"hit": 2}
    assert server.counted(metrics.FETCHED) == 6


def test_a_prefix_is_fetched_for_a_request_whose_predecessor_was_aborted(server: Server) -> None:
    """The predecessor waited for its turn: 32 reads are under way at once."""
    others = [chr(256 + number) for number in range(32)]
    for prompt in others:
        server.put_behind(prompt)
    first, second = [begin(server, prompt) for prompt in (*others, "abcdef", "abcdef")][-2:]
    assert len(server.behind.jobs) == 32
    server.finish(first)
    while server.ask(second):
        server.behind.drain_jobs()
        server.step()
    assert server.find("abcdef") == 6


def test_what_others_have_computed_meanwhile_is_not_taken(server: Server) -> None:
    """The tier has got the first blocks, and only the device has the fourth."""
    request = begin(server)
    server.put("abc")
    server.on_device.add(server.keys("abcd")[-1])
    end(server)
    assert not server.ask(request)
    assert (server.tier.num_used, server.counted(metrics.FETCHED)) == (5, 2)
    assert (server.find("abcdef"), server.num_pinned) == (3, 0)


def test_answers_are_there_when_vllm_comes_to_the_request(server: Server) -> None:
    server.put("a")
    request, other = server.request("abcdef"), server.request("abx")
    for each in (request, other):
        server.second_tier.on_new_request(each)
    answer(server)
    server.step()
    assert server.ask(request)
    server.step()
    assert server.num_pinned == 6  # of the hit, and of a read
    server.behind.drain_jobs()
    server.step()
    assert not server.ask(request)
    for each in (request, other):
        server.finish(each)
    assert not server.behind.asked
    assert results(server) == {"hit": 1}


# Bad objects


def cut_off(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def turn_into_a_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def flip_a_bit(place: int) -> Callable[[Path, Path], None]:
    def flip(path: Path, other: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return flip


SPOILING: dict[str, Callable[[Path, Path], Any]] = {
    "missing": lambda path, other: path.unlink(),
    "short": cut_off,
    "empty": lambda path, other: path.write_bytes(b""),
    "foreign": lambda path, other: path.write_bytes(other.read_bytes()),
    "damaged": flip_a_bit(100),
    "damaged seal": flip_a_bit(-1),
    "unreadable": turn_into_a_folder,
}


@pytest.mark.proves("I10")
@pytest.mark.parametrize("spoiled", SPOILING)
def test_a_bad_object_ends_what_is_fetched(
    serve: MakeServer, clock: Clock, spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is bad when it is read, and was there when asked for. What can be read is removed."""
    server = serve()
    server.put_behind("abcdef")
    path, read = server.path("abc"), server.objects.read

    def spoil_and_read(*arguments: Any) -> int:
        SPOILING[spoiled](path, server.path("abcd"))
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(server.objects, "read", spoil_and_read)
        assert server.fetch("abcdef") == 2
    assert server.counted(metrics.SECOND_TIER_FAILED, "read") == 1
    assert results(server) == {"miss": 1}
    assert server.num_pinned == 0
    server.tidy()
    if spoiled == "unreadable":
        path.rmdir()
    assert not path.exists()
    server.put("abc")  # computed, and written again
    server.settle()
    assert path.stat().st_size == ROW_BYTES
    server.empty()
    clock.now += 5 * MINUTE - 1
    assert server.fetch("abcdef") == 2
    clock.now += 1
    assert server.fetch("abcdef") == 6


def test_an_object_that_cannot_be_read_stays(
    serve: MakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error may pass: a network file system, or too many open files."""
    server = serve()
    server.put_behind("abc")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "it passes")

    with monkeypatch.context() as patched:
        patched.setattr(manager, "batch_load_block", fail)
        assert server.fetch("abc") == 0
    assert server.counted(metrics.SECOND_TIER_FAILED, "read") == 1
    clock.now += 5 * MINUTE
    assert server.fetch("abc") == 3


def test_an_object_that_is_read_is_not_asked_for(server: Server) -> None:
    """vLLM's fs tier raises an exception if the read fails before it has answered."""
    first, second = begin(server), server.request("abcdefg")
    server.second_tier.on_new_request(second)
    assert server.ask(second)
    assert server.behind.asked == {
        second.request_id: {server.objects.name(server.keys("abcdefg")[-1])}
    }
    server.behind.end(server.behind.jobs[0], random.Random(0), DiskFaults(vanished=1.0))
    server.step_until(lambda: not (server.ask(first) or server.ask(second)))
    assert is_on(server)
    assert results(server) == {"miss": 2}


def test_what_another_request_gives_up_is_asked_for(serve: MakeServer, disk: ScriptedDisk) -> None:
    """Not read at once: a third request may have asked for it, and have no answer."""
    server = serve(disk=disk, num_blocks=8)
    server.put_behind("abcdef")
    others = server.fill()
    first, second, third = map(server.request, ("abcdef", "abcdefg", "abcdefh"))
    assert server.ask(first)
    answer(server)
    assert server.ask(first)
    assert server.ask(second)  # for "g" only
    server.step()  # there is no room for the first one's objects
    answer(server)
    server.second_tier.on_new_request(third)
    server.tier.unpin(others)
    assert server.ask(second)
    server.step()
    assert not server.behind.jobs
    answer(server)
    server.step()
    server.behind.end(server.behind.jobs[0], random.Random(0), DiskFaults(vanished=1.0))
    server.step_until(lambda: not (server.ask(first) or server.ask(second)))
    assert is_on(server)


# How long a request waits


@pytest.mark.proves("I10")
@pytest.mark.parametrize("late", ["answers", "reads"])
def test_a_request_goes_on_when_its_time_is_over(server: Server, clock: Clock, late: str) -> None:
    """Blocks that come later are there for the next request."""
    request = server.request("abcdef")
    assert server.ask(request)
    if late == "reads":
        answer(server)
        server.step()
        assert server.num_pinned == 6
    clock.now += 0.99
    assert server.ask(request)
    clock.now += 0.01
    assert not server.ask(request)
    assert not server.ask(request)  # in a later step: it waits once
    assert results(server) == {"late": 1}
    if late == "reads":
        assert (server.num_pinned, server.find("abcdef")) == (6, 0)
        end(server)
        assert server.find("abcdef") == 6
    server.finish(request)
    assert server.fetch("abcdef") == 6
    assert server.second_tier.idle
    assert server.num_pinned == 0


def test_a_slow_tier_is_asked_once_a_minute(server: Server, clock: Clock) -> None:
    """Compute takes 0.1 s for this prompt, and a fetch a second."""
    compute(server, clock)

    def fetch_slowly() -> None:
        server.empty()
        request = begin(server)
        clock.now += 1
        assert not server.ask(request)
        end(server)

    fetch_slowly()
    gauges = server.second_tier.gauges()
    assert gauges[metrics.SECOND_TIER_ON] == 0
    assert gauges[metrics.FETCH_SPEED] == pytest.approx(24)
    assert gauges[metrics.COMPUTE_SPEED] == pytest.approx(250)
    server.empty()
    assert server.fetch("abcdef") == 0
    assert results(server) == {"late": 1, "slower": 1}
    clock.now += MINUTE
    fetch_slowly()
    assert results(server) == {"late": 2, "slower": 1}


def test_a_fetch_counts_for_what_it_reads_itself(server: Server, clock: Clock) -> None:
    """Not for the blocks that another request has been waiting for."""
    server.put_behind("abcdefg")
    begin(server, "abcdef")
    clock.now += 0.9
    second = begin(server, "abcdefg")
    end(server, 1)
    clock.now += 0.1
    end(server)
    assert not server.ask(second)
    assert server.second_tier.speeds.fetch == pytest.approx(28, rel=0.05)  # tokens in a second


def test_answers_that_never_come_are_waited_for_once_a_minute(server: Server, clock: Clock) -> None:
    """The tier stays on: they may come again."""
    compute(server, clock)

    def waits() -> bool:
        request = server.request("abcdef")
        has_waited = server.ask(request)
        go_on(server, clock, 1)
        assert not server.ask(request)
        server.finish(request)
        return has_waited

    for _ in range(3):
        assert [waits(), waits()] == [True, False]
        go_on(server, clock, MINUTE)
    assert is_on(server)
    assert server.fetch("abcdef") == 6
    assert results(server) == {"late": 3, "slower": 3, "hit": 1}


def test_no_request_waits_for_ever_for_answers(
    serve: MakeServer, disk: ScriptedDisk, clock: Clock
) -> None:
    """Even if it is told to wait, however slow the tier is."""
    server = serve(disk=disk, always=True)
    request = server.request("abcdef")
    go_on(server, clock, 1)
    assert server.ask(request)
    go_on(server, clock, MINUTE - 1)
    assert server.ask(request)
    go_on(server, clock, 1)
    assert not server.ask(request)
    assert results(server) == {"late": 1}


@pytest.mark.parametrize(
    "method", ["lookup", "submit_load", "submit_store", "get_finished_jobs", "on_schedule_end"]
)
def test_a_tier_that_raises_is_switched_off(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    method: str,
) -> None:
    """As vLLM's obj tier does where NIXL has no telemetry. The server goes on, and tries it again,
    unless it may still touch host blocks."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the tier")

    server.empty()
    monkeypatch.setattr(server.behind, method, fail)
    server.put("xyz")
    request = server.request("abcdef")
    for _ in range(4):
        server.ask(request)
        answer(server)
        server.step()
        if server.behind.jobs:
            end(server)
    assert not server.ask(request)
    server.finish(request)
    assert not server.behind.asked, "it would keep the answers for ever"
    assert not is_on(server)
    assert "a bug of the tier" in caplog.text
    assert "has failed and is switched off" in caplog.text
    assert not server.second_tier.has_pending_work
    server.put("uvw")
    server.step()
    assert not server.ask(server.request("abcdef"))
    monkeypatch.undo()
    monkeypatch.setattr(SecondTier, "clock", staticmethod(clock))
    server.behind.drain_jobs()
    go_on(server, clock, MINUTE)
    assert is_on(server) == (method not in {"submit_load", "submit_store"})


def test_a_request_waits_for_a_slow_tier_if_it_is_told_to(
    serve: MakeServer, server: Server, disk: ScriptedDisk, clock: Clock
) -> None:
    server = serve(disk=disk, always=True)
    for _ in range(3):
        server.step(250)
        clock.now += 0.1
        server.step()
        request = begin(server)
        clock.now += MINUTE - 1
        assert server.ask(request)
        end(server)
        assert not server.ask(request)
        server.empty()
    assert results(server) == {"hit": 3}
    assert server.second_tier.gauges()[metrics.SECOND_TIER_ON] == 1


# Many requests


def lines_of_steps(serve: MakeServer, num_requests: int, *, abort: bool) -> float:
    """Lines of Python for a step with ``num_requests`` waiting requests; or for their end."""
    disk = ScriptedDisk()
    server = serve(disk=disk, always=True, num_blocks=4 * num_requests + 8)
    requests = [server.request(3 * chr(256 + number)) for number in range(num_requests)]
    for request in requests:
        for key in server.groups.keys(request.block_hashes, 0):
            disk.objects[server.objects.name(key)] = bytes(ROW_BYTES)

    def step() -> None:
        server.second_tier.on_lookup()
        for request in requests:
            server.second_tier.must_wait(request, 0, 0)
        server.second_tier.on_step(0)

    def end() -> None:
        for request in requests:
            server.second_tier.on_request_finished(request.request_id)

    step()
    answer(server)
    step()
    work = count_work(end if abort else step)
    end()
    server.behind.drain_jobs()
    server.settle()
    return work.lines


@pytest.mark.parametrize("abort", [False, True])
def test_a_step_costs_as_much_for_each_request_that_waits(serve: MakeServer, abort: bool) -> None:
    """After a restart all sessions come back at once."""
    few, some, many = (lines_of_steps(serve, count, abort=abort) for count in (20, 40, 80))
    assert (many - some) / 40 < 1.25 * (some - few) / 20


# Tiers that fail and hang


def killed(*_: object) -> None:
    """What is asked of a process that has ended."""
    raise EOFError("killed")


@pytest.mark.parametrize("prompt", ["abcdef", "abcdefgh"])
def test_a_request_comes_to_an_engine_whose_helper_died_while_it_was_idle(
    server: Server, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    """All of its prompt may be in host memory: then it has asked nothing."""
    server.put("abcdef")
    server.settle()
    monkeypatch.setattr(server.connection, "receive", killed)
    request = server.request(prompt)
    assert not server.ask(request)
    assert not is_on(server)
    server.finish(request)


def test_an_exception_of_ours_closes_the_tier(
    server: Server, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Here vLLM's tier tells of the end of a job that it was never given."""
    request = begin(server)
    server.behind.get_finished_jobs = lambda: [JobResult(7777, success=True)]  # type: ignore[method-assign]
    server.step()
    assert not server.ask(request)
    server.finish(request)
    go_on(server, clock, 3 * MINUTE)
    second_tier = server.second_tier
    assert (is_on(server), second_tier.has_pending_work) == (False, False)
    assert caplog.text.count("is off until the server starts again") == 1
    server.put("xyz")
    server.step()


def test_without_its_process_the_tier_is_off_until_it_gets_another_one(
    server: Server,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may be killed for memory. Nothing waits for its answers, and no block is held."""
    server.connection.is_held = True
    request = begin(server)
    server.put("xyz")
    server.step()  # three blocks wait for seals
    end(server)  # six for a check
    assert server.num_pinned == 6
    with monkeypatch.context() as patched:
        patched.setattr(server.connection, "receive", killed)
        server.step()
    assert not server.ask(request)
    assert (server.num_pinned, server.find("abcdef")) == (0, 0)
    assert (is_on(server), server.second_tier.idle) == (False, True)
    assert "process has failed: killed" in caplog.text
    assert "has failed and is switched off" in caplog.text
    server.connection.is_held = False
    go_on(server, clock, MINUTE)
    assert is_on(server)
    assert server.connection.patience == 0, "the engine waits for the process"
    assert server.fetch("abcdef") == 6, "its objects were not the trouble"
    assert server.counted(metrics.SECOND_TIER_FAILED, "read") == 0


@pytest.mark.parametrize("waits_for", ["seals", "a check"])
def test_a_tier_whose_helper_does_not_answer_is_switched_off(
    server: Server, clock: Clock, waits_for: str
) -> None:
    """Even while vLLM's tier goes on. Blocks that wait for a check are held until it is made."""
    server.connection.is_held = True
    if waits_for == "seals":
        server.put("xyz")
        server.step()
    else:
        begin(server)
        end(server)
    go_on(server, clock, MINUTE - 1)
    assert is_on(server)
    go_on(server, clock, 1)
    assert not is_on(server)
    assert server.num_pinned == (0 if waits_for == "seals" else 6)
    server.connection.release()
    server.step()
    assert server.num_pinned == 0


@pytest.mark.parametrize("always", [False, True])
def test_no_request_waits_for_ever_for_one_read_that_hangs(
    serve: MakeServer, disk: ScriptedDisk, clock: Clock, always: bool
) -> None:
    """Even if it is told to wait. Other reads go on, and so does the tier."""
    server = serve(disk=disk, always=always)
    server.put_behind("abcdef")
    server.put_behind("xyz")
    first = begin(server)
    for second in range(61):
        if second == 59:
            assert server.ask(first) == always
        other = begin(server, "xyz")
        end(server, 1)
        clock.now += 1
        server.finish(other)
        server.empty()
    later = server.request("abcdef")
    assert not server.ask(later)
    assert not server.ask(first)
    assert is_on(server)
    server.finish(later)
    server.behind.drain_jobs()
    server.step()
    assert server.find("abcdef") == 6


@pytest.mark.parametrize("hangs", ["reads", "writes"])
def test_a_tier_that_hangs_is_switched_off(
    server: Server, clock: Clock, hangs: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on at their time limits. Blocks of a read are held until it ends after all."""
    if hangs == "writes":
        server.put("xyz")
        server.step()  # sealed
        server.step()
    else:
        request = begin(server)
        clock.now += 1
        assert not server.ask(request)
        server.finish(request)
    go_on(server, clock, 58)
    assert is_on(server)
    waiting = server.request("abcdef")
    assert server.ask(waiting)
    go_on(server, clock, 2)
    second_tier = server.second_tier
    assert (is_on(server), second_tier.has_pending_work) == (False, False)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "is switched off" in caplog.text
    assert second_tier.gauges()[metrics.SECOND_TIER_ON] == 0
    assert not server.ask(waiting)
    assert not server.ask(server.request("abc"))
    server.put("uvw")
    server.step()
    assert (second_tier.idle, server.num_pinned) == (False, 6 if hangs == "reads" else 0)
    go_on(server, clock, 2 * MINUTE)
    assert not is_on(server)
    server.behind.drain_jobs()
    server.step()
    assert second_tier.idle
    assert server.num_pinned == 0
    assert server.find("abcdef") == (6 if hangs == "reads" else 0)
    server.step()
    assert is_on(server), "it answers again"
    server.empty()
    server.behind.drain_jobs()
    assert server.fetch("abcdef") == 6


def test_nothing_is_begun_after_the_tier_has_raised_an_exception(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same step: it would never end."""
    server.put_behind("uvw")
    server.put("xyz")
    server.step()  # sealed
    requests = [server.request("abcdef"), server.request("uvw")]
    assert server.ask(requests[0])
    answer(server)
    assert all(map(server.ask, requests))  # the first one's objects are known

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the tier")

    with monkeypatch.context() as patched:
        patched.setattr(server.behind, "lookup", fail)
        server.step()
    assert (server.num_pinned, server.behind.jobs) == (0, [])
    go_on(server, clock, MINUTE + 1)
    assert is_on(server)


@pytest.mark.parametrize("seconds", [MINUTE, 60 * MINUTE])
def test_an_engine_that_stands_still_does_not_switch_the_tier_off(
    server: Server, disk: ScriptedDisk, clock: Clock, seconds: float
) -> None:
    """A pause that keeps requests, a compilation, a frozen container. The disk answers at once, and
    the engine asks again after the first answers. Nor does it think the tier slow."""
    requests = [server.request(prompt) for prompt in ("abcdef", "a" * 40)]
    assert all(map(server.ask, requests))
    server.step()
    for _ in range(3):
        answer(server)
        clock.now += seconds
        for request in requests:
            server.ask(request)
        server.step()
        assert is_on(server)
    assert server.second_tier.speeds.answer is not None
    assert server.second_tier.speeds.answer < MINUTE


# Reset


@pytest.mark.parametrize("during", ["rest", "answers", "reads", "seals", "writes"])
def test_nothing_of_before_a_reset_is_found(
    server: Server, disk: ScriptedDisk, during: str
) -> None:
    """Nor what was being asked for, read or written."""
    request = server.request("abcdef")
    if during in {"answers", "reads"}:
        assert server.ask(request)
        if during == "reads":
            answer(server)
            server.step()
            assert server.num_pinned == 6
    elif during in {"seals", "writes"}:
        server.put("uvwxyz")
        server.step()
        if during == "writes":
            server.step()
    server.tier.reset()
    server.second_tier.reset()
    num_written = len(disk.objects)
    server.behind.drain_jobs()
    server.step()
    for prompt in ("abcdef", "uvwxyz"):
        assert server.fetch(prompt) == 0
    assert not server.ask(request)
    assert server.find("abcdef") == 0
    server.finish(request)
    server.settle()
    assert server.num_pinned == 0
    server.put_behind("abc")
    assert server.fetch("abcdef") == 0
    num_under_way = 6 if during == "writes" else 0
    assert len(disk.objects) == num_written + num_under_way, "nobody could find what is written"
    assert not server.second_tier.has_pending_work
