"""OffloadWorker: the worker side of one rank: submit, poll, report."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from simple_offload.backends.base import Direction
from simple_offload.backends.select import make_backend
from simple_offload.config import OffloadConfig, check_fits_memory
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity, StepMetadata, Transfer, WorkerReport
from simple_offload.worker.host_pool import HostPool
from simple_offload.worker.regions import find_regions
from simple_offload.worker.transfers import Completion, TransferEngine

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)


class OffloadWorker:
    """Called by one thread, the one that runs the model."""

    def __init__(
        self, kv_cache_config: "KVCacheConfig", config: OffloadConfig, num_ranks: int
    ) -> None:
        self.config = config
        self._kv_cache_config = kv_cache_config
        self._num_ranks = num_ranks
        self._backend = make_backend(config.backend)
        self._metadata: StepMetadata | None = None
        self._last_submitted = {Direction.LOAD: -1, Direction.STORE: -1}
        self._report = WorkerReport()
        self._engine: TransferEngine | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, "torch.Tensor"]) -> None:
        """Find the device blocks, allocate as many host blocks as this rank has memory for,
        and start the copy threads. A rank without attention layers copies nothing."""
        regions = find_regions(kv_caches, self._kv_cache_config)
        block_bytes = sum(region.shape[1] for region in regions)
        num_blocks = self.config.num_host_blocks(max(block_bytes, 1), self._num_ranks)
        needed = num_blocks * block_bytes * self._num_ranks
        check_fits_memory(needed, "num_cpu_blocks", self.config.num_cpu_blocks)
        self.host_pool = HostPool(self._backend, regions, num_blocks)
        self._backend.open(regions, self.host_pool.tensors)
        self._engine = TransferEngine(self._backend)
        self.capacity = RankCapacity(num_blocks, block_bytes)
        logger.info(
            "Host memory of this rank: %.2f GiB, %d blocks of %d bytes in %d regions",
            self.host_pool.nbytes / 2**30,
            num_blocks,
            block_bytes,
            len(regions),
        )

    # One step

    def bind(self, metadata: StepMetadata) -> None:
        """Take the transfers of the step that is about to run."""
        self._metadata = metadata

    def unbind(self) -> None:
        """The step is over."""
        self._metadata = None

    def submit_loads(self) -> None:
        """Start the step's loads. vLLM calls this when compute that read the blocks before,
        and the zeroing of new blocks, have been queued."""
        if self._metadata is not None:
            self._submit(Direction.LOAD, self._metadata.loads)

    def submit_stores(self) -> None:
        """Start the step's stores, after the compute queued so far."""
        if self._metadata is not None:
            self._submit(Direction.STORE, self._metadata.stores)

    def poll(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended on this rank since the last call, and those among
        them whose load failed. Notes every ended transfer for the report."""
        loaded: set[str] = set()
        failed: set[str] = set()
        if self._engine is None:
            return loaded, failed
        for completion in self._engine.poll(Direction.LOAD):
            self._note(Direction.LOAD, completion)
            request_id = completion.transfer.request_id
            assert request_id is not None
            loaded.add(request_id)
            if completion.error is not None:
                failed.add(request_id)
        for completion in self._engine.poll(Direction.STORE):
            self._note(Direction.STORE, completion)
        return loaded, failed

    def take_report(self) -> WorkerReport | None:
        """What has been noted since the last call; None when nothing."""
        if not self._report.ended:  # a lane breaks by failing a transfer, so this misses none
            return None
        assert self._engine is not None
        self._report.broken = self._engine.broken
        report, self._report = self._report, WorkerReport()
        return report

    def drain(self) -> None:
        """Wait until no copy touches device memory, which is about to be taken away (sleep).
        What has ended is reported when the engine steps again."""
        if self._engine is not None:
            self._engine.drain()

    def shutdown(self) -> None:
        """Finish the copies under way, join the threads, free the host memory. Safe to call
        twice, and before any KV cache has been registered."""
        if self._engine is not None:
            self._engine.close()
            if not self._engine.stuck:
                self.host_pool.close()

    # Details

    def _submit(self, direction: Direction, transfers: list[Transfer]) -> None:
        """Submit what has not been submitted yet, however often a hook is called."""
        due = [t for t in transfers if t.id > self._last_submitted[direction]]
        if not due:
            return
        assert self._engine is not None, "transfers before any KV cache was registered"
        barrier = self._backend.barrier()
        for transfer in due:
            self._engine.submit(direction, transfer, barrier)
            self._last_submitted[direction] = transfer.id

    def _note(self, direction: Direction, completion: Completion) -> None:
        transfer_id = completion.transfer.id
        self._report.ended[transfer_id] += 1
        if completion.error is not None:
            self._report.failed[transfer_id] += 1
            logger.error(
                "%s %d of %d blocks failed on this rank: %r",
                direction.value,
                transfer_id,
                len(completion.transfer.host_blocks),
                completion.error,
            )
