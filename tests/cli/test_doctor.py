"""doctor: on this machine, and with findings of a probe on other machines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli import doctor, probe
from simple_offload.cli.checks import Check, Status
from simple_offload.cli.doctor import examine
from simple_offload.cli.main import main
from simple_offload.cli.probe import Found
from simple_offload.cli.transfer_config import read_transfer_config
from simple_offload.ranks import Ranks
from tests.conftest import Machine

GIVEN = read_transfer_config(None)
ON_CPU = Found(
    {
        "torch": {"version": "2.13.0+cpu", "cuda": None, "devices": []},
        "vllm": {"version": "0.32.0", "platform": "cpu"},
        "supported": "0.30 to 0.33",
        "backend": {"name": "HostBackend", "path": "plain memory", "nodes": []},
    },
    {},
)
H200 = {
    "torch": {"version": "2.13.0", "cuda": "13.0", "devices": ["NVIDIA H200 (140 GiB)"]},
    "vllm": {"version": "0.33.0", "platform": "cuda"},
}
CUDA_BACKEND = {"name": "CudaBackend", "path": "load 4K 15 GB/s", "nodes": [1]}


def on(**values: object) -> Found:
    """Those of a CPU, but for some values."""
    return Found(ON_CPU.values | values, {})


def checks_of(monkeypatch: pytest.MonkeyPatch, found: Found) -> dict[str, Check]:
    """doctor's checks by name, if the probe reports ``found``."""
    monkeypatch.setattr(doctor, "probe", lambda _: found)
    return {check.name: check for check in examine(GIVEN, Ranks(1, 1))}


def run_here(capfd: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """The checks of this machine by name."""
    assert main(["doctor", "--config", '{"cpu_bytes_to_use": "64MiB"}', "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["works"] is True
    assert {check["status"] for check in result["checks"]} <= {"ok", "warning"}
    return {check["name"]: check for check in result["checks"]}


def test_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    checks = run_here(capfd)
    assert checks["vLLM"]["found"] == "0.32.0, platform cpu (supported: 0.30 to 0.33)"
    assert checks["backend"]["found"] == "HostBackend"
    assert checks["configuration"]["found"] == "64 MiB on each of 1 ranks"


@pytest.mark.gpu
def test_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    checks = run_here(capfd)
    assert checks["backend"]["found"] == "CudaBackend"
    assert "GB/s" in checks["copy path"]["found"]
    assert "; the driver is for CUDA 1" in checks["device"]["found"]


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "probe", lambda _: ON_CPU)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "[red]BLHNC")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["doctor", "--config", '{"backend": "cuda", "bakend": "[red]"}']) == 1
    text = capsys.readouterr().out
    assert "did you mean 'backend'?" in text
    assert "bakend='[red]'" in text
    assert "[red]BLHNC" in text
    assert "1 problem would stop the server." in text
    assert "\x1b" not in text
    assert main(["doctor", "--config", '{"cpu_bytes_to_use": "1MiB"}']) == 0
    assert "The connector works here." in capsys.readouterr().out


def test_devices_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = {**CUDA_BACKEND, "cuda": "13.0", "batched": True}
    checks = checks_of(monkeypatch, on(**H200, backend=backend))
    assert checks["device"].found == "NVIDIA H200 (140 GiB); the driver is for CUDA 13.0"
    assert checks["device"].status is Status.OK
    assert checks["copy path"].found == "load 4K 15 GB/s"
    assert "pins no memory" not in checks["lock limit"].found
    backend |= {"cuda": "12.4", "batched": False}
    check = checks_of(monkeypatch, on(**H200, backend=backend))["device"]
    assert (check.status, "12.8 or later" in check.advice) == (Status.WARNING, True)
    checks = checks_of(monkeypatch, on(vllm=H200["vllm"]))
    assert checks["device"].status is Status.ERROR
    npu = {"name": "NpuBackend", "path": "batches", "nodes": [], "cann": "8.5.1"}
    assert checks_of(monkeypatch, on(backend=npu))["device"].found == "NPU, CANN 8.5.1"


@pytest.mark.parametrize(
    ("kernel_module", "found"),
    [
        ("x86_64 Kernel Module  580.159.04  Release Build", "580.159.04; its cuMemcpyBatchAsync"),
        ("Open Kernel Module for x86_64  580.15.2  Release", "580.15.2; whether"),
        ("Kernel Module for aarch64  595.71  Release", "595.71; whether"),
        ("Kernel Module", "version unknown; whether"),
    ],
)
def test_the_fault_of_a_driver(
    kernel_module: str, found: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies wrong bytes with descriptors whose sizes grow; this connector sorts them."""
    assert "driver" not in checks_of(monkeypatch, ON_CPU)
    version = (
        f"NVRM version: NVIDIA UNIX {kernel_module}\nGCC version:  gcc version 12.3.0 (Ubuntu)\n"
    )
    machine.write("/proc/driver/nvidia/version", version)
    check = checks_of(monkeypatch, ON_CPU)["driver"]
    assert check.status is Status.OK
    assert check.found.startswith(found)
    assert "python3 -m examples.driver_check" in check.found
    assert ("descriptors are sorted by size" in check.found) == ("159" in found)


@pytest.mark.parametrize(
    ("step", "error", "name", "advice"),
    [
        ("supported", "RuntimeError: this is vLLM 0.29.0", "vLLM", "this is vLLM 0.29.0"),
        ("connector", "ImportError: no module", "vLLM", "no module"),
        ("torchvision", "RuntimeError: no nms", "torchvision", "pip uninstall torchvision"),
        ("vllm", "ModuleNotFoundError: No module named 'vllm'", "vLLM", "simple-offload[cuda]"),
        ("torch", "not installed", "torch", "install vLLM"),
        ("backend", "ConfigError: backend='npu': vLLM runs on 'cpu'", "backend", "backend='npu'"),
        ("transfer_config", "ValidationError: kv_rank", "kv-transfer-config", "kv_rank"),
    ],
)
def test_errors_of_the_probe(
    step: str, error: str, name: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {key: value for key, value in ON_CPU.values.items() if key != step}
    check = checks_of(monkeypatch, Found(values, {step: error}))[name]
    assert check.status is Status.ERROR
    assert advice in check.advice


MULTI: dict[str, Any] = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "SimpleCPUOffloadConnector"}]},
}


@pytest.mark.parametrize(
    ("transfer_config", "second_tier", "errors"),
    [
        (MULTI, {"type": "fs", "root_dir": "/kv"}, {"transfer_config": "specify kv_role",
         "second_tier": "ConfigError: second_tier.bytes is missing"}),
        (None, {"type": "fs", "root_dir": "/kv", "bytes": "1GiB"}, {}),
    ],
)  # fmt: skip
def test_what_a_server_would_refuse(
    transfer_config: Any, second_tier: Any, errors: dict[str, str], tmp_path: Path
) -> None:
    """Here in this process, which has imported vLLM."""
    file = tmp_path / "answer.json"
    probe.answer(file, "auto", "auto", transfer_config, second_tier)
    _, found = json.loads(file.read_text())
    assert found.keys() == errors.keys()
    assert all(text in found[step] for step, text in errors.items())


@pytest.mark.parametrize(
    ("found", "ranks", "advice"),
    [
        (ON_CPU, Ranks(2, 2), ""),
        (Found(ON_CPU.values, {"second_tier": "ConfigError: no"}), Ranks(2, 2), "no"),
        (on(backend={"name": "NpuBackend", "path": ""}), Ranks(2, 2), "owns host memory"),
        (ON_CPU, Ranks(2, 1, num_local=1), "Allowed: one machine"),
    ],
)
def test_a_second_tier_that_the_server_would_refuse(
    found: Found, ranks: Ranks, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda _: found)
    files = {"type": "fs", "root_dir": str(tmp_path), "bytes": 4096}
    given = read_transfer_config(json.dumps({"num_cpu_blocks": 9, "second_tier": files}))
    (check,) = (each for each in examine(given, ranks) if each.name == "second tier")
    assert check.status is (Status.ERROR if advice else Status.OK)
    assert advice in check.advice


@pytest.fixture
def replace_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that gives the probe's process a module of this source."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(doctor.__file__).parents[2]}")

    def replace(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    replace("torch", "raise ImportError('saves time')")
    return replace


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (
            "import os\nos.write(2, b'no libascend')\nos._exit(7)",
            "the process ended with code 7: no libascend",
        ),
        ("import threading\nthreading.Event().wait()", "the process did not end within 3 s"),
        # As on a full disk, the answer is cut off.
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))",
            "the process ended with code 1: OSError: [Errno 27] File too large",
        ),
    ],
)
def test_a_torch_that_ends_or_stops_the_process(
    source: str,
    error: str,
    replace_module: Callable[[str, str], None],
) -> None:
    replace_module("torch", source)
    seconds = 3 if "wait()" in source else 60
    assert error in probe.probe(GIVEN, seconds).errors["torch"]


def test_broken_modules(replace_module: Callable[[str, str], None]) -> None:
    replace_module("torchvision", "raise RuntimeError('no such operator')")
    replace_module("vllm", "__version__ = '0.29.0'")
    found = probe.probe(GIVEN)
    assert found.errors["torchvision"] == "RuntimeError: no such operator"
    assert found.errors.keys() >= {"torch", "vllm", "supported", "connector", "backend"}


def test_ranks_of_other_machines_do_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 ranks on two machines of 100 GiB, also with two engines on each."""
    monkeypatch.setattr(doctor, "probe", lambda _: ON_CPU)
    size = '{"cpu_bytes_to_use_per_rank": "10GiB"}'

    def configuration(*arguments: str) -> str:
        main(["doctor", "--json", "--config", size, *arguments])
        checks = json.loads(capsys.readouterr().out)["checks"]
        (found,) = [check for check in checks if check["name"] == "configuration"]
        return f"{found['status']}: {found['found']} {found['advice']}"

    assert "ok: 10 GiB on each of 8 ranks" in configuration("--ranks", "8")
    assert "160.00 GiB" in configuration("--ranks", "16")
    on_two = ("--ranks", "16", "--nodes", "2")
    assert "8 ranks on this machine" in configuration(*on_two)
    assert "160.00 GiB" in configuration(*on_two, "--data-parallel", "2")
