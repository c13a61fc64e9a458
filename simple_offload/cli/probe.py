"""Imports torch and vLLM and makes a backend, as a server does.

That is done by a process of its own (``child.ask``): an import may fail, hang or end it (torch
without CANN, an unsuitable driver), and a parent that has touched the device could not fork a
server.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from simple_offload.child import ask
from simple_offload.cli.transfer_config import TransferConfig

_ROWS = 4096
_PAGE_BYTES = 4096


class Found(NamedTuple):
    """What a probe has found."""

    values: dict[str, Any]
    """By step, what it has returned."""
    errors: dict[str, str]
    """By step, what it has raised; empty for one that has not ended."""


def probe(given: TransferConfig, seconds: float = 240) -> Found:
    """Run the process, which may take ``seconds``."""
    wanted = {key: str(given.extra.get(key, "auto")) for key in ("backend", "copy_path")}
    second_tier = given.extra.get("second_tier")
    options = {**wanted, "kv_transfer_config": given.whole, "second_tier": second_tier}
    found, end = ask("simple_offload.cli.probe", options, seconds)
    values, errors = found or ({}, {"torch": ""})
    return Found(values, {step: text or end for step, text in errors.items()})


def answer(
    file: Path, backend: str, copy_path: str, kv_transfer_config: Any, second_tier: Any
) -> None:
    """Run all steps, in the order of a server's start. Writes what is found to ``file``, step by
    step: that of the steps before a crash is kept."""
    found = Found({}, {})
    steps: dict[str, Callable[[], Any]] = {
        "torch": _torch,
        "torchvision": _torchvision,
        "vllm": _vllm,
        "supported": _supported,
        "transfer_config": lambda: _transfer_config(kv_transfer_config),
        "connector": _connector,
        "second_tier": lambda: _second_tier(second_tier),
        "backend": lambda: _backend(backend, copy_path),
    }
    for name, step in steps.items():
        found.errors[name] = ""
        file.write_text(json.dumps(found))
        try:
            found.values[name] = step()
            del found.errors[name]
        except Exception as error:  # noqa: BLE001 - doctor reports every kind
            found.errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    file.write_text(json.dumps(found))


def _torch() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)")
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def _torchvision() -> None:
    """vLLM imports transformers, which imports torchvision if it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        importlib.import_module("torchvision")


def _vllm() -> dict[str, str]:
    import vllm
    from vllm.platforms import current_platform

    return {"version": vllm.__version__, "platform": str(current_platform.device_type)}


def _supported() -> str:
    from simple_offload import vllm_compat

    vllm_compat.require_supported_vllm()
    return vllm_compat.supported_range()


def _transfer_config(config: dict[str, Any] | None) -> None:
    if config is not None:
        from vllm.config import KVTransferConfig

        given = KVTransferConfig(**config)
        if given.kv_connector == "MultiConnector":
            for entry in given.kv_connector_extra_config.get("connectors", []):
                KVTransferConfig(**entry, engine_id=given.engine_id)  # as that connector does


def _connector() -> None:
    import simple_offload.connector  # noqa: F401 - importing it is the check


def _second_tier(options: dict[str, Any] | None) -> None:
    if options is not None:
        from simple_offload.config import SecondTierConfig
        from simple_offload.second_tier.objects import require_known_options

        require_known_options(SecondTierConfig.model_validate(options))


def _backend(name: Any, copy_path: str) -> dict[str, Any]:
    from simple_offload.backends.select import make_backend

    backend: Any = make_backend(name, copy_path)
    found: dict[str, Any] = {"name": type(backend).__name__, "path": "plain memory", "nodes": []}
    try:
        if found["name"] == "CudaBackend":
            _measure_cuda(backend, found)
        elif found["name"] == "NpuBackend":
            found["path"] = "batches" if backend.batches else "one descriptor a call"
            found["cann"] = backend.version
    finally:
        backend.close()
    return found


def _measure_cuda(backend: Any, found: dict[str, Any]) -> None:
    """Open ``backend`` with a small tensor: it measures its paths then, as in a server."""
    import torch
    from cuda.bindings import driver

    from simple_offload.backends.cuda.backend import pci_address
    from simple_offload.backends.cuda.dma import copy_one_by_one, resolve_dma
    from simple_offload.backends.host_memory import node_of_pci_device

    _, version = driver.cuDriverGetVersion()
    found["cuda"] = f"{version // 1000}.{version % 1000 // 10}"
    found["batched"] = resolve_dma() is not copy_one_by_one
    backend.open([torch.empty((_ROWS, _PAGE_BYTES), dtype=torch.int8, device="cuda")])
    found["path"] = backend.describe_paths()
    for index in range(torch.cuda.device_count()):
        found["nodes"].append(node_of_pci_device(pci_address(index)))
