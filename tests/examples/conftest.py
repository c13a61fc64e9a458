import pytest

from tests.examples.fake_server import COMMAND


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes the servers fakes. FAKE_SERVER in the environment is their list of faults."""
    monkeypatch.setattr("examples.serving.COMMAND", COMMAND)
    return monkeypatch
