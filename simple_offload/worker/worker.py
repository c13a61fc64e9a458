"""OffloadWorker: the worker side on one rank: submit transfers, poll them, report their ends."""

import secrets
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, cast

import torch

from simple_offload import memory, metrics
from simple_offload.backends.base import CopiesByLayer, Direction, SharesMemory
from simple_offload.backends.select import make_backend
from simple_offload.config import ConfigError, OffloadConfig, check_fits_memory
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport
from simple_offload.ranks import Ranks
from simple_offload.replicas import Replicas
from simple_offload.transfer import Transfer
from simple_offload.worker.ascend_regions import KVCache
from simple_offload.worker.copy_lane import Completion, CopyLane, CopyThreadDied, LaneBroken
from simple_offload.worker.early_announcement import EarlyAnnouncement
from simple_offload.worker.host_pool import HostPool
from simple_offload.worker.layer_groups import LayerGroups
from simple_offload.worker.overlap import Overlap
from simple_offload.worker.rank_pool import Peers, RankPool, TensorParallelPeers
from simple_offload.worker.regions import find_regions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)


class OffloadWorker:
    """The transfers of one rank. One thread, the one that runs the model, calls all methods."""

    def __init__(
        self,
        kv_cache_config: "KVCacheConfig",
        config: OffloadConfig,
        ranks: Ranks,
        replicas: Replicas = Replicas(),  # noqa: B008 - frozen
        make_peers: Callable[[], Peers] = TensorParallelPeers,
        page_layout: Callable[[], tuple[object, ...]] = tuple,
        waiting_layers: Callable[[], Container[str]] = frozenset,
    ) -> None:
        """``replicas``: the ranks that may share host memory. ``make_peers``: their messages, once
        vLLM has connected them. The others are called once the model has been loaded.
        ``page_layout`` returns what decides how a page's bytes are laid out, ``waiting_layers`` the
        names of layers that call ``wait_for_layer_load``."""
        self.config = config
        self._kv_cache_config = kv_cache_config
        self._ranks = ranks
        self._replicas = replicas
        self._make_peers = make_peers
        self._page_layout = page_layout
        self._waiting_layers = waiting_layers
        self._layout: tuple[object, ...] = ()
        self._backend = make_backend(config.backend, config.copy_path)
        self._name = secrets.token_hex(8)
        self._metadata = StepMetadata()
        self._last_submitted = {Direction.LOAD: -1, Direction.STORE: -1}
        # With Mamba states, vLLM queues copies of a request's state, and of the blocks in which
        # hits end, before a step's connector hooks run: ``bind`` is too late to hold them back.
        can_wait = not kv_cache_config.has_mamba_layers
        self._announcements = EarlyAnnouncement(config.sync_load_ms / 1e3 if can_wait else 0.0)
        self._report = WorkerReport()
        self._meter = metrics.Meter()
        self._reported_open = 0
        self._is_shut_down = False
        self.lanes: dict[Direction, CopyLane] = {}
        """Empty until KV caches are registered."""

    def register_kv_caches(self, kv_caches: Mapping[str, KVCache]) -> None:
        """Find the device blocks, begin to open as many host blocks as this rank has room for, and
        start the copy threads. A rank without attention layers copies nothing. Raises ConfigError
        or MemoryShortageError if the machine has too little memory, and RuntimeError if a rank that
        may share memory cannot start."""
        regions = find_regions(kv_caches, self._kv_cache_config)
        self._rank_pool = self._meet_ranks([region.shape[1] for region in regions])
        with self._rank_pool.others_wait():
            groups = self._divide(kv_caches, regions)
            self._prepare_host_pool(regions)
        self.host_pool.open()
        self.lanes = {
            Direction.LOAD: CopyLane(self._backend, Direction.LOAD, groups.num),
            Direction.STORE: CopyLane(self._backend, Direction.STORE),
        }
        backend = cast(CopiesByLayer, self._backend)
        self._overlap = Overlap(groups, self.lanes[Direction.LOAD], backend, self._meter)

    def _divide(self, kv_caches: Mapping[str, KVCache], regions: list[torch.Tensor]) -> LayerGroups:
        """Have loads copied by layer group; in one, if compute must wait for whole loads."""
        backend, waiting = self._backend, self._waiting_layers()
        if not (self.config.overlap_loads and self._announcements.wait_seconds > 0):
            return LayerGroups()
        if not isinstance(backend, CopiesByLayer) or any(name not in waiting for name in kv_caches):
            return LayerGroups()
        tensors = {name: c for name, c in kv_caches.items() if isinstance(c, torch.Tensor)}
        groups = LayerGroups.find(tensors, regions, backend.least_part_bytes)
        if groups.num > 1:
            logger.info(
                "Loads come in %d groups of layers: compute begins with the first",
                groups.num,
            )
            backend.divide(groups.parts)
        return groups

    def _prepare_host_pool(self, regions: list[torch.Tensor]) -> None:
        """Decide its size. Raises as ``register_kv_caches``."""
        page_bytes = [region.shape[1] for region in regions]
        row = self._rank_pool.row
        if row is not None:
            # The start too: without shared parts, small rows may be as long as with them.
            self._layout = (row.start, page_bytes, *self._page_layout())
        block_bytes = row.num_bytes if row is not None else sum(page_bytes)
        num_sharing = self._rank_pool.num_sharing
        num_blocks = self.config.num_host_blocks(max(block_bytes, 1), self._ranks.num, num_sharing)
        needed = num_blocks * block_bytes * self._ranks.num_here // num_sharing
        if self.config.num_cpu_blocks is not None:  # bytes were checked as they were read
            check_fits_memory(needed, "num_cpu_blocks", self.config.num_cpu_blocks)
        if needed < self._backend.chunk_bytes:
            # Every rank on this machine allocates all at once, and maybe no page is in place
            # before it is written: no rank would notice the others.
            with memory.using_reserve():
                memory.require(needed)
        logger.info(
            "Host memory of this rank and %d others: %.2f GiB, %d blocks of %d bytes in %d regions",
            num_sharing - 1,
            num_blocks * block_bytes / 2**30,
            num_blocks,
            block_bytes,
            len(regions),
        )
        self._backend.open(regions)
        self.host_pool = HostPool(
            self._backend,
            page_bytes,
            num_blocks,
            is_agreed=self._ranks.are_alike,
            rank_pool=self._rank_pool,
        )
        self._block_bytes = sum(page_bytes)

    @property
    def capacity(self) -> RankCapacity:
        """Host blocks that this rank has room for, and those open by now."""
        pool, rank_pool = self.host_pool, self._rank_pool
        row = rank_pool.row
        return RankCapacity(
            self._name,
            pool.num_blocks,
            pool.num_open,
            self._block_bytes,
            rank_pool.size,
            self._replicas.private_groups if rank_pool.size > 1 else frozenset(),
            row.num_bytes if row is not None else 0,
            rank_pool.address,
            self._layout,
        )

    # One step

    def bind(self, metadata: StepMetadata) -> None:
        """Begin a step: make its compute wait for the loads it admits, and start its loads.

        Stores left over from the step before start first: vLLM's V1 runner calls ``wait_for_save``
        after drafting, which only the last stage of a pipeline reaches, and vLLM 0.30 in steps with
        tokens only. (``get_transfer_results`` would be too early for stores: the V1 runner calls it
        before drafting.)

        Loads come after the compute of earlier steps and the zeroing of new blocks, which vLLM has
        queued by now. The step's own compute reads none of the blocks they fill, so loads need not
        come after it.
        """
        if metadata is not self._metadata:
            self.submit_stores()
        self._metadata = metadata
        self._report.step = metadata.step
        if self.lanes:
            self.host_pool.on_step()
            if metadata.num_host_blocks is not None:
                self.host_pool.agree(metadata.num_host_blocks)
            if metadata.admitted:
                self._overlap.hold_compute(set(metadata.admitted), metadata.num_tokens)
        self._announcements.on_step(metadata.num_tokens > 0, metadata.admitted)
        self.submit_loads()

    def submit_loads(self) -> None:
        """Start the step's loads that have not been started."""
        self._submit(Direction.LOAD, self._metadata.loads)

    def wait_for_layer(self, name: str) -> None:
        """Make the compute that is queued next wait for the loaded KV of this layer."""
        if self.lanes:
            self._overlap.on_layer(name)

    def submit_stores(self) -> None:
        """Start the step's stores that have not been started, after the compute queued so far."""
        if self.lanes:
            self._overlap.on_forward_ended()
        self._submit(Direction.STORE, self._metadata.stores)

    def poll(self) -> tuple[set[str], set[str]]:
        """Note the transfers that have ended since the last call, for the report. Never waits.

        Returns the requests whose loads have ended on this rank or are announced, and those among
        them whose load failed. A load is announced before its end if little of it is left
        (``EarlyAnnouncement``); ``bind`` makes compute wait for the rest, or each layer of it
        (``Overlap``).
        """
        loaded: set[str] = set()
        failed: set[str] = set()
        if not self.lanes:
            return loaded, failed
        self._overlap.on_forward_ended()
        load_lane, store_lane = self.lanes[Direction.LOAD], self.lanes[Direction.STORE]
        for completion in load_lane.poll():
            self._note(Direction.LOAD, completion)
            if self._announcements.on_load_ended(completion.transfer.id):
                if completion.error is not None:
                    # The device broke, or refused a later layer group: only CUDA announces, and an
                    # error in queued work breaks its context for good. The request may be running,
                    # and vLLM handles the failure only of a request that waits
                    # (_handle_failed_recving).
                    raise RuntimeError("a load failed after it was announced") from completion.error
                continue
            loaded.add(_request_of(completion.transfer))
            if completion.error is not None:
                failed.add(_request_of(completion.transfer))
        if (lead_seconds := self._announcements.lead_seconds) > 0:
            for transfer in load_lane.nearly_done(lead_seconds, self._overlap.hidden_seconds):
                if self._announcements.announce(transfer.id):
                    loaded.add(_request_of(transfer))
        for completion in store_lane.poll():
            self._note(Direction.STORE, completion)
        return loaded, failed

    def drain_report(self) -> WorkerReport | None:
        """The ends noted since the last call, newly opened blocks, and the step's number; None if
        there are none."""
        if not self.lanes:
            return None
        if self.host_pool.num_open != self._reported_open:
            self._report.capacities[self._name] = capacity = self.capacity
            self._reported_open = capacity.num_open
        elif not self._report.ended and self._report.step is None:
            return None  # a lane that breaks fails a transfer, so none is missed
        self._report.broken = any(lane.is_broken for lane in self.lanes.values())
        report, self._report = self._report, WorkerReport()
        return report

    def drain_stats(self) -> metrics.OffloadStats | None:
        """Counts since the last call; None if there are none."""
        return self._meter.drain()

    def drain(self) -> None:
        """Wait until no copy is under way, since vLLM is about to take device memory away (sleep).
        The ends are reported when the engine steps again."""
        for lane in self.lanes.values():
            lane.drain()

    def shutdown(self) -> None:
        """Finish the copies under way, join the threads, free the host memory. Safe to call
        twice, and before any KV cache has been registered.

        If a copy thread does not end, the host memory it may be writing to stays."""
        if not self.lanes or self._is_shut_down:
            return
        self._is_shut_down = True
        self.host_pool.close()
        for lane in self.lanes.values():
            lane.close()
        if not any(lane.is_stuck for lane in self.lanes.values()):
            self._backend.close()
            self._rank_pool.free()

    # Details

    def _meet_ranks(self, page_bytes: list[int]) -> RankPool:
        """Find the ranks that share this one's host memory, as ``host_copies`` says. For a second
        tier, all do."""
        backend, count = self._backend, self._replicas.count
        are_alike = self.config.host_copies != "private" and count > 1
        if self.config.second_tier is not None:
            if not isinstance(backend, SharesMemory):
                raise ConfigError(
                    "second_tier: the scheduler's process must reach host memory, which this "
                    f"device's runtime allocates (backend={self.config.backend!r}); allowed: none"
                )
            peers = self._make_peers()
            has_own = not are_alike or self._replicas.private_groups
            replica_set = peers.rank if has_own else peers.rank // count
            own = replica_set, tuple(page_bytes)
            return RankPool.meet_in_rows(peers, own, sum(page_bytes))
        if not are_alike:
            return RankPool()
        if not isinstance(backend, SharesMemory):
            logger.info(
                "%d ranks have the same KV. Each has a copy of it in host memory: the device's "
                "runtime must allocate that memory, and it cannot be shared",
                count,
            )
            return RankPool()
        peers = self._make_peers()
        node = backend.numa_node if self.config.host_copies == "auto" else None
        # A share of the machine's memory may be more for a rank that asks later.
        num_bytes = self.config.bytes_per_rank(self._ranks.num)
        return RankPool.meet(peers, (peers.rank // count, num_bytes, *page_bytes), node)

    def _submit(self, direction: Direction, transfers: list[Transfer]) -> None:
        """Submit each transfer once, however often a hook is called."""
        due = [t for t in transfers if t.id > self._last_submitted[direction]]
        if not due:
            return
        assert self.lanes, "transfers before any KV cache was registered"
        lane = self.lanes[direction]
        ordered = any(transfer.after_compute for transfer in due)
        barrier = self._backend.barrier() if ordered else None
        for transfer in due:
            own = self._rank_pool.own_part(direction, transfer)
            if direction is Direction.LOAD:
                own = self._overlap.plan(own, self._announcements.lag_seconds)
            lane.submit(own, barrier if transfer.after_compute else None)
            self._last_submitted[direction] = transfer.id

    def _note(self, direction: Direction, completion: Completion) -> None:
        transfer_id = completion.transfer.id
        self._report.ended[transfer_id] += 1
        self._measure(direction, completion)
        if completion.error is not None:
            self._report.failed[transfer_id] += 1
            logger.error(
                "%s %d of %d blocks failed on this rank: %r",
                direction.value,
                transfer_id,
                len(completion.transfer.host_blocks),
                completion.error,
            )

    def _measure(self, direction: Direction, completion: Completion) -> None:
        way, stats = direction.value, completion.stats
        if stats is None:
            self._meter.add(metrics.FAILED, 1, way, _reason_of(completion.error))
            return
        size = len(completion.transfer.host_blocks) * self._block_bytes
        if not size:
            return  # others of the rank pool have stored all
        num_bytes = stats.num_bytes or {"host": size}
        for path, count in num_bytes.items():
            self._meter.add(metrics.BYTES, count, way, path)
        self._meter.sample(metrics.SECONDS, stats.seconds, way)
        if direction is Direction.LOAD:
            self._overlap.on_load_ended(completion.transfer, stats.seconds)
        self._meter.sample(metrics.WAIT_SECONDS, stats.wait_seconds, way)
        if stats.seconds > 0:
            self._meter.sample(metrics.BANDWIDTH, sum(num_bytes.values()) / stats.seconds, way)


def _reason_of(error: BaseException | None) -> str:
    """The metric's label for the reason of a failure."""
    if isinstance(error, LaneBroken):
        return "switched_off"
    if isinstance(error, CopyThreadDied) or not isinstance(error, Exception):
        return "thread_died"
    return "no_such_block" if isinstance(error, IndexError) else "copy_error"


def _request_of(load: Transfer) -> str:
    assert load.request_id is not None, "a load belongs to a request"
    return load.request_id
