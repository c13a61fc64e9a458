from importlib.util import find_spec

import pytest


@pytest.fixture
def light_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves the start of engines: the worker runs in the engine core's process, so one process
    fewer imports vLLM. Its helpers are not compiled."""
    if find_spec("vllm") is None:
        pytest.skip("runs a vLLM engine")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
