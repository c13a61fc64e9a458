"""``simple-offload doctor``: checks that the connector works here, and how it would copy."""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simple_offload import __version__
from simple_offload.cli.arguments import CommandError, Parser, count
from simple_offload.cli.checks import Check, Status, error, ok, warning
from simple_offload.cli.machine import (
    check_huge_pages,
    check_lock_limit,
    check_memory,
    check_numa,
)
from simple_offload.cli.second_tier import check_second_tier
from simple_offload.cli.transfer_config import (
    TransferConfig,
    check_transfer_config,
    read_transfer_config,
)
from simple_offload.config import OffloadConfig
from simple_offload.ranks import Ranks

WOULD_FAIL = 1
PROBE_SECONDS = 240
_VARIABLES = (
    "VLLM_KV_CACHE_LAYOUT",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}

_PIPE_WIDTH = 160

Found = dict[str, Any]
"""Step of probe.py -> {"value": ...} or {"error": text}."""


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check that the connector works on this machine, and how it would copy",
        description=(
            "Checks vLLM, torch, the device, memory and, if given, a configuration. Starts no "
            "engine; on a GPU it measures copies as a server does."
        ),
        epilog="exit codes: 0 the connector works here, maybe with warnings; 1 it would not; "
        "2 wrong usage",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "--config",
        metavar="JSON",
        help="kv_connector_extra_config, or the whole --kv-transfer-config, or a file with either",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        default=1,
        metavar="N",
        help="tensor parallel x pipeline parallel ranks of the server (default: 1)",
    )
    parser.add_argument(
        "--nodes",
        type=count,
        default=1,
        metavar="N",
        help="machines that share those ranks (default: 1)",
    )
    parser.add_argument(
        "--data-parallel",
        type=count,
        default=1,
        metavar="N",
        help="engines on this machine, each with those ranks (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; return the exit code. Raises CommandError for a wrong --config."""
    given = read_transfer_config(arguments.config)
    ranks, nodes = arguments.ranks, arguments.nodes
    if ranks % nodes:
        raise CommandError(f"--nodes {nodes}: must divide --ranks, which is {ranks}")
    num_local = ranks // nodes
    checks = examine(given, Ranks(ranks, num_local * arguments.data_parallel, num_local=num_local))
    failed = any(check.status is Status.ERROR for check in checks)
    if arguments.json:
        listed = [{**asdict(check), "status": check.status.value} for check in checks]
        print(json.dumps({"works": not failed, "checks": listed}, indent=1))
    else:
        _show(checks)
    return WOULD_FAIL if failed else 0


def examine(given: TransferConfig, ranks: Ranks) -> list[Check]:
    """All checks, in the order of a server's start."""
    config_checks, config = check_transfer_config(given, ranks)
    found = probe(given, config)
    backend = found.get("backend", {}).get("value") or {}
    pinned = backend.get("name", "HostBackend") != "HostBackend"
    wanted = None
    if config is not None and config.num_cpu_blocks is None:
        wanted = config.bytes_per_rank(ranks.num) * ranks.num_here
    return [
        ok("simple_offload", f"{__version__}, Python {platform.python_version()}"),
        *_check_software(found),
        *_check_device(found),
        *config_checks,
        *_check_backend(found),
        check_memory(wanted),
        check_lock_limit(wanted, pinned),
        check_numa(backend.get("nodes", [])),
        check_huge_pages(),
        *(check_second_tier(config.second_tier) if config and config.second_tier else []),
        *_check_variables(),
    ]


def probe(given: TransferConfig, config: OffloadConfig | None) -> Found:
    """Run probe.py. ``config`` is None if the configuration was refused; the probe then tries the
    backend that ``given`` names."""
    if importlib.util.find_spec("torch") is None:
        return {"torch": {"error": "not installed"}}
    wanted: dict[str, Any] = {
        key: str(given.extra.get(key, "auto") if config is None else getattr(config, key))
        for key in ("backend", "copy_path")
    }
    wanted["kv_transfer_config"] = given.whole
    with tempfile.TemporaryDirectory(prefix="simple-offload-") as folder:
        answer = Path(folder) / "found.json"
        command = [sys.executable, "-m", "simple_offload.cli.probe", json.dumps(wanted)]
        try:
            done = subprocess.run(
                [*command, str(answer)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROBE_SECONDS,
                check=False,
            )
            last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
            failure = f"the process ended with code {done.returncode}: {last_line}"
        except subprocess.TimeoutExpired:
            failure = f"the process did not end within {PROBE_SECONDS} s"
        found: Found = json.loads(answer.read_text()) if answer.exists() else {}
    for name, step in found.items():
        if "started" in step:
            found[name] = {"error": failure}
    return found or {"torch": {"error": failure}}


def _check_software(found: Found) -> list[Check]:
    checks = []
    torch, vllm = (found.get(name, {}) for name in ("torch", "vllm"))
    if "value" in torch:
        cuda = torch["value"]["cuda"]
        checks.append(
            ok("torch", torch["value"]["version"] + (f", CUDA {cuda}" if cuda else ", no CUDA"))
        )
    else:
        advice = "install vLLM, which brings it"
        if importlib.util.find_spec("torch_npu") is not None:
            advice = "torch_npu is installed: it needs CANN's libraries (source set_env.sh)"
        checks.append(error("torch", str(torch.get("error", "not checked")), advice))
    if "error" in found.get("torchvision", {}):
        checks.append(
            error(
                "torchvision",
                _flat(found["torchvision"]["error"]),
                "it does not match this torch, so vLLM cannot import transformers: "
                "pip uninstall torchvision torchaudio torchcodec (text models need none of them)",
            )
        )
    if "value" not in vllm:
        checks.append(
            error(
                "vLLM",
                str(vllm.get("error", "not checked without torch")),
                "pip install 'simple-offload[cuda]' ('simple-offload[cpu]' for the CPU build)",
            )
        )
        return checks
    version = f"{vllm['value']['version']}, platform {vllm['value']['platform']}"
    for step in ("supported", "connector"):
        if "error" in found.get(step, {}):
            # Without the exception's name.
            text = found[step]["error"].partition(": ")[2]
            return [*checks, error("vLLM", version, text or found[step]["error"])]
    return [*checks, ok("vLLM", f"{version} (supported: {found['supported']['value']})")]


def _check_device(found: Found) -> list[Check]:
    devices = (found.get("torch", {}).get("value") or {}).get("devices", [])
    backend = found.get("backend", {}).get("value") or {}
    platform_name = (found.get("vllm", {}).get("value") or {}).get("platform")
    if devices:
        names = ", ".join(f"{d['name']} ({d['bytes'] / 2**30:.0f} GiB)" for d in devices)
        driver = _driver_version()
        checks = [ok("device", f"{names}; driver {driver}")]
        if backend.get("batched") is False:
            checks.append(
                warning(
                    "CUDA driver",
                    str(backend.get("cuda_driver")),
                    "no cuMemcpyBatchAsync, so each call copies one descriptor. Use a driver for "
                    "CUDA 12.8 or later",
                )
            )
        return checks
    if "cann" in backend:
        return [ok("device", f"NPU, CANN {backend['cann']}")]
    if platform_name == "cuda":
        return [error("device", "none is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    return [ok("device", "no accelerator: the device cache is in host memory too (for trials)")]


def _check_backend(found: Found) -> list[Check]:
    checks = []
    transfer = found.get("transfer_config", {})
    if "error" in transfer:
        checks.append(error("kv-transfer-config", "refused by vLLM", _flat(transfer["error"])))
    backend = found.get("backend", {})
    if "value" in backend:
        checks.append(ok("backend", backend["value"]["name"]))
        checks.append(ok("copy path", backend["value"]["path"]))
    elif "value" in found.get("vllm", {}):
        checks.append(error("backend", "none", _flat(str(backend.get("error", "not checked")))))
    return checks


def _check_variables() -> list[Check]:
    return [ok(name, os.environ[name]) for name in _VARIABLES if name in os.environ]


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (answer.stdout.split() or ["unknown"])[0]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _show(checks: list[Check]) -> None:
    console = Console()
    if not console.file.isatty():  # whatever FORCE_COLOR asks for
        console = Console(width=_PIPE_WIDTH, force_terminal=False, no_color=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(
            Text(check.status.value, style=_STYLES[check.status]), check.name, Text(check.found)
        )
    console.print(table)
    for check in checks:
        if check.advice:
            console.print(
                f"{check.status.value}: {check.name}={check.found}: {check.advice}",
                style=_STYLES[check.status],
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    problems = sum(check.status is Status.ERROR for check in checks)
    verdict = f"{problems} problem{'s' * (problems > 1)} would stop the server."
    if not problems:
        verdict = "The connector works here."
    console.print(verdict, style="bold", highlight=False)
