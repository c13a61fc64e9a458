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
    platform = SimpleNamespace(device_type="cpu", is_cuda=lambda: True)
    monkeypatch.setattr(select, "current_platform", platform)
    return platform


@pytest.mark.parametrize("name", ["auto", "host"])
def test_on_cpu(name: BackendName) -> None:
    """Each call makes a backend. Other tests rely on this platform."""
    first, second = make_backend(name), make_backend(name)
    assert isinstance(first, HostBackend)
    assert isinstance(second, HostBackend)
    assert first is not second


@pytest.mark.parametrize("copy_path", ["auto", "dma", "kernel"])
def test_on_cuda_the_copy_path_is_passed_on(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, copy_path: str
) -> None:
    platform.device_type = "cuda"
    asked: list[str] = []
    monkeypatch.setattr("simple_offload.backends.cuda.backend.CudaBackend", asked.append)
    make_backend("auto", copy_path)
    assert asked == [copy_path]


@pytest.mark.parametrize(
    ("device_type", "name", "copy_path", "parts"),
    [
        ("cpu", "cuda", "auto", ["backend='cuda'", "'cpu'", "'auto' or 'host'"]),
        ("cpu", "npu", "auto", ["backend='npu'", "'cpu'", "'auto' or 'host'"]),
        ("cpu", "cuda", "kernel", ["backend='cuda'"]),  # comes before the path
        ("cpu", "auto", "dma", ["copy_path='dma'", "Allowed: 'auto'"]),
        ("cpu", "host", "kernel", ["copy_path='kernel'", "Allowed: 'auto'"]),
        ("cuda", "host", "auto", ["backend='host'", "'cuda'", "'auto' or 'cuda'"]),
        ("cuda", "npu", "auto", ["backend='npu'", "'cuda'", "'auto' or 'cuda'"]),
        ("cuda", "auto", "single", ["copy_path='single'", "'auto', 'dma', 'kernel'"]),
        ("npu", "cuda", "auto", ["backend='cuda'", "'npu'", "'auto' or 'npu'"]),
        ("npu", "npu", "dma", ["copy_path='dma'", "'auto', 'batch' or 'single'"]),
        ("npu", "npu", "", ["copy_path=''", "'auto', 'batch' or 'single'"]),
        ("npu", "auto", "auto", ["backend='npu'", "No module named 'torch_npu'", "Install"]),
        ("xpu", "auto", "auto", ["backend='auto'", "'xpu'", "Supported platforms"]),
    ],
)
def test_refusals(
    platform: SimpleNamespace,
    device_type: str,
    name: BackendName,
    copy_path: str,
    parts: list[str],
) -> None:
    platform.device_type = device_type
    with pytest.raises(ConfigError) as caught:
        make_backend(name, copy_path)
    for part in parts:
        assert part in str(caught.value)


def test_not_every_cuda_is_nvidia_s(platform: SimpleNamespace) -> None:
    platform.device_type, platform.is_cuda = "cuda", lambda: False
    with pytest.raises(ConfigError, match="no backend for vLLM's 'cuda' platform"):
        make_backend("auto")
