"""What tests of the copy threads share."""

from collections.abc import Iterator

import pytest

from tests.conftest import within_patience
from tests.worker.scripted import Bench


@pytest.fixture
def bench(no_thread_left: None) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.backend.release()
    within_patience(bench.engine.close)
