"""``simple-offload doctor``: checks that the connector works here, and how it would copy."""

import argparse
import importlib.util
import json
import os
import platform
import re
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simple_offload import __version__, memory
from simple_offload.cli.arguments import Parser, whole_number
from simple_offload.cli.checks import Check, Status, error, ok, warning
from simple_offload.cli.console import make_console
from simple_offload.cli.machine import (
    check_huge_pages,
    check_lock_limit,
    check_memory,
    check_numa,
    check_second_tier,
)
from simple_offload.cli.probe import Found, probe
from simple_offload.cli.transfer_config import (
    TransferConfig,
    check_transfer_config,
    read_transfer_config,
)
from simple_offload.config import ConfigError, OffloadConfig
from simple_offload.ranks import Ranks

WOULD_FAIL = 1
_VARIABLES = (
    "VLLM_KV_CACHE_LAYOUT",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_DRIVER = "proc/driver/nvidia/version"
_FAULTY_DRIVER = "580.159."
"""Its cuMemcpyBatchAsync copies wrong bytes: docs/measurements.md."""
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}


def add_arguments(parser: Parser) -> None:
    """Those of ``simple-offload doctor``, and its help."""
    parser.description = (
        "doctor checks that the connector works on this machine, and how it would copy: vLLM, "
        "torch, the device, memory and, if given, a configuration. It starts no engine; on a GPU "
        "it measures copies as a server does."
    )
    parser.epilog = (
        "exit codes: 0 the connector works here, maybe with warnings; 1 it would not; 2 wrong usage"
    )
    parser.add_argument(
        "--config",
        metavar="JSON",
        help="kv_connector_extra_config, or the whole --kv-transfer-config, or a file with either",
    )
    for option, text in (
        ("--ranks", "tensor parallel x pipeline parallel ranks of the server (default: 1)"),
        ("--nodes", "machines that share those ranks (default: 1)"),
        ("--data-parallel", "engines on this machine, each with those ranks (default: 1)"),
    ):
        parser.add_argument(option, type=whole_number, default=1, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; return the exit code. Raises ConfigError for wrong arguments."""
    given = read_transfer_config(arguments.config)
    ranks, nodes = arguments.ranks, arguments.nodes
    if ranks % nodes:
        raise ConfigError(f"--nodes {nodes}: must divide --ranks, which is {ranks}")
    num_local = ranks // nodes
    checks = examine(given, Ranks(ranks, num_local * arguments.data_parallel, num_local=num_local))
    num_errors = sum(check.status is Status.ERROR for check in checks)
    console = make_console()
    if arguments.json:
        listed = [asdict(check) for check in checks]
        console.out(json.dumps({"works": num_errors == 0, "checks": listed}, indent=1))
    else:
        _show(console, checks, num_errors)
    return WOULD_FAIL if num_errors else 0


def examine(given: TransferConfig, ranks: Ranks) -> list[Check]:
    """All checks, in the order of a server's start."""
    config_checks, config = check_transfer_config(given, ranks)
    found = probe(given)
    backend = found.values.get("backend", {})
    wanted = None
    if config is not None and config.num_cpu_blocks is None:
        wanted = config.bytes_per_rank(ranks.num) * ranks.num_here
    return [
        ok("simple_offload", f"{__version__}, Python {platform.python_version()}"),
        *_check_torch(found),
        _check_vllm(found),
        _check_device(found),
        *_check_driver(),
        *config_checks,
        *_check_backend(found),
        check_memory(wanted),
        check_lock_limit(wanted, backend.get("name", "HostBackend") != "HostBackend"),
        check_numa(backend.get("nodes", [])),
        check_huge_pages(),
        *_check_second_tier(config, found, ranks),
        *(ok(name, os.environ[name]) for name in _VARIABLES if name in os.environ),
    ]


def _check_torch(found: Found) -> list[Check]:
    checks = []
    if torch := found.values.get("torch"):
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
        checks.append(ok("torch", f"{torch['version']}, {cuda}"))
    else:
        advice = "install vLLM, which brings it"
        if importlib.util.find_spec("torch_npu") is not None:
            advice = "torch_npu is installed: it needs CANN's libraries (source set_env.sh)"
        checks.append(error("torch", found.errors.get("torch", "not checked"), advice))
    if text := found.errors.get("torchvision"):
        advice = (
            "it does not match this torch, so vLLM cannot import transformers: "
            "pip uninstall torchvision torchaudio torchcodec (text models need none of them)"
        )
        checks.append(error("torchvision", text, advice))
    return checks


def _check_vllm(found: Found) -> Check:
    vllm = found.values.get("vllm")
    if vllm is None:
        advice = "pip install 'simple-offload[cuda]' ('simple-offload[cpu]' for the CPU build)"
        return error("vLLM", found.errors.get("vllm", "not checked without torch"), advice)
    version = f"{vllm['version']}, platform {vllm['platform']}"
    if text := found.errors.get("supported") or found.errors.get("connector"):
        _, _, without_type = text.partition(": ")
        return error("vLLM", version, without_type or text)
    return ok("vLLM", f"{version} (supported: {found.values['supported']})")


def _check_device(found: Found) -> Check:
    backend = found.values.get("backend", {})
    if devices := found.values.get("torch", {}).get("devices"):
        text = ", ".join(devices)
        if "cuda" in backend:
            text += f"; the driver is for CUDA {backend['cuda']}"
        if backend.get("batched", True):
            return ok("device", text)
        return warning(
            "device",
            text,
            "no cuMemcpyBatchAsync, so each call copies one descriptor. Use a driver for CUDA 12.8 "
            "or later",
        )
    if "cann" in backend:
        return ok("device", f"NPU, CANN {backend['cann']}")
    if found.values.get("vllm", {}).get("platform") == "cuda":
        return error("device", "none is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return ok("device", "no accelerator: the device cache is in host memory too (for trials)")


def _check_driver() -> list[Check]:
    """Whether this NVIDIA driver has the fault of examples/driver_check.py. Empty without one."""
    if not (text := memory.read(_DRIVER)):
        return []
    match = re.search(r"^NVRM version:.*? (\d+(?:\.\d+)+) ", text)
    version = match[1] if match else "version unknown"
    command = "python3 -m examples.driver_check, in a checkout"
    found = f"whether its cuMemcpyBatchAsync copies right: {command}"
    if version.startswith(_FAULTY_DRIVER):
        found = (
            "its cuMemcpyBatchAsync may copy wrong bytes where a larger descriptor follows a "
            f"smaller one ({command}, shows it). Copies here are right: "
            "descriptors are sorted by size. Other programs may be affected"
        )
    return [ok("driver", f"{version}; {found}")]


def _check_backend(found: Found) -> list[Check]:
    checks = []
    if text := found.errors.get("transfer_config"):
        checks.append(error("kv-transfer-config", "refused by vLLM", text))
    if backend := found.values.get("backend"):
        checks += [ok("backend", backend["name"]), ok("copy path", backend["path"])]
    elif "vllm" in found.values:
        checks.append(error("backend", "none", found.errors.get("backend", "not checked")))
    return checks


def _check_second_tier(config: OffloadConfig | None, found: Found, ranks: Ranks) -> list[Check]:
    if config is None or config.second_tier is None:
        return []
    _, _, refusal = found.errors.get("second_tier", "").partition("ConfigError: ")
    if found.values.get("backend", {}).get("name") == "NpuBackend":
        refusal = "an NPU's runtime owns host memory. Allowed: no second_tier"
    elif ranks.num_local not in (None, ranks.num):
        refusal = "its objects have the pages of all ranks. Allowed: one machine, or no second_tier"
    if refusal:
        return [error("second tier", config.second_tier.type, refusal)]
    return [check_second_tier(config.second_tier)]


def _show(console: Console, checks: list[Check], num_errors: int) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, style=_STYLES[check.status]), check.name, check.found)
    console.print(table)
    for check in checks:
        if check.advice:
            text = f"{check.status}: {check.name}={check.found}: {check.advice}"
            console.out(text, style=_STYLES[check.status])
    verdict = "The connector works here."
    if num_errors:
        verdict = f"{num_errors} problem{'s' * (num_errors > 1)} would stop the server."
    console.print(verdict, style="bold")
