"""Doctor's --config: a whole kv-transfer-config, or only its kv_connector_extra_config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simple_offload.cli.checks import Check, error, ok, warning
from simple_offload.cli.console import size_text
from simple_offload.config import ConfigError, OffloadConfig, ignored_keys
from simple_offload.ranks import Ranks

CONNECTOR = "SimpleCPUOffloadConnector"
MODULE = "simple_offload"
_EXTRA = "kv_connector_extra_config"
_SHARING = {
    "auto": "those of a NUMA node that have the same KV share it",
    "one": "those of a machine that have the same KV share it",
    "private": "none shares it",
}


class TransferConfig(NamedTuple):
    """A parsed, unchecked configuration."""

    whole: Mapping[str, Any] | None
    """vLLM's --kv-transfer-config; None if only ``extra`` was given."""
    extra: Mapping[str, Any]
    """kv_connector_extra_config of this connector."""


def read_transfer_config(text: str | None) -> TransferConfig:
    """Read JSON, or a file with JSON; None stands for the defaults. Raises ConfigError."""
    if text is None:
        return TransferConfig(None, {})
    source = "--config"
    try:
        if not text.lstrip().startswith("{"):
            source = f"--config={text!r}"
            text = Path(text).read_text(encoding="utf-8")
        config = json.loads(text)
    except OSError as failure:
        raise ConfigError(
            f"{source}: {failure.strerror}. Allowed: a JSON object, or a file with one"
        ) from None
    except ValueError as failure:
        raise ConfigError(f"{source}: not JSON: {failure}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: not a JSON object but {type(config).__name__}")
    if not any(key.startswith("kv_connector") or key == "kv_role" for key in config):
        return TransferConfig(None, config)
    return TransferConfig(config, _extra_of(_own_part(config)))


def _own_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """This connector's entry in a MultiConnector's configuration, else the whole."""
    if config.get("kv_connector") == "MultiConnector":
        entries = _extra_of(config).get("connectors")
        for each in entries if isinstance(entries, list) else []:
            if isinstance(each, dict) and each.get("kv_connector") == CONNECTOR:
                return each
    return config


def _extra_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = part.get(_EXTRA) or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"--config: {_EXTRA}={extra!r}: not a JSON object")
    return extra


def check_transfer_config(
    given: TransferConfig, ranks: Ranks
) -> tuple[list[Check], OffloadConfig | None]:
    """Check the configuration for a server of these ranks, and parse the connector's keys; None if
    the connector refuses them."""
    checks = [] if given.whole is None else _check_selection(given.whole)
    try:
        config = OffloadConfig.parse(given.extra, ranks)
    except ConfigError as failure:
        return [*checks, error("configuration", "refused", str(failure))], None
    if ignored := ignored_keys(given.extra):
        checks.append(warning("ignored keys", ", ".join(ignored), "unknown: remove them"))
    is_alone = given.whole is None or given.whole.get("kv_connector") != "MultiConnector"
    if not is_alone and config.kv_layout == "auto":
        advice = "vLLM does not start if another connector, such as NIXL's, wants another one"
        checks.append(warning("kv_layout", "'auto'", f"{advice}. 'keep' wants none"))
    size = size_text(config.bytes_per_rank(ranks.num))
    if config.num_cpu_blocks is not None:
        size = f"{config.num_cpu_blocks} host blocks"
    wanted = f"{size} on each of {ranks.num} ranks"
    if ranks.num_here != ranks.num:
        wanted += f", {ranks.num_here} ranks on this machine"
    if ranks.num > 1:
        wanted += f"; {_SHARING[config.host_copies]}"
    return [*checks, ok("configuration", wanted)], config


def _check_selection(whole: Mapping[str, Any]) -> list[Check]:
    """Whether vLLM would load this connector, and what it does about failed loads."""
    checks, own = [], _own_part(whole)
    if (name := own.get("kv_connector")) != CONNECTOR:
        advice = f"vLLM loads another connector. Allowed: {CONNECTOR!r}"
        checks.append(error("kv_connector", repr(name), advice))
    if (path := own.get("kv_connector_module_path")) != MODULE:
        advice = f"vLLM loads its built-in connector of that name. Allowed: {MODULE!r}"
        checks.append(error("kv_connector_module_path", repr(path), advice))
    if (role := whole.get("kv_role")) not in ("kv_both", "kv_producer", "kv_consumer"):
        advice = "vLLM does not start. Allowed: 'kv_both' (here the other roles do the same)"
        checks.append(error("kv_role", repr(role), advice))
    if (policy := whole.get("kv_load_failure_policy", "fail")) != "recompute":
        advice = "a failed load ends its request. 'recompute' computes the blocks again"
        checks.append(warning("kv_load_failure_policy", repr(policy), advice))
    return checks
