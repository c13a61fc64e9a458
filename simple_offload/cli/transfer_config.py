"""Doctor's --config: a whole kv-transfer-config, or the connector's part of one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simple_offload.cli.arguments import CommandError
from simple_offload.cli.checks import Check, error, ok, warning
from simple_offload.config import ConfigError, OffloadConfig
from simple_offload.foreign_keys import describe_ignored
from simple_offload.ranks import Ranks

CONNECTOR = "SimpleCPUOffloadConnector"
MODULE = "simple_offload"
_EXTRA = "kv_connector_extra_config"


@dataclass(frozen=True)
class TransferConfig:
    """A configuration as it was given."""

    whole: Mapping[str, Any] | None
    """--kv-transfer-config of vLLM; None where only the connector's part was given."""
    extra: Mapping[str, Any]
    """kv_connector_extra_config of this connector."""


def read_transfer_config(text: str | None) -> TransferConfig:
    """Of JSON, or a file that has it; None is the connector with its defaults. CommandError."""
    if text is None:
        return TransferConfig(None, {})
    source = "--config"
    if not text.lstrip().startswith("{"):
        source = f"--config={text!r}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as failure:
            raise CommandError(
                f"{source}: {failure.strerror}. Allowed: a JSON object, or a file that has one"
            ) from None
    try:
        config = json.loads(text)
    except ValueError as failure:
        raise CommandError(f"{source}: not JSON: {failure}") from None
    if not isinstance(config, dict):
        raise CommandError(f"{source}: not a JSON object but {type(config).__name__}")
    if not any(key.startswith("kv_connector") or key == "kv_role" for key in config):
        return TransferConfig(None, config)
    return TransferConfig(config, _own_part(config).get(_EXTRA) or {})


def _own_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a MultiConnector's configuration, this connector's."""
    if config.get("kv_connector") == "MultiConnector":
        for each in (config.get(_EXTRA) or {}).get("connectors") or []:
            if isinstance(each, dict) and each.get("kv_connector") == CONNECTOR:
                return each
    return config


def check_transfer_config(
    given: TransferConfig, ranks: Ranks
) -> tuple[list[Check], OffloadConfig | None]:
    """What is wrong with it for a server of these ranks, and what the connector makes of its
    part; None if it refuses that."""
    checks = [] if given.whole is None else _check_selection(given.whole)
    try:
        config = OffloadConfig.parse(given.extra, ranks.num, ranks.num_here)
    except ConfigError as failure:
        return [*checks, error("configuration", "refused", str(failure))], None
    if ignored := describe_ignored(given.extra):
        checks.append(warning("ignored keys", ignored, "other connectors read them; remove them"))
    if config.num_cpu_blocks is not None:
        wanted = f"{config.num_cpu_blocks} host blocks on each of {ranks.num} ranks"
    else:
        size = config.bytes_per_rank(ranks.num)
        wanted = f"{size / 2**30:.2f} GiB on each of {ranks.num} ranks"
    if ranks.num_here != ranks.num:
        wanted += f", {ranks.num_here} ranks on this machine"
    return [*checks, ok("configuration", wanted)], config


def _check_selection(whole: Mapping[str, Any]) -> list[Check]:
    checks = []
    own = _own_part(whole)
    if own.get("kv_connector") != CONNECTOR:
        checks.append(
            error(
                "kv_connector",
                repr(own.get("kv_connector")),
                f"another connector is loaded. Allowed: {CONNECTOR!r}",
            )
        )
    if own.get("kv_connector_module_path") != MODULE:
        checks.append(
            error(
                "kv_connector_module_path",
                repr(own.get("kv_connector_module_path")),
                f"vLLM loads its built-in connector of that name. Allowed: {MODULE!r}",
            )
        )
    if whole.get("kv_role") not in ("kv_both", "kv_producer", "kv_consumer"):
        checks.append(
            error(
                "kv_role",
                repr(whole.get("kv_role")),
                "vLLM does not start. Allowed: 'kv_both' (the others store and load all the same)",
            )
        )
    if whole.get("kv_load_failure_policy", "fail") != "recompute":
        checks.append(
            warning(
                "kv_load_failure_policy",
                repr(whole.get("kv_load_failure_policy", "fail")),
                "a request whose load fails ends in an error. 'recompute' computes it again",
            )
        )
    return checks
