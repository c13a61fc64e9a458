"""EarlyAnnouncement keeps its bounds and announces each load once, after any events.

test_worker_announce.py shows its benefit.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.worker import early_announcement
from simple_offload.worker.early_announcement import EarlyAnnouncement

LOADS = st.integers(0, 3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.booleans(), st.sets(LOADS)),
        st.tuples(st.just("announce"), LOADS),
        st.tuples(st.just("end"), LOADS),
        st.tuples(st.just("pass"), st.floats(0, 100)),
    ),
    max_size=40,
)


@given(wait=st.sampled_from([0.0, 1e-3, 0.02, 3.0]), events=EVENTS)
def test_whatever_happens(wait: float, events: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        clock = SimpleNamespace(now=1000.0)
        patched.setattr(early_announcement, "time", SimpleNamespace(monotonic=lambda: clock.now))
        mine = EarlyAnnouncement(wait)
        under_way: set[int] = set()
        for event in events:
            match event:
                case "step", computes, admitted:
                    mine.on_step(computes, admitted)
                    assert 0 <= mine.lead_seconds <= 3 * wait
                    assert computes or mine.lead_seconds >= wait
                case "announce", load:
                    assert mine.announce(load) == (load not in under_way)
                    under_way.add(load)
                case "end", load:
                    assert mine.on_load_ended(load) == (load in under_way)
                    under_way.discard(load)
                case "pass", seconds:
                    clock.now += seconds
