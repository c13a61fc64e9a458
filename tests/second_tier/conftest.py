"""Servers that keep objects behind a small host tier, and a clock that a test moves.

A letter stands for the tokens of one block, and "abc" for a prompt of three blocks. The bytes of a
block follow from its key.
"""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from simple_offload.config import SecondTierConfig
from simple_offload.metrics import Meter, OffloadStats
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import TransferLedger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups, host_groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.helper import Helper
from simple_offload.second_tier.objects import Objects, make_spec
from simple_offload.second_tier.reach import Reach
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.second_tier import SecondTier
from simple_offload.shared_memory import SEAL_BYTES, SharedMemory
from simple_offload.vllm_compat import make_host_coordinator
from tests.conftest import PATIENCE_SECONDS
from tests.scheduler.driver import make_request
from tests.simulation.integrity import check_second_tier, check_tier
from tests.simulation.second_tier import LocalConnection, ScriptedDisk, ScriptedTier
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_vllm_config

BLOCK_SIZE = 4
ROW_BYTES = 4096
"""A page, as direct I/O needs."""

MakeServer = Callable[..., "Server"]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def bytes_of(key: bytes, num_bytes: int) -> npt.NDArray[np.uint8]:
    """What a block with this key contains, on all ranks together."""
    return np.frombuffer(np.random.default_rng([*key]).bytes(num_bytes), np.uint8)


class Server:
    """The parts of a server that a second tier needs. Its ranks and vLLM's scheduler are the
    test's."""

    def __init__(
        self,
        root: Path,
        num_blocks: int = 32,
        windows: tuple[int, ...] = (0,),
        max_bytes: int = 1 << 30,
        row_bytes: int = ROW_BYTES,
        disk: ScriptedDisk | None = None,
        salt: bytes = bytes(32),
        *,
        always: bool = False,
    ) -> None:
        """``disk``: instead of files in ``root``."""
        shape = Shape(num_device_blocks=num_blocks + 1, block_size=BLOCK_SIZE, windows=windows)
        kv_cache_config = shape.kv_cache_config()
        vllm_config = make_vllm_config(shape)
        coordinator, other = (
            make_host_coordinator(
                host_groups(kv_cache_config, 1), vllm_config, BLOCK_SIZE, BLOCK_SIZE
            )
            for _ in range(2)
        )
        self.groups = Groups(coordinator, BLOCK_SIZE, 1)
        self._meter = Meter()
        self._stats = OffloadStats()
        self.tier = CpuTier(coordinator, self.groups, self._meter, is_exclusive=windows == (0,))
        self._loads = Loads(self.tier, self.groups, TransferLedger(1), self._meter)
        self._memory = SharedMemory.create()
        self._memory.map((num_blocks + 1) * row_bytes, stays_open=True)
        part = self._memory.part(0, (num_blocks + 1) * row_bytes).numpy().view(np.uint8)
        self.pages = part.reshape(num_blocks + 1, row_bytes)[:, :-SEAL_BYTES]
        """Of all ranks, by block."""
        rows = Rows(self._memory.address, num_blocks + 1, row_bytes)
        files = {"type": "fs", "root_dir": str(root), "bytes": max_bytes}
        files |= {"n_read_threads": 2, "n_write_threads": 2}
        self.directory: Directory | None = None
        self.connection = LocalConnection(rows)
        helper = Helper(lambda: self.connection)
        helper.poll()
        if disk is None:
            self.directory = self.connection.directory = Directory(
                root, max_bytes, partial(setattr, helper, "write_until"), logging.warning
            )
            self.directory.scan()
        self.objects = Objects(
            SecondTierConfig.model_validate(files if disk is None else disk.config),
            make_spec("test", vllm_config, kv_cache_config, self.groups, row_bytes),
            rows.view,
            salt,
        )
        self.on_device: set[bytes] = set()
        self.fetched: list[str] = []
        """The blocks of prompts that were fetched, in this order, by their last letter."""
        self.second_tier = SecondTier(
            self.objects,
            rows,
            helper,
            self.tier,
            self.groups,
            Reach(other, self.groups),
            self._meter,
            lambda: self.on_device,
            self._on_fetched,
            always=always,
        )
        self._names: dict[bytes, str] = {}
        self._numbers = count()

    # As the ranks, and as vLLM's scheduler

    def request(self, prompt: str) -> Request:
        """A request whose blocks can all be found."""
        tokens = [ord(letter) for letter in prompt for _ in range(BLOCK_SIZE)]
        request = make_request(f"request-{next(self._numbers)}", [*tokens, 0])
        for group in self.groups.ids:
            keys = self.groups.keys(request.block_hashes, group)
            self._names.update(zip(keys, prompt, strict=True))
        return request

    def keys(self, prompt: str, group: int = 0) -> list[BlockHashWithGroupId]:
        """The keys of a prompt's blocks."""
        return self.groups.keys(self.request(prompt).block_hashes, group)

    def path(self, prompt: str, group: int = 0) -> Path:
        """The file of a prompt's last block."""
        [path] = self.objects.paths([self.objects.name(self.keys(prompt, group)[-1])])
        return Path(path)

    def put(self, prompt: str) -> None:
        """The host tier gets the blocks of a prompt that it lacks."""
        for group in self.groups.ids:
            keys = [key for key in self.keys(prompt, group) if not self.tier.has(key)]
            blocks = self.tier.allocate_for(keys, set())
            assert len(blocks) == len(keys), "no room"
            for key, block in zip(keys, blocks, strict=True):
                self.pages[block.block_id] = bytes_of(key, self.pages.shape[1])
            run = Run((), keys, on_device=False, host_blocks=blocks)
            useless = self.tier.commit(run)
            self.second_tier.on_stored(run, useless)

    def put_behind(self, prompt: str) -> None:
        """The second tier gets the blocks of a prompt, and the host tier loses all contents."""
        self.put(prompt)
        self.settle()
        self.empty()

    def fill(self) -> list[KVCacheBlock]:
        """Stores get all host blocks, and do not end. Returns those with a reference."""
        keys = [self.keys(chr(1000 + number))[0] for number in range(self.tier.num_free)]
        return self.tier.allocate_for(keys, set())

    def empty(self) -> None:
        """The host tier loses all contents."""
        self.tier.reset()

    def drop(self, key: BlockHashWithGroupId) -> None:
        """The host tier loses one block."""
        self.tier.drop(self.tier.blocks_at(self.tier.ids_of([key])))

    def step(self, num_tokens: int = 0) -> int | None:
        """The engine's step. Returns its number."""
        number = self.second_tier.on_step(num_tokens)
        self._check()
        return number

    def step_until(self, is_done: Callable[[], bool]) -> None:
        """Step, and wait for reads and writes, until something is so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_done():
            assert time.monotonic() < deadline, "it does not end"
            self.step()
            self.objects.drain()

    def settle(self) -> None:
        """Step until all has ended."""
        self.step_until(lambda: self.second_tier.idle)

    def tidy(self) -> None:
        """Likewise, and scan the directory."""
        self.settle()
        assert self.directory is not None
        self.directory.scan()

    def ask(self, request: Request) -> bool:
        """Whether a request that vLLM could schedule has to wait. Meanwhile it holds its hit."""
        self.second_tier.on_lookup()
        num_tokens = self._loads.lookup(request, 0).num_tokens
        if self.second_tier.must_wait(request, 0, num_tokens):
            return True
        self._loads.unpin_hit(request.request_id)
        return False

    def finish(self, request: Request) -> None:
        """The request has ended, or was aborted."""
        self.second_tier.on_request_finished(request.request_id)
        self._loads.on_request_finished(request.request_id)

    def fetch(self, prompt: str) -> int:
        """Let a request wait as long as it has to. Returns the number of blocks that it finds."""
        request = self.request(prompt)
        self.step_until(lambda: not self.ask(request))
        self.finish(request)
        return self.find(prompt)

    def find(self, prompt: str) -> int:
        """The number of blocks that a request finds in the host tier. Checks their bytes."""
        request = self.request(prompt)
        hit = self.tier.lookup(request.block_hashes, 0, request.num_tokens - 1)
        for block in hit.pins:
            assert block.block_hash is not None
            expected = bytes_of(block.block_hash, self.pages.shape[1])
            assert (self.pages[block.block_id] == expected).all(), "wrong bytes"
        return hit.num_tokens // BLOCK_SIZE

    @property
    def behind(self) -> ScriptedTier:
        """vLLM's tier, with a disk of the test."""
        assert isinstance(self.objects.tier, ScriptedTier)
        return self.objects.tier

    def stop(self) -> None:
        """A shutdown. Nothing has a reference afterwards."""
        self.second_tier.shutdown()
        self._memory.free()

    # What it tells

    @property
    def num_pinned(self) -> int:
        """Host blocks with a reference."""
        return self.tier.max_contents - self.tier.num_free

    def counted(self, name: str, *labels: str) -> float:
        """The value of a counter."""
        if (stats := self._meter.drain()) is not None:
            self._stats.aggregate(stats)
        counts: dict[tuple[str, ...], float] = self._stats.data["data"].get(name, {})
        return counts.get(labels, 0)

    # Details

    def _on_fetched(self, run: Run, request: Request, useless: list[int]) -> None:
        assert run.num_tokens == sorted(run.num_tokens), "not head first"
        self.fetched += [self._names[key] for key in run.keys]

    def _check(self) -> None:
        check_tier(self.tier)
        check_second_tier(self.second_tier)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all servers of a test."""
    clock = Clock()
    monkeypatch.setattr(SecondTier, "clock", staticmethod(clock))
    return clock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of objects."""
    return tmp_path / "objects"


@pytest.fixture
def serve(root: Path, clock: Clock, no_thread_left: None) -> Iterator[MakeServer]:
    """A function that makes a Server. Its keywords are the Server's."""
    servers: list[Server] = []

    def make(**keywords: Any) -> Server:
        servers.append(Server(**{"root": root} | keywords))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
