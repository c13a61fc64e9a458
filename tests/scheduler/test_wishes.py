"""What requests wish for: parsed without harm, and followed."""

import gc
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simple_offload.scheduler.wishes import NO_WISHES, Wishbook, Wishes
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, make_request, prompt
from tests.simulation.integrity import set_clock

SETTINGS = pytest.mark.parametrize("lazy", [None, True, False])
WINDOWS = pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
PRIVATE = {"store": False}
PRIVATE_WISHES = Wishes(store=False)
_REQUEST = make_request("a", [1, 2])  # too short for a hash


def parse(given: Any, allow_reports: bool = True) -> Wishes:
    """The wishes of a request with this value of ``simple_offload``."""
    _REQUEST.kv_transfer_params = {"simple_offload": given}  # vLLM 0.32 refuses long integers
    return Wishbook(allow_reports=allow_reports).of(_REQUEST)


# Parsing


@pytest.mark.parametrize(
    ("given", "wishes"),
    [
        ({}, NO_WISHES),
        (None, NO_WISHES),
        ({"store": True, "protect": None, "release": False}, NO_WISHES),
        ({"store": False, "report": True}, Wishes(store=False, report=True)),
        ({"protect": "1s"}, Wishes(protect=1.0)),
        ({"protect": "5m", "release": True}, Wishes(protect=300.0, release=True)),
        ({"protect": "24h"}, Wishes(protect=86400.0)),
    ],
    ids=str,
)
def test_right_wishes(given: Any, wishes: Wishes, caplog: pytest.LogCaptureFixture) -> None:
    assert parse(given) == wishes
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "wishes", "said"),
    [
        ({"protct": "5m"}, NO_WISHES, ["'protct'", "store, protect, release", "Nearest: protect"]),
        ({"x" * 500: 1}, NO_WISHES, ["'xxx", "..."]),
        ({"protect": 300}, NO_WISHES, ["protect", "300", '"1s" to "24h"']),
        ({"protect": "25h"}, NO_WISHES, ["'25h'"]),
        ({"protect": "0s"}, NO_WISHES, ["'0s'"]),
        ({"protect": "-5m"}, NO_WISHES, ["'-5m'"]),
        ({"protect": "\N{ARABIC-INDIC DIGIT FIVE}m"}, NO_WISHES, ["protect"]),
        ({"report": "true"}, NO_WISHES, ["report", "'true'", "true or false"]),
        ({"release": 1}, NO_WISHES, ["release", "1", "true or false"]),
        ({"store": "no\n"}, Wishes(store=False), ["counts as false", r"'no\n'"]),
        ({"store": 10**5000}, Wishes(store=False), ["a value of type int"]),
        (["store"], PRIVATE_WISHES, ["a value of type list", "an object with store, protect"]),
        (dict.fromkeys("abcdefghijklmnopq", 1), PRIVATE_WISHES, ["an object with 17 keys"]),
    ],
    ids=[*range(13)],
)
def test_wrong_wishes_are_ignored_but_for_store(
    given: Any, wishes: Wishes, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm"):
        assert parse(given) == wishes
    (message,) = caplog.messages
    assert message.startswith("A request's kv_transfer_params.simple_offload ")
    assert all(part in message for part in said), message
    assert len(message) < 300
    assert "\n" not in message


def test_a_server_warns_once_of_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    book = Wishbook(allow_reports=False)
    wrong = [{"a": 1}, {"b": 1}, {"protect": 1}, {"protect": 2}, {"store": 1}, {"store": 0}, 1, 2]
    wrong += [{"report": True}, {"report": True}]
    with caplog.at_level(logging.WARNING, "vllm"):
        for number, given in enumerate(wrong):
            params = {"kv_transfer_params": {"simple_offload": given}}
            request = make_request(str(number), [1, 2], extra_args=params)
            assert book.of(request) == book.of(request)
    assert len(caplog.messages) == 5


class Counted(Mapping[str, Any]):
    """A mapping that counts the keys that are looked at."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self.contents = contents
        self.num_looked_at = 0

    def __getitem__(self, key: str) -> Any:
        self.num_looked_at += 1
        return self.contents[key]

    def __iter__(self) -> Iterator[str]:
        for key in self.contents:
            self.num_looked_at += 1
            yield key

    def __len__(self) -> int:
        return len(self.contents)


@pytest.mark.parametrize("num_keys", [16, 1_000, 50_000])
def test_the_cost_does_not_grow_with_the_keys(num_keys: int) -> None:
    given = Counted({"store": False} | {f"{number:x}": 1 for number in range(1, num_keys)})
    assert not parse(given).store
    assert given.num_looked_at <= 8


@pytest.mark.parametrize("params", [None, {}, "text", 7, ["simple_offload"], {"simple": {}}])
def test_requests_of_others_have_no_wishes(params: Any) -> None:
    extra_args = None if params is None else {"kv_transfer_params": params}
    book = Wishbook(allow_reports=True)
    assert book.of(make_request("a", [1, 2], extra_args=extra_args)) is NO_WISHES


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_KEYS = st.sampled_from(["store", "protect", "release", "report"]) | st.text() | st.integers()
_JSON = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(_JSON | st.dictionaries(_KEYS, _JSON))
def test_nothing_that_a_client_sends_raises(given: Any) -> None:
    wishes = parse(given)
    is_read = given is None or (isinstance(given, dict) and len(given) <= 16)
    asked = (given or {}).get("store") if is_read else False
    assert wishes.store == (asked is None or asked is True)
    assert 0 <= wishes.protect <= 86400


# store


@SETTINGS
@WINDOWS
@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_of_a_private_request_is_stored(
    roomy: MakeDriver, windows: tuple[int, ...], lazy: bool | None, aborted: bool
) -> None:
    """Nor when a private request hits it on the device; nor its last block, nor a window."""
    driver = roomy(windows, lazy=lazy, max_num_batched_tokens=8)
    if aborted:
        driver.start("a", prompt(30), max_tokens=9, wishes=PRIVATE)
        driver.step(6)
        driver.world.abort("a")
        driver.run()
    else:
        history = driver.serve("a", prompt(30), max_tokens=9, wishes=PRIVATE)
        driver.serve("b", [*history, *prompt(9, family=1)], max_tokens=2, wishes=PRIVATE)
    assert driver.num_stored == 0
    driver.evict_all()
    assert driver.found(prompt(30)) == 0


@SETTINGS
@pytest.mark.parametrize("num_sub_blocks", [1, 2])
def test_what_another_request_hits_is_stored_for_that_one(
    roomy: MakeDriver, lazy: bool | None, num_sub_blocks: int
) -> None:
    driver = roomy(lazy=lazy, num_sub_blocks=num_sub_blocks)
    history = driver.serve("a", prompt(29), max_tokens=8, wishes=PRIVATE)
    driver.serve("b", [*prompt(17), *prompt(9, family=1)], max_tokens=8)
    driver.evict_all()
    assert driver.found(history) == 16
    assert driver.found([*prompt(17)[:16], *prompt(17)[16:], *prompt(9, family=1)]) == 24


@SETTINGS
def test_a_private_request_loads_what_others_have_left(
    roomy: MakeDriver, lazy: bool | None
) -> None:
    driver = roomy(lazy=lazy)
    driver.serve("a", prompt(21))
    driver.evict_all()
    history = driver.serve("b", [*prompt(20), *prompt(9, family=1)], max_tokens=8, wishes=PRIVATE)
    assert driver.world.num_blocks_loaded == 5
    driver.evict_all(first=70)
    assert driver.found(history) == 20


def test_private_requests_do_not_count_for_the_threshold(roomy: MakeDriver) -> None:
    driver = roomy(store_threshold=2)
    for name, wishes in (("a", PRIVATE), ("b", None), ("c", PRIVATE)):
        driver.serve(name, prompt(21), wishes=wishes)
    assert driver.num_stored == 0
    driver.serve("d", prompt(21))
    driver.evict_all()
    assert driver.found(prompt(21)) == 20


# protect and release


def small(drive: MakeDriver, lazy: bool | None) -> Driver:
    """A driver whose tier may protect up to 10 blocks."""
    return drive(lazy=lazy, num_device_blocks=24, num_host_blocks=41)


@pytest.mark.proves("I7")
@SETTINGS
@pytest.mark.parametrize("wishes", [None, {"protect": "5m"}, {"protect": "5m", "store": False}])
def test_what_is_protected_outlives_what_comes_once(
    drive: MakeDriver, lazy: bool | None, wishes: Any
) -> None:
    driver, now = small(drive, lazy), 0.0
    set_clock(driver.scheduler, lambda: now)
    driver.serve("a", prompt(21), wishes=wishes)
    driver.fill(30)
    kept = 20 if wishes == {"protect": "5m"} else 0
    assert driver.found(prompt(21)) == kept
    now = 299.0
    driver.fill(30, first=100)
    assert driver.found(prompt(21)) == kept
    now = 300.0
    driver.fill(60, first=130)
    assert driver.found(prompt(21)) == 0
    assert driver.tier.num_reserved == 0


@SETTINGS
def test_a_protected_answer_is_kept_with_the_prefix_that_it_continues(
    drive: MakeDriver, lazy: bool | None
) -> None:
    """Also what other requests have left, and the last block, which has no hash on the device."""
    driver = small(drive, lazy)
    driver.serve("a", prompt(13))
    history = driver.serve("b", prompt(14), max_tokens=11, wishes={"protect": "5m"})
    driver.fill(30)
    assert driver.found([*history, 0]) == 24


@SETTINGS
def test_protection_takes_no_more_than_its_share(drive: MakeDriver, lazy: bool | None) -> None:
    """Of what all want protected, the last is kept. What others hit is protected beside it."""
    driver = small(drive, lazy)
    driver.serve("found", prompt(21, family=90))
    for family in range(9):
        driver.serve(f"{family}", prompt(21, family), wishes={"protect": "24h"})
        driver.serve(f"found {family}", prompt(21, family=90))
    driver.fill(5)
    assert driver.tier.num_reserved <= 10
    assert driver.found(prompt(21, family=90)) == 20
    assert driver.found(prompt(21, family=8)) == 20


RELEASE = {"release": True}


@pytest.mark.parametrize("lazy", [None, True])
@pytest.mark.parametrize("is_hit", [False, True])
def test_in_a_full_tier_what_is_released_is_stored_only_after_a_hit(
    drive: MakeDriver, lazy: bool | None, is_hit: bool
) -> None:
    driver = small(drive, lazy)
    driver.fill(30)
    driver.serve("a", prompt(21), wishes=RELEASE)
    if is_hit:
        driver.serve("b", prompt(21))
    driver.fill(6, first=100)
    assert driver.found(prompt(21)) == (20 if is_hit else 0)


def test_a_release_ends_what_its_session_wants_protected(drive: MakeDriver) -> None:
    driver = small(drive, None)
    driver.serve("a", prompt(21), session_id="s", wishes={"protect": "5m"})
    driver.serve("other", prompt(21), session_id="t", wishes={"protect": "5m"})
    driver.serve("b", prompt(21, 1), session_id="s", wishes=RELEASE)
    assert driver.tier.num_reserved == 5
    driver.serve("c", prompt(21, 2), session_id="t", wishes=RELEASE)
    assert driver.tier.num_reserved == 0


@pytest.fixture
def wide(drive: MakeDriver) -> MakeDriver:
    """Drivers with a tier for all that a test stores, and in it a prompt that is older."""

    def make(lazy: bool | None) -> Driver:
        driver = drive(lazy=lazy, num_device_blocks=24, num_host_blocks=300)
        driver.serve("old", OLD)
        driver.fill(6, first=40)
        return driver

    return make


OLD = prompt(21, 30)


def released(driver: Driver, tokens: list[int]) -> list[int]:
    """Places of the tokens' blocks that leave the tier before what is older. Ends the test."""
    driver.fill(6, first=50)
    keys = driver.scheduler.groups.keys(make_request("looker", tokens).block_hashes, 0)
    assert all(driver.tier.has(key) for key in keys)
    while driver.found(OLD) == 20:
        driver.tier.unpin(driver.tier.allocate(driver.tier.num_empty + 1))
    return [place for place, key in enumerate(keys) if not driver.tier.has(key)]


@SETTINGS
@pytest.mark.parametrize("wishes", [None, RELEASE])
def test_what_is_released_leaves_first(wide: MakeDriver, lazy: bool | None, wishes: Any) -> None:
    """Of what the tier has by then. The second request hits it, which protects it otherwise."""
    driver = wide(lazy)
    driver.serve("a", prompt(21), session_id="s")
    driver.fill(6, first=60)
    driver.serve("b", prompt(21), session_id="s", wishes=wishes)
    assert released(driver, prompt(21)) == ([*range(5)] if wishes else [])


@SETTINGS
def test_a_release_counts_for_what_the_tier_gets_later(wide: MakeDriver, lazy: bool | None) -> None:
    """Stores are in flight when the request ends, or they start only before eviction."""
    driver = wide(lazy)
    driver.serve("a", prompt(21), wishes=RELEASE)
    assert released(driver, prompt(21)) == [*range(5)]


@SETTINGS
@pytest.mark.parametrize(
    ("first", "more", "own"),
    [([], prompt(9, 8), [4, 5]), (prompt(9, 6), prompt(9, 8), [4, 5]), ([], [], [])],
    ids=["new", "another prompt", "nothing new"],
)
def test_a_release_spares_what_was_there(
    wide: MakeDriver, lazy: bool | None, first: list[int], more: list[int], own: list[int]
) -> None:
    """Whatever the session began with. vLLM computes a prompt's last block again."""
    driver = wide(lazy)
    shared = prompt(16, 3)
    driver.serve("shared", [*shared, 1])
    if first:
        driver.serve("first", first, session_id="s")
    driver.serve("own", [*shared, *more], session_id="s")
    driver.fill(6, first=60)
    driver.serve("last", [*shared, *more], session_id="s", wishes=RELEASE)
    assert released(driver, [*shared, *more]) == own


@SETTINGS
def test_a_release_spares_what_another_session_has_hit(wide: MakeDriver, lazy: bool | None) -> None:
    """Also while the last request runs."""
    driver = wide(lazy)
    tokens = driver.serve("t1", prompt(21), 5, session_id="s")
    driver.serve("other", [*tokens[:8], 1], session_id="t")
    driver.fill(6, first=60)
    driver.start("t2", [*tokens, *prompt(8, 2)], 9, session_id="s", wishes=RELEASE)
    driver.step_until(lambda: driver.pending(LOAD))
    driver.copy_all()
    driver.step(2)
    driver.start("another", [*tokens[:12], 1])
    driver.run()
    assert released(driver, tokens[:-1]) == [3, 4, 5]


@SETTINGS
def test_a_session_releases_all_that_it_alone_has_computed(
    wide: MakeDriver, lazy: bool | None
) -> None:
    """Of each kind of its prompts: over some turns, behind what was there and from the start."""
    driver = wide(lazy)
    driver.serve("shared", prompt(9))
    talk, title = [*prompt(8), 1], prompt(5, 6)
    for turn in range(3):
        talk = driver.serve(f"talk {turn}", [*talk, turn], 4, session_id="s")
        title = driver.serve(f"title {turn}", [*title, turn], 4, session_id="s")
    driver.fill(6, first=60)
    driver.serve("last talk", talk, session_id="s", wishes=RELEASE)
    driver.serve("last title", title, session_id="s", wishes=RELEASE)
    shared = len(talk[:-1]) // 4
    places = released(driver, [*talk[:-1]])
    assert places == [*range(2, shared)]
    keys = driver.scheduler.groups.keys(make_request("looker", title[:-1]).block_hashes, 0)
    assert not any(driver.tier.has(key) for key in keys)


def test_a_session_id_is_not_kept(drive: MakeDriver) -> None:
    """It may be of any length. A request that has ended leaves nothing of it."""
    driver = drive()
    session_id = _Text("s")
    kept = weakref.ref(session_id)
    request = driver.start("a", prompt(9), session_id=session_id, wishes={"protect": "5m"})
    del session_id
    driver.run()
    request.session_id = None
    gc.collect()
    assert kept() is None


class _Text(str):
    """A string that can be referred to weakly."""

    __slots__ = ("__weakref__",)


# report


@SETTINGS
def test_the_reply_says_where_the_prompt_came_from(roomy: MakeDriver, lazy: bool | None) -> None:
    driver = roomy(lazy=lazy)
    reports = driver.world.reports
    wishes = {"report": True}
    driver.serve("a", prompt(21), wishes=wishes)
    driver.serve("b", [*prompt(21), 1], wishes=wishes)
    driver.evict_all()
    driver.serve("c", [*prompt(21), 1], wishes=wishes)
    driver.serve("d", [*prompt(21), 1])
    of = [[*report.values()] for report in reports.values()]
    assert of == [[0, 0, 0, 21], [20, 0, 0, 2], [0, 20, 0, 2]]


def test_without_allow_reports_there_are_none(
    drive: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """They tell any client what others have sent."""
    driver = drive(allows_reports=False)
    driver.serve("a", prompt(21), wishes={"report": True})
    assert not driver.world.reports
    assert "kv_connector_extra_config has allow_reports" in caplog.text


def test_no_window_before_the_prompt_s_end_is_protected(drive: MakeDriver) -> None:
    """No turn begins there."""
    driver = drive(windows=(0, 8), num_device_blocks=60, num_host_blocks=100)
    driver.serve("a", prompt(41), wishes={"protect": "1m"})
    assert driver.tier.num_reserved == 41 // 4 + 2
