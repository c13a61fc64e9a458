"""make_backend: it returns the backend that reaches the platform's memory, or refuses clearly."""

from types import SimpleNamespace

import pytest

from simple_offload.backends import select
from simple_offload.backends.host import HostBackend
from simple_offload.backends.select import BackendName, make_backend
from simple_offload.config import ConfigError


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's platform; "cpu" unless a test changes it."""
    platform = SimpleNamespace(device_type="cpu")
    monkeypatch.setattr(select, "current_platform", platform)
    return platform


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("name", ["auto", "host"])
def test_on_cpu(name: BackendName) -> None:
    assert isinstance(make_backend(name), HostBackend)


def test_each_call_makes_its_own() -> None:
    assert make_backend("auto") is not make_backend("auto")


@pytest.mark.parametrize(
    ("device_type", "name"),
    [("cpu", "cuda"), ("cpu", "npu"), ("cuda", "host"), ("cuda", "npu"), ("npu", "cuda")],
)
def test_out_of_reach(platform: SimpleNamespace, device_type: str, name: BackendName) -> None:
    platform.device_type = device_type
    with pytest.raises(ConfigError) as caught:
        make_backend(name)
    message = str(caught.value)
    assert f"backend={name!r}" in message
    assert f"{device_type!r}" in message
    allowed = "host" if device_type == "cpu" else device_type
    assert f"'auto' or {allowed!r}" in message


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("copy_path", ["dma", "kernel"])
@pytest.mark.parametrize("name", ["auto", "host"])
def test_on_cpu_there_is_one_way_to_copy(name: BackendName, copy_path: str) -> None:
    assert isinstance(make_backend(name, "auto"), HostBackend)
    with pytest.raises(ConfigError) as caught:
        make_backend(name, copy_path)
    for part in (f"copy_path={copy_path!r}", "Allowed: 'auto'"):
        assert part in str(caught.value)


def test_a_backend_out_of_reach_comes_before_its_copy_path(platform: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="backend='cuda'"):
        make_backend("cuda", "kernel")


@pytest.mark.parametrize("copy_path", ["auto", "dma", "kernel"])
def test_on_cuda_the_copy_path_is_passed_on(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, copy_path: str
) -> None:
    platform.device_type, platform.is_cuda = "cuda", lambda: True
    asked: list[str] = []
    monkeypatch.setattr("simple_offload.backends.cuda.backend.CudaBackend", asked.append)
    make_backend("auto", copy_path)
    assert asked == [copy_path]


def test_not_every_cuda_is_nvidia_s(platform: SimpleNamespace) -> None:
    platform.device_type, platform.is_cuda = "cuda", lambda: False
    with pytest.raises(ConfigError, match="no backend for vLLM's 'cuda' platform"):
        make_backend("auto")


def test_a_platform_without_a_backend(platform: SimpleNamespace) -> None:
    platform.device_type = "xpu"
    with pytest.raises(ConfigError) as caught:
        make_backend("auto")
    for part in ("backend='auto'", "'xpu'", "Supported platforms"):
        assert part in str(caught.value)


def test_this_process_runs_on_cpu() -> None:
    """The tests here rely on it."""
    assert isinstance(make_backend("auto"), HostBackend)


def test_on_cuda_an_npu_s_path_is_refused(platform: SimpleNamespace) -> None:
    platform.device_type, platform.is_cuda = "cuda", lambda: True
    with pytest.raises(ConfigError, match=r"copy_path='single'.*Allowed: 'auto', 'dma', 'kernel'"):
        make_backend("auto", "single")
