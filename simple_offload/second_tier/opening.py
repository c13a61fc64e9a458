"""Opening the second tier: what it needs, and what is refused."""

import hashlib
import json
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from simple_offload import metrics
from simple_offload.config import ConfigError, SecondTierConfig
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.second_tier import namespace
from simple_offload.second_tier.helper import start_helper
from simple_offload.second_tier.objects import Objects, make_spec, require_known_options
from simple_offload.second_tier.reach import Reach
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.second_tier import SecondTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = get_logger(__name__)

_MIN_OBJECTS = 64
"""Objects that a limit must have room for (``Directory``)."""


def require_second_tier_possible(config: SecondTierConfig, vllm_config: "VllmConfig") -> None:
    """Raise ConfigError where a second tier cannot be had, as far as is known before the ranks have
    started."""
    # Again: where no full CUDA graphs are captured, vLLM does not ask the connector before.
    require_known_options(config)
    namespace.require_reproducible_hashes(vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise ConfigError(
            f"second_tier with {parallel.world_size} ranks of which "
            f"{parallel.tensor_parallel_size} are tensor parallel: an object has the pages of all "
            "ranks, and those of other pipeline or prefill context parallel ranks cannot be "
            "reached; allowed: tensor parallel ranks only, or no second_tier"
        )
    changes = {
        "weight_transfer_config": vllm_config.weight_transfer_config,
        "worker_extension_cls": parallel.worker_extension_cls,
    }
    ways = [name for name, value in changes.items() if value]
    if ways and config.cache_namespace is None:
        raise ConfigError(
            f"second_tier with {' and '.join(ways)}: weights may change while the server runs, and "
            "its objects are those of the weights that it started with, for every later server "
            'too; allowed: no second_tier, or a "cache_namespace" that no server with other '
            "weights has"
        )
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "second_tier with LoRA: block hashes have an adapter's name and path, not its weights, "
            "which another server may have changed; allowed: no --enable-lora, or no second_tier"
        )


def open_second_tier(
    config: SecondTierConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    capacities: Sequence[RankCapacity],
    coordinator: "KVCacheCoordinator",
    tier: CpuTier,
    groups: Groups,
    meter: metrics.Meter,
    on_device: Callable[[], Container[bytes]],
    on_fetched: Callable[[Run, "Request", Sequence[int]], None],
) -> SecondTier:
    """The second tier over the ranks' memory. ``coordinator``: for its own use. Raises ConfigError
    where it cannot start."""
    # The memory of the ranks, as this process sees it.
    address = next((each.memory for each in capacities if each.memory is not None), None)
    if address is None:
        raise ConfigError(
            f"second_tier={config.type!r}: the ranks share no memory; allowed: no second_tier"
        )
    num_slots = min(each.num_host_blocks for each in capacities)
    row_bytes = capacities[0].row_bytes * groups.num_sub_blocks
    try:
        rows = Rows(address, num_slots // groups.num_sub_blocks, row_bytes)
    except OSError as error:
        raise ConfigError(
            "second_tier: the scheduler's process cannot reach the ranks' memory, as in another "
            f"container or as another user: {error}; allowed: one machine, or no second_tier"
        ) from error

    # The namespace: objects of other weights, settings or layouts must not be found.
    layouts = sorted(json.dumps(each.layout, sort_keys=True) for each in capacities)
    described = namespace.describe(
        vllm_config,
        kv_cache_config,
        row=[row_bytes, groups.num_sub_blocks, layouts],
        name=config.cache_namespace,
    )
    digest = namespace.digest(described)

    # A process for checksums and the directory: they would hold up vLLM's steps.
    root = _root(config, row_bytes)
    try:
        helper = start_helper(rows, root, config.bytes)
    except OSError as error:
        where = f"={config.type!r}" if root is None else f".root_dir={str(root)!r}"
        raise ConfigError(f"second_tier{where}: {error}") from error

    # vLLM's tier. After the directory's check, as vLLM's fs tier would create any folder.
    spec = make_spec(digest, vllm_config, kv_cache_config, groups, row_bytes)
    try:
        objects = Objects(config, spec, rows.view, hashlib.sha256(digest.encode()).digest())
    except ConfigError:
        helper.close()
        raise
    if root is not None:
        # For people only. "x" follows no link, which others who may write here could have made.
        with suppress(OSError), Path(root, f"{digest}.json").open("x") as file:
            json.dump(described, file, indent=1, sort_keys=True)
    logger.info(
        "Second tier: %s, objects of %d bytes, namespace %s", config.type, row_bytes, digest
    )
    return SecondTier(
        objects,
        rows,
        helper,
        tier,
        groups,
        Reach(coordinator, groups),
        meter,
        on_device,
        on_fetched,
        always=config.fetch == "always",
    )


def _root(config: SecondTierConfig, row_bytes: int) -> Path | None:
    """The folder of vLLM's fs tier; None for other tiers. Raises ConfigError if its limit is too
    low."""
    if config.type != "fs" or config.bytes is None:
        return None
    if config.bytes < _MIN_OBJECTS * row_bytes:
        raise ConfigError(
            f"second_tier.bytes={config.bytes}: an object of this model has {row_bytes} bytes; "
            f"allowed: at least {_MIN_OBJECTS * row_bytes}, for {_MIN_OBJECTS} objects"
        )
    return Path(str(config.options["root_dir"]))
