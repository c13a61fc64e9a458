import pytest


@pytest.fixture
def light_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start in half the time: one process fewer imports vLLM (the worker is in the engine
    core's), and its helpers are not compiled."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
