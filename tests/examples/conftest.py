from importlib.util import find_spec

import pytest

from tests.examples.fake_server import COMMAND


@pytest.fixture
def light_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves the start of engines: the worker runs in the engine core's process, so one process
    fewer imports vLLM. Its helpers are not compiled."""
    if find_spec("vllm") is None:
        pytest.skip("runs a vLLM engine")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes the servers fakes. FAKE_SERVER in the environment is their list of faults."""
    monkeypatch.setattr("examples.serving.COMMAND", COMMAND)
    return monkeypatch
