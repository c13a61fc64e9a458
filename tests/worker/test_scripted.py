"""What the tests of transfers are built on."""

import threading

import pytest

from tests.worker.scripted import Events, join


def test_two_threads_that_ask_at_once_get_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks while the event of the first is being made."""
    events = Events()
    of_the_second: list[threading.Event] = []
    make = threading.Event

    def interrupted() -> threading.Event:
        monkeypatch.setattr(threading, "Event", make)
        thread = threading.Thread(target=lambda: of_the_second.append(events[2]))
        thread.start()
        join(thread)
        return make()

    monkeypatch.setattr(threading, "Event", interrupted)
    of_the_first = events[2]
    assert of_the_second == [of_the_first]
    assert events[2] is of_the_first
