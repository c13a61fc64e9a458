"""The KV connectors that engines are compared with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SIMPLE = "SimpleCPUOffloadConnector"
"""The name of vLLM's built-in connector, and of ours."""
PACKAGE = "simple_offload"
ROOT_DIR = "{root_dir}"
"""In the configuration of a contender with files: the place of their folder."""


@dataclass(frozen=True)
class Contender:
    """One way to run vLLM."""

    name: str
    connector: str | None = None
    """vLLM's ``kv_connector``; None runs without one."""
    module: str | None = None
    """``kv_connector_module_path`` of a connector from outside vLLM."""
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``kv_connector_extra_config``."""
    source: str | None = None
    """Folder with another package ``simple_offload``, which takes the place of this one."""

    @property
    def has_files(self) -> bool:
        """Whether it has files behind host memory."""
        return ROOT_DIR in json.dumps(self.extra)

    def with_files(self, folder: Path) -> "Contender":
        """The same, with its files in ``folder``, if it has some."""
        extra = json.dumps(self.extra).replace(json.dumps(ROOT_DIR), json.dumps(str(folder)))
        return replace(self, extra=json.loads(extra))

    def transfer_config(self, **size: int) -> dict[str, Any] | None:
        """vLLM's ``kv_transfer_config`` for a host tier of this ``size``, such as
        ``cpu_bytes_to_use`` of all ranks together."""
        if self.connector is None:
            return None
        extra: dict[str, Any] = {**size, **self.extra}
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        if self.module is not None:
            config["kv_connector_module_path"] = self.module
            extra["keep_on_device_reset"] = True  # as the others do by default
        return config


NONE = Contender("none")
OURS = Contender("ours", SIMPLE, PACKAGE)
_FILES = {"type": "fs", "root_dir": ROOT_DIR}
_OURS_FILES = {**_FILES, "bytes": "1TiB"}
_ALWAYS = _OURS_FILES | {"fetch": "always"}
CONTENDERS = {
    contender.name: contender
    for contender in (
        NONE,
        OURS,
        replace(OURS, name="ours-private", extra={"host_copies": "private"}),
        replace(OURS, name="ours-whole", extra={"overlap_loads": False}),
        Contender("builtin", SIMPLE),
        Contender("builtin-lazy", SIMPLE, extra={"lazy_offload": True}),
        Contender("offloading", "OffloadingConnector"),
        replace(OURS, name="ours-files", extra={"second_tier": _OURS_FILES}),
        replace(OURS, name="ours-files-always", extra={"second_tier": _ALWAYS}),
        Contender(
            "offloading-files",
            "OffloadingConnector",
            extra={"spec_name": "TieringOffloadingSpec", "secondary_tiers": [_FILES]},
        ),
    )
}
"""Those with files have a second tier; "always": also where computing is quicker than reading."""
ON_CPU = ("none", "ours", "ours-files", "ours-files-always")
"""The others copy with CUDA."""


def before(source: Path) -> Contender:
    """Ours at another commit: the package in the folder ``source``."""
    return replace(OURS, name="before", source=str(source.resolve()))
