"""NpuBackend. Copies run on the real torch_npu, in a separate process over the simulated ACL
runtime. Refusals to start run in processes that lack a requirement."""

import ctypes
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock
from xml.etree import ElementTree as ET

import pytest

from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.config import ConfigError
from tests.acl_sim import child
from tools.set_up import ROOT

ON_NPU = ROOT / "tests" / "acl_sim" / "on_npu"
FILES = {"copies": 89, "ordering": 13, "worker": 4}
"""Files of tests on torch_npu, and the minimum number of tests in each."""

pytestmark = pytest.mark.timeout(child.DOWNLOAD_SECONDS + 2 * child.CHILD_SECONDS)


class Run(NamedTuple):
    """The results of the tests in the child."""

    passed: dict[str, int]
    """Number of passed tests by file."""
    printed: str


@pytest.fixture(
    scope="module",
    params=[
        child.NEWEST,
        # Slow: its torch is another one than the environment's, and has to be downloaded.
        pytest.param(
            child.OF_IMAGES,
            marks=[
                pytest.mark.slow,
                pytest.mark.timeout(child.OWN_TORCH_SECONDS + 4 * child.DOWNLOAD_SECONDS),
            ],
        ),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("torch-npu")
    arguments = [
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"),
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml")),
        *("--junitxml", str(folder / "report.xml"), "--timeout", "60"),
        *(str(ON_NPU / f"{name}.py") for name in FILES),
    ]
    ended = child.run_python(arguments, child.environment(request.param), folder)
    passed = dict.fromkeys(FILES, 0)
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        name = case.get("classname", "").rpartition(".")[2]
        passed[name] = passed.get(name, 0) + (len(case) == 0)
    if ended.returncode:
        passed = {}
    return Run(passed, ended.stdout)


@pytest.mark.parametrize("name", FILES)
def test_on_torch_npu(run: Run, name: str) -> None:
    assert run.passed.get(name, 0) >= FILES[name], run.printed


# A CANN that is older


OLD_CANN = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.config import ConfigError
from simple_offload.backends.base import Direction
from simple_offload.transfer import Transfer
torch.npu.set_device(0)
backend = NpuBackend()
print("batches:", backend.batches)
print("vLLM:", "vllm" in sys.modules)
device = torch.arange(64, dtype=torch.int8).view(4, 16).to("npu")
backend.open([device])
host = backend.allocate_host(64).view(4, 16)
backend.add_host_chunk([host])
backend.copy(Direction.STORE, Transfer.pairing(0, [3], [1]), backend.barrier()).wait()
print("stored:", host[1].tolist() == list(range(48, 64)))
backend.close()
try:
    NpuBackend("batch")
except ConfigError as error:
    print("refused:", error)
"""


def test_a_cann_without_batches(tmp_path: Path) -> None:
    ended = child.run_python(["-c", OLD_CANN], child.environment(has_batch=False), tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "batches: False" in ended.stdout
    assert "vLLM: False" in ended.stdout
    assert "stored: True" in ended.stdout
    reason = "CANN of unknown version has no aclrtMemcpyBatchAsync"
    assert f"copying one descriptor a call ({reason})" in ended.stdout
    assert f"refused: copy_path='batch': {reason}. Allowed here: 'auto' or" in ended.stdout


# What cannot start


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in torch_npu's own code
def test_a_cann_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    # Not before torch and vLLM are imported, which would fail as well.
    monkeypatch.syspath_prepend(child.torch_npu_path())
    try:
        with pytest.raises(ConfigError) as caught:
            NpuBackend()
    finally:
        for name in sys.modules.keys() - before:
            del sys.modules[name]
    for part in ("backend='npu'", "torch_npu cannot be imported: libhccl.so", "set_env.sh"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("library", "why"),
    [("libabsent.so", "libabsent.so: cannot open"), ("libm.so.6", "undefined symbol")],
)
def test_a_library_that_is_no_runtime(
    monkeypatch: pytest.MonkeyPatch, library: str, why: str
) -> None:
    """There is none, or another one has its name. Not asked for by its own name: other tests may
    have loaded the simulated one into this process."""
    load = ctypes.CDLL
    monkeypatch.setitem(sys.modules, "torch_npu", Mock())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(library))
    with pytest.raises(ConfigError) as caught:
        NpuBackend()
    for part in ("backend='npu'", why, "set_env.sh"):
        assert part in str(caught.value)


def test_a_copy_path_of_another_device() -> None:
    with pytest.raises(ConfigError, match=r"copy_path='dma': on an NPU .* 'auto', 'batch' or"):
        NpuBackend("dma")
