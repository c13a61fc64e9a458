"""Driver: a world in which a test runs each copy."""

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.transfer import Transfer
from tests.simulation.shape import Shape
from tests.simulation.world import World

LOAD, STORE = Direction.LOAD, Direction.STORE

_MAX_STEPS = 500


def prompt(num_tokens: int, family: int = 0) -> list[int]:
    """Tokens without two equal blocks, within a family or across 97 families."""
    return [
        (family * 31 + position * position + position // 9) % 97 for position in range(num_tokens)
    ]


def make_request(
    request_id: str,
    tokens: list[int],
    salt: str | None = None,
    hash_size: int = 4,
    **sampling: Any,
) -> Request:
    """A request, hashed every ``hash_size`` tokens. ``sampling``: SamplingParams."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(ignore_eos=True, **sampling),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(hash_size, sha256),
    )


def record_steps(driver: "Driver") -> list[StepMetadata]:
    """The connector's metadata of each step from now on, in a list that grows."""
    steps: list[StepMetadata] = []
    build = driver.scheduler.build_connector_meta

    def build_and_note(scheduler_output: SchedulerOutput) -> StepMetadata:
        steps.append(build(scheduler_output))
        return steps[-1]

    driver.scheduler.build_connector_meta = build_and_note  # type: ignore[method-assign]
    return steps


class Driver:
    """Steps a world and checks it after each step. Copies run only at the test's command."""

    def __init__(self, **shape: Any) -> None:
        self.world = World(Shape(**shape))

    @property
    def scheduler(self) -> OffloadScheduler:
        """This project's scheduler side."""
        scheduler: OffloadScheduler = self.world.connector.scheduler
        return scheduler

    @property
    def tier(self) -> CpuTier:
        return self.scheduler.tier

    @property
    def device_pool(self) -> BlockPool:
        return self.world.scheduler.kv_cache_manager.block_pool

    @property
    def host_pool(self) -> BlockPool:
        """The tier's blocks."""
        return self.world.host_pool

    # Requests

    def start(
        self,
        request_id: str,
        tokens: list[int],
        max_tokens: int = 1,
        salt: str | None = None,
        wishes: Any = None,
        session_id: str | None = None,
        priority: int | None = None,
    ) -> Request:
        """Hand a request to the scheduler."""
        self.world.add_request(
            request_id, tokens, max_tokens, salt, 0, wishes, session_id, priority=priority
        )
        return self.world.requests[request_id]

    def serve(
        self,
        request_id: str,
        tokens: list[int],
        max_tokens: int = 1,
        salt: str | None = None,
        wishes: Any = None,
        session_id: str | None = None,
    ) -> list[int]:
        """Run a request until all is at rest. Returns prompt and output."""
        self.start(request_id, tokens, max_tokens, salt, wishes, session_id)
        self.run()
        return tokens + self.world.finished[request_id][0]

    def fill(self, num_requests: int, first: int = 50) -> None:
        """Serve requests of five whole blocks each, all different: families from ``first`` on."""
        for family in range(first, first + num_requests):
            self.serve(f"fill {family}", prompt(21, family))

    def evict_all(self, first: int = 50) -> None:
        """Serve requests until a device of 40 blocks a group has evicted all earlier blocks."""
        self.fill(8 * len(self.world.shape.windows), first)

    def empty_device_cache(self) -> None:
        """Empty the device's prefix cache. No request may be running."""
        assert self.world.reset(tier=False)

    # Time

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.world.step()
            self.world.check_step()

    def step_until(self, condition: Callable[[], object]) -> None:
        """Step until ``condition`` holds."""
        for _ in range(_MAX_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError("the condition never holds")

    def pending(self, direction: Direction, rank: int = 0) -> list[Transfer]:
        """Transfers that a rank has received and not yet copied."""
        return [copy.transfer for copy in self.world.ranks[rank].device.copies[direction]]

    def copy(self, direction: Direction, rank: int = 0, fail: bool = False) -> None:
        """Run a rank's next copy, and any compute that it waits for. With ``fail``, it fails after
        all blocks but one."""
        device = self.world.ranks[rank].device
        while not device.can_copy(direction):
            assert device.compute_one(), f"rank {rank} has no {direction.value} to run"
        num_blocks = len(device.copies[direction][0].transfer.host_blocks)
        device.copy_one(direction, num_blocks - 1 if fail else None)

    def announce(self, direction: Direction = LOAD, rank: int = 0) -> None:
        """Announce every copy of a rank as nearly done."""
        for copy in self.world.ranks[rank].device.copies[direction]:
            copy.nearly_done = True

    def copy_all(self) -> None:
        """Run all copies of all ranks."""
        for rank, state in enumerate(self.world.ranks):
            for direction in Direction:
                while state.device.copies[direction]:
                    self.copy(direction, rank)

    def drain(self) -> None:
        """Step, and copy at once, until every request and transfer has ended. Checks the
        answers."""
        for _ in range(_MAX_STEPS):
            if not self.world.requests and not self.world.scheduler.has_requests():
                break
            self.step()
            self.copy_all()
        else:
            raise AssertionError(f"{list(self.world.scheduler.requests)} do not end")
        for request_id in self.world.finished:
            self.world.check_finished(request_id)

    def run(self) -> None:
        """Drain, and check that no block is held afterwards."""
        self.drain()
        self.world.check_at_rest()

    # State

    def found(self, tokens: list[int], salt: str | None = None) -> int:
        """The number of these tokens that the tier could supply."""
        request = make_request("looker", tokens, salt, self.world.shape.hash_size)
        return self.tier.lookup(request.block_hashes, 0, len(tokens)).num_tokens

    @property
    def num_held(self) -> tuple[int, int]:
        """Number of device blocks and of host blocks that are not free."""
        pool, tier = self.device_pool, self.tier
        device = len(pool.blocks) - 1 - pool.get_num_free_blocks()
        return device, tier.num_blocks - 1 - tier.num_free

    @property
    def num_stored(self) -> int:
        """Number of blocks in all stores submitted so far."""
        return sum(len(store.host_blocks) for store in self.world.stores.values())

    @property
    def num_kept(self) -> int:
        """Number of blocks with contents in the tier."""
        return sum(block.block_hash is not None for block in self.host_pool.blocks)
