"""Setup: what the scheduler side is made of before the first request."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from simple_offload import metrics, vllm_compat
from simple_offload.config import ConfigError, OffloadConfig, SecondTierConfig
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity
from simple_offload.ranks import Ranks
from simple_offload.scheduler.gate import Gate
from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.parked import Parked
from simple_offload.scheduler.policy.at_once import AtOnce
from simple_offload.scheduler.policy.before_eviction import BeforeEviction
from simple_offload.scheduler.policy.store_policy import PolicyParts, StorePolicy
from simple_offload.scheduler.prompt_records import PromptRecords
from simple_offload.scheduler.rank_reports import TransferLedger
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.supported import (
    chunk_sizes,
    require_right_states,
    require_sub_blocks_possible,
    require_supported_groups,
)
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups, host_groups
from simple_offload.scheduler.write_hazards import WriteHazards
from simple_offload.second_tier.interface import SecondTierHooks
from simple_offload.second_tier.opening import open_second_tier, require_second_tier_possible
from simple_offload.unread_groups import unread_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)


class Setup:
    """Makes the parts: first the host tier, without host blocks but vLLM's null block, and what
    moves blocks there, then what needs the device's blocks. Agrees with the ranks, which open host
    blocks, on their number, and opens the second tier."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: OffloadConfig,
    ) -> None:
        """Raises ConfigError for what this version cannot serve."""
        self._config = config
        self._vllm_config = vllm_config
        self._device_config = kv_cache_config
        # Refusals come first: nothing is opened or started for what cannot be served.
        require_supported_groups(kv_cache_config)
        self._block_size, self._hash_block_size = resolve_kv_cache_block_sizes(
            kv_cache_config, vllm_config
        )
        self._num_sub_blocks = config.num_sub_blocks(self._block_size)
        if self._num_sub_blocks > 1:
            require_sub_blocks_possible(config, kv_cache_config, self._block_size)
        if config.second_tier is not None:
            require_second_tier_possible(config.second_tier, vllm_config)
        self._unread_ids = unread_groups(vllm_config, kv_cache_config, self._block_size)
        coordinator = self._make_coordinator()
        require_right_states(coordinator, self._hash_block_size)
        # The tier has vLLM's null block only. The ranks tell later how many host blocks there are.
        self._ranks = Ranks.from_config(vllm_config.parallel_config)
        self.meter = metrics.Meter()
        self.groups = Groups(
            coordinator, self._hash_block_size, self._num_sub_blocks, self._unread_ids
        )
        self._make_policy = self._choose_policy()
        is_exclusive = self._make_policy is BeforeEviction
        self.tier = CpuTier(coordinator, self.groups, self.meter, is_exclusive=is_exclusive)
        self.ledger = TransferLedger(self._ranks.num)
        self.loads = Loads(self.tier, self.groups, self.ledger, self.meter)
        self.stores = Stores(self.tier, self.groups, self.ledger, self.meter)
        # Listeners to stores. The second tier joins when the ranks have opened memory for it.
        self.events: KVEvents | None = None
        """None unless vLLM is configured for them."""
        events_config = vllm_config.kv_events_config
        if events_config is not None and events_config.enable_kv_cache_events:
            self.events = KVEvents(self.tier, self.groups)
            self.stores.on_committed.append(self.events.on_committed)
        self.second_tier = SecondTierHooks()
        """Another one once the ranks have told of their memory, if there is to be one."""
        self._capacities: dict[str, RankCapacity] = {}
        """By rank, its last report."""
        self._capacity: int | None = None
        """Host blocks of a device block's size that all ranks have room for, once known."""
        self._is_capacity_sent = self._ranks.are_alike
        """Whether the ranks know it. Ranks that are alike need no message."""

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Make what needs the device's blocks and block tables."""
        self._device_pool = kv_cache_manager.block_pool
        self.records = PromptRecords(self.tier, self.groups, kv_cache_manager, self.meter)
        self.policy: StorePolicy = self._make_policy(
            PolicyParts(
                self._config,
                self._vllm_config,
                self.tier,
                self.groups,
                self.stores,
                kv_cache_manager,
                self.records,
                self.meter,
                wants_events=self.events is not None,
            )
        )
        self.parked = Parked(kv_cache_manager, self._vllm_config)
        self.gate = Gate(
            self.loads,
            self.groups,
            self.parked,
            self.policy,
            self.records,
            self._block_size,
            chunk_sizes(self._device_config),
            self._vllm_config.scheduler_config.max_num_seqs,
        )
        self.hazards = WriteHazards(kv_cache_manager, self._vllm_config.max_concurrent_batches)

    @property
    def must_send_capacity(self) -> bool:
        """Whether ranks wait for ``send_capacity``."""
        return self._capacity is not None and not self._is_capacity_sent

    def send_capacity(self) -> int | None:
        """Host blocks, of a device block's size, that all ranks have room for, for the ranks to be
        told with the next step. None: not known yet, or they know."""
        self._is_capacity_sent |= self._capacity is not None
        return None if self._ranks.are_alike else self._capacity

    def on_capacities(self, capacities: Iterable[RankCapacity]) -> None:
        """Use the host blocks that every rank has opened: each must have room for each block.
        Raises ConfigError if there is too little, or the second tier cannot be opened."""
        self._capacities.update({capacity.rank: capacity for capacity in capacities})
        if len(self._capacities) == self._ranks.num:
            if self._capacity is None:
                self._agree()
            num_open = min(capacity.num_open for capacity in self._capacities.values())
            self.tier.grow(num_open // self._num_sub_blocks)

    def _agree(self) -> None:
        """Every rank has reported its room: the smallest decides."""
        # The smallest room, as larger host blocks count.
        capacities = self._capacities.values()
        by_rank = [each.num_host_blocks // self._num_sub_blocks for each in capacities]
        room = min(by_rank)
        block_size = self._block_size * self._num_sub_blocks
        if self._num_sub_blocks > 1 and room < 2:
            raise ConfigError(
                f"cpu_block_size={block_size}: a rank has room for {room} host blocks of "
                f"{block_size} tokens. Allowed: room for at least 2, that is a smaller block or "
                "more host memory"
            )
        # Contents of a private group take a block for each rank of a pool.
        self._capacity = min(each.num_host_blocks for each in capacities)
        num_bytes = sum(self._capacity * each.block_bytes // each.num_places for each in capacities)
        self.meter.set(metrics.HOST_BYTES, num_bytes)
        private = frozenset[int]().union(*(each.private_groups for each in capacities))
        num_places = max(each.num_places for each in capacities)
        self.tier.share(private, num_places)
        if num_places > 1:
            shared = [group for group in self.groups.ids if group not in private]
            logger.info(
                "Up to %d ranks share one host copy of KV cache groups %s, and have copies of "
                "their own of groups %s. %d host blocks; with copies for each rank, %d",
                num_places,
                shared,
                sorted(private),
                self._capacity,
                self._capacity // num_places,
            )
        if len(set(by_rank)) > 1:
            logger.info("Ranks have room for %s host blocks; all use %d", by_rank, room)
        if self._config.second_tier is not None:
            self._open_second_tier(self._config.second_tier)
        logger.info(
            "Host tier: %d blocks of %d tokens, %s",
            room,
            block_size,
            self._describe_policy(),
        )

    def _choose_policy(self) -> type[AtOnce | BeforeEviction]:
        """By the model, and ``lazy_offload``."""
        lazy_offload, groups = self._config.lazy_offload, self.groups
        is_one_chain = groups.all_chained and len(groups.ids) == 1 and groups.num_sub_blocks == 1
        if lazy_offload and not is_one_chain:
            logger.warning(
                "lazy_offload=True is for models with one KV cache group, and host blocks of a "
                "device block's size. Here, each block is stored when it is full"
            )
        return BeforeEviction if is_one_chain and lazy_offload is not False else AtOnce

    def _describe_policy(self) -> str:
        """The policy in a few words, for the log."""
        when = "stores at once"
        if self._make_policy is BeforeEviction:
            when = "stores when the device evicts"
            if not self._config.lazy_offload:
                when = "stores early where there is room"
        threshold = self._config.store_threshold
        return when if threshold == 1 else f"{when}, prefixes that {threshold} requests had"

    def _open_second_tier(self, config: SecondTierConfig) -> None:
        """Over the ranks' memory."""
        self.second_tier = open_second_tier(
            config,
            self._vllm_config,
            self._device_config,
            list(self._capacities.values()),
            self._make_coordinator(),
            self.tier,
            self.groups,
            self.meter,
            lambda: block_pool.cached(self._device_pool),  # a reset makes another
            (lambda *_: None) if self.events is None else self.events.on_fetched,
        )
        self.stores.on_committed.append(self.second_tier.on_stored)

    def _make_coordinator(self) -> "KVCacheCoordinator":
        """vLLM's coordinator for host blocks, with a pool of vLLM's null block only."""
        return vllm_compat.make_host_coordinator(
            replace(
                host_groups(self._device_config, self._num_sub_blocks, self._unread_ids),
                num_blocks=1,
            ),
            self._vllm_config,
            self._block_size * self._num_sub_blocks,
            self._hash_block_size * self._num_sub_blocks,
        )
