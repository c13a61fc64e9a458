"""doctor: on this machine as a whole, and what it makes of what a probe may find elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli import doctor
from simple_offload.cli.checks import Check, Status
from simple_offload.cli.doctor import Found, examine, probe
from simple_offload.cli.main import main
from simple_offload.cli.transfer_config import read_transfer_config
from simple_offload.config import OffloadConfig
from simple_offload.ranks import Ranks
from tests.conftest import Machine

GIVEN = read_transfer_config(None)
ON_CPU: Found = {
    "torch": {"value": {"version": "2.13.0+cpu", "cuda": None, "devices": []}},
    "vllm": {"value": {"version": "0.32.0", "platform": "cpu"}},
    "supported": {"value": None},
    "transfer_config": {"value": None},
    "connector": {"value": None},
    "backend": {"value": {"name": "HostBackend", "path": "plain memory", "nodes": []}},
}
ON_CUDA: Found = {
    **ON_CPU,
    "torch": {
        "value": {
            "version": "2.13.0",
            "cuda": "13.0",
            "devices": [{"name": "NVIDIA H200", "bytes": 140 << 30}],
        }
    },
    "vllm": {"value": {"version": "0.33.0", "platform": "cuda"}},
    "backend": {
        "value": {
            "name": "CudaBackend",
            "path": "load 4K 15 GB/s",
            "nodes": [1],
            "cuda_driver": "13.0",
            "batched": True,
        }
    },
}


def found_with(monkeypatch: pytest.MonkeyPatch, found: Found) -> dict[str, Check]:
    """What doctor says where a probe finds ``found``, by name."""
    monkeypatch.setattr(doctor, "probe", lambda *_: found)
    return {check.name: check for check in examine(GIVEN, Ranks(1, 1))}


def test_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    config = '{"cpu_bytes_to_use": "64MiB"}'
    assert main(["doctor", "--config", config, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["works"] is True
    by_name = {check["name"]: check for check in told["checks"]}
    assert by_name["vLLM"]["found"] == "0.32.0, platform cpu"
    assert by_name["backend"]["found"] == "HostBackend"
    assert by_name["configuration"]["found"] == "0.06 GiB on each of 1 ranks"
    assert {check["status"] for check in told["checks"]} <= {"ok", "warning"}


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: ON_CPU)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "[red]BLHNC")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["doctor", "--config", '{"backend": "cuda", "bakend": "[red]"}']) == 1
    text = capsys.readouterr().out
    assert "did you mean 'backend'?" in text
    assert "bakend='[red]'" in text
    assert "[red]BLHNC" in text
    assert "1 would stop it." in text
    assert "\x1b" not in text
    assert main(["doctor", "--config", '{"cpu_bytes_to_use": "1MiB"}']) == 0
    assert "The connector works here." in capsys.readouterr().out


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.159")
    checks = found_with(monkeypatch, ON_CUDA)
    assert checks["device"].found == "NVIDIA H200 (140 GiB); driver 580.159"
    assert checks["copy path"].found == "load 4K 15 GB/s"
    assert "CUDA driver" not in checks
    assert "no memory is pinned" not in checks["lock limit"].found


@pytest.mark.gpu
def test_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", '{"cpu_bytes_to_use": "64MiB"}', "--json"]) == 0
    by_name = {check["name"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    assert by_name["backend"]["found"] == "CudaBackend"
    assert "4K " in by_name["copy path"]["found"]
    assert "GB/s" in by_name["copy path"]["found"]
    assert "driver " in by_name["device"]["found"]


def test_a_driver_without_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = {**ON_CUDA["backend"]["value"], "batched": False, "cuda_driver": "12.4"}
    checks = found_with(monkeypatch, {**ON_CUDA, "backend": {"value": backend}})
    assert checks["CUDA driver"].status is Status.WARNING


def test_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = {"name": "NpuBackend", "path": "batches", "nodes": [], "cann": "8.5.1"}
    checks = found_with(monkeypatch, {**ON_CPU, "backend": {"value": backend}})
    assert checks["device"].found == "NPU, CANN 8.5.1"


@pytest.mark.parametrize(
    ("step", "error", "name", "told"),
    [
        (
            "supported",
            "RuntimeError: simple_offload works with vLLM >= 0.32 and < 0.34; this is vLLM 0.31.0",
            "vLLM",
            "this is vLLM 0.31.0",
        ),
        ("connector", "ImportError: no module", "vLLM", "no module"),
        (
            "torchvision",
            "RuntimeError: operator torchvision::nms does not exist",
            "torchvision",
            "pip uninstall torchvision",
        ),
        ("vllm", "ModuleNotFoundError: No module named 'vllm'", "vLLM", "simple-offload[cuda]"),
        ("torch", "not installed", "torch", "install vLLM"),
        ("backend", "ConfigError: backend='npu': vLLM runs on 'cpu'", "backend", "backend='npu'"),
        ("transfer_config", "ValidationError: kv_rank", "kv-transfer-config", "kv_rank"),
    ],
)
def test_what_would_go_wrong(
    step: str, error: str, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = found_with(monkeypatch, {**ON_CPU, step: {"error": error}})[name]
    assert check.status is Status.ERROR
    assert told in check.advice


def test_vllm_for_cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = {"value": {"version": "0.33.0", "platform": "cuda"}}
    checks = found_with(monkeypatch, {**ON_CPU, "vllm": vllm})
    assert checks["device"].status is Status.ERROR


def _stub(folder: Path, module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module in front of the real one, for the probe's process."""
    (folder / f"{module}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(doctor.__file__).parents[2]}")


def test_the_named_backend_is_tried_also_when_the_rest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "import sys, json; raise ImportError(json.loads(sys.argv[1])['backend'])"
    _stub(tmp_path, "torch", made, monkeypatch)
    given = read_transfer_config('{"backend": "npu", "unknown": 1}')
    assert probe(given, None)["torch"]["error"] == "ImportError: npu"


def test_a_torch_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(
        tmp_path,
        "torch",
        "import os, sys\nprint('no libascend', file=sys.stderr, flush=True)\nos._exit(7)",
        monkeypatch,
    )
    found = probe(GIVEN, OffloadConfig())
    assert found["torch"]["error"] == "the process that tried it ended with code 7: no libascend"


def test_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(tmp_path, "torch", "import threading\nthreading.Event().wait()", monkeypatch)
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 3)
    found = probe(GIVEN, OffloadConfig())
    assert found["torch"]["error"].endswith("did not end within 3 s")


def test_a_vllm_of_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(tmp_path, "torch", "raise ImportError('no time for it here')", monkeypatch)
    _stub(tmp_path, "vllm", "__version__ = '0.31.0'", monkeypatch)
    found = probe(GIVEN, OffloadConfig())
    for step in ("vllm", "supported", "connector", "backend"):
        assert "error" in found[step]


def test_a_torchvision_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(tmp_path, "torch", "raise ImportError('no time for it here')", monkeypatch)
    _stub(tmp_path, "torchvision", "raise RuntimeError('operator does not exist')", monkeypatch)
    _stub(tmp_path, "vllm", "raise ImportError('no time for it here')", monkeypatch)
    found = probe(GIVEN, OffloadConfig())
    assert found["torchvision"]["error"] == "RuntimeError: operator does not exist"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        return None

    monkeypatch.setattr("simple_offload.cli.doctor.importlib.util.find_spec", missing)
    checks = {check.name: check for check in examine(GIVEN, Ranks(1, 1))}
    assert checks["torch"].status is Status.ERROR
    assert checks["vLLM"].status is Status.ERROR


def test_ranks_of_other_machines_do_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with the connector itself: 16 ranks on two machines of 100 GiB, in two engines each."""
    monkeypatch.setattr(doctor, "probe", lambda given, config: {})
    size = '{"cpu_bytes_to_use_per_rank": "10GiB"}'

    def configuration(*arguments: str) -> str:
        main(["doctor", "--json", "--config", size, *arguments])
        checks = json.loads(capsys.readouterr().out)["checks"]
        (found,) = [check for check in checks if check["name"] == "configuration"]
        return f"{found['status']}: {found['found']} {found['advice']}"

    assert "ok: 10.00 GiB on each of 8 ranks" in configuration("--ranks", "8")
    assert "160.00 GiB" in configuration("--ranks", "16")
    on_two = ("--ranks", "16", "--nodes", "2")
    assert "8 ranks on this machine" in configuration(*on_two)
    assert "160.00 GiB" in configuration(*on_two, "--data-parallel", "2")
    assert main(["doctor", "--ranks", "3", "--nodes", "2"]) == 2
    assert "--nodes 2: must divide --ranks, which is 3" in capsys.readouterr().err
