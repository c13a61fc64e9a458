"""Unsupported models and settings are refused, with the reason and the allowed values."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec

from simple_offload.config import ConfigError
from simple_offload.metadata import RankCapacity
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.second_tier import namespace
from simple_offload.shared_memory import SharedMemory
from tests.conftest import within_patience
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver
from tests.scheduler.test_manager import make_config, make_scheduler
from tests.scheduler.tiers import BLOCK_SIZE

STATES = {
    "kv_cache_spec": MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
}


@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
def test_sub_blocks_of_states_are_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cpu_block_size=8: .* state .*; allowed: 4, or no"):
        make_scheduler(make_config(windows, **STATES), cpu_block_size=8)


def test_models_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache group that prefix caching covers"):
        make_scheduler(make_config(enable_kv_transfer=False))


def test_states_at_block_boundaries_are_supported() -> None:
    make_scheduler(make_config((0, 8), **STATES), cpu_block_size=4)


def test_hits_inside_blocks_of_states_are_refused_on_030(
    monkeypatch: pytest.MonkeyPatch, drive: MakeDriver
) -> None:
    shape: dict[str, Any] = {"windows": (0,), "num_states": 1}
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    drive(**shape)
    with pytest.raises(ConfigError, match=r"^prefix_match_unit=2: .*; allowed: no prefix_match_u"):
        Driver(**shape, match_unit=2)
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    if hasattr(VllmConfig, "num_prefill_lookahead_tokens"):  # really
        drive(**shape, match_unit=2)


# The second tier, before the ranks have started

FS = {"type": "fs", "root_dir": "/kv", "bytes": "1TiB"}
SCRIPTED = "tests.simulation.second_tier"


@pytest.mark.parametrize(
    ("second_tier", "complaint"),
    [
        (FS | {"type": "fs3"}, r"\.type='fs3': unknown; did you mean 'fs'\? \(known: .*fs, .*obj"),
        (FS | {"type": "tape"}, r"\.type='tape': unknown \(known: (?!.*path;).*module_path too"),
        (FS | {"n_reed_threads": 4}, r"\.n_reed_threads=4: .* mean 'n_read_threads'\? \(known for"),
        ({"type": "fs", "bytes": 1, "root": "/kv"}, r"\.root='/kv': .* mean 'root_dir'\?"),
        (FS | {"n_read_threads": "4.5"}, r"\.n_read_threads='4.5': must be a whole number"),
        (FS | {"enable_kv_events": "maybe"}, r"\.enable_kv_events='maybe': must be true or false"),
        ({"type": "fs", "root_dir": "/kv", "byte": "1TiB"}, r"\.byte='1TiB': .* mean 'bytes'\?"),
        (FS | {"cache_namspace": "v1"}, r"\.cache_namspace='v1': .* mean 'cache_namespace'\?"),
        ({"type": "fs", "bytes": 1}, r"\.root_dir is missing: 'fs' needs it"),
        (FS | {"root_dir": ""}, r"\.root_dir is missing: 'fs' needs it"),
        (FS | {"root_dir": 5}, r"\.root_dir=5: must be a string"),
        (FS | {"root_dir": None}, r"\.root_dir=None: must be a string"),
        ({"type": "fs", "root_dir": "/kv"}, r'\.bytes is missing: .*such as "bytes": "2TiB"'),
        ({"type": "obj", "store_config": {}, "bytes": 9}, r"\.bytes=9: only 'fs' has .*: none"),
        ({"type": "p2p"}, r"\.type='p2p': it serves other engines .* allowed: 'fs', 'obj', or"),
        ({"type": "T", "module_path": "no.such"}, r"\.type='T': it cannot be imported: No module"),
        ({"type": "T", "module_path": SCRIPTED}, r"\.type='T': it cannot be imported: .*'T'"),
        ({"type": "ScriptedDisk", "module_path": SCRIPTED}, r"\.type='ScriptedDisk': .* no such"),
        ({"type": "np", "module_path": SCRIPTED}, r"\.type='np': tests.* no such class"),
    ],
)
def test_second_tiers_that_vllm_lacks_and_wrong_options_are_refused(
    second_tier: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"^second_tier{complaint}"):
        make_scheduler(make_config(), second_tier=second_tier)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"parallel_config.tensor_parallel_size": 1},
            "second_tier with 2 ranks of which 1 are tensor parallel: .*; allowed: tensor parallel",
        ),
        ({"lora_config": object()}, "second_tier with LoRA: .*; allowed: no --enable-lora, or no"),
        (
            {"weight_transfer_config": object()},
            'second_tier with weight_transfer_config: .*; allowed: .*"cache_namespace"',
        ),
        (
            {"parallel_config.worker_extension_cls": "trainer.Extension"},
            'second_tier with worker_extension_cls: .*; allowed: .*"cache_namespace"',
        ),
        (
            {"cache_config.prefix_caching_hash_algo": "xxhash"},
            "prefix_caching_hash_algo='xxhash': .*PYTHONHASHSEED",
        ),
    ],
)
def test_settings_that_a_second_tier_cannot_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], complaint: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    make_scheduler(make_config(), 2, settings)
    make_scheduler(make_config(), 2, second_tier=FS)
    with pytest.raises(ConfigError, match=complaint):
        make_scheduler(make_config(), 2, settings, second_tier=FS)
    if "cache_namespace" in complaint:
        named = FS | {"cache_namespace": "policy-7"}
        make_scheduler(make_config(), 2, settings, second_tier=named)


# The second tier, over the ranks' memory

ROW_BYTES = 4096
NUM_ROWS = 8


@pytest.fixture
def capacity() -> Iterator[RankCapacity]:
    """What a rank reports that tells of the ranks' memory of rows."""
    memory = SharedMemory.create()
    memory.map(NUM_ROWS * ROW_BYTES, stays_open=True)
    yield RankCapacity(
        "r", NUM_ROWS, NUM_ROWS, 64, row_bytes=ROW_BYTES, memory=memory.address, layout=(0, "x")
    )
    memory.free()


@pytest.fixture
def open_second_tier(drive: MakeDriver, tmp_path: Path) -> Callable[..., OffloadScheduler]:
    """A function that makes the scheduler side of an engine whose ranks report these capacities.
    Its objects are in ``kv``. ``more``: options."""

    def open_it(
        *capacities: RankCapacity, cpu_block_size: int | None = None, **more: Any
    ) -> OffloadScheduler:
        files = {"type": "fs", "root_dir": str(tmp_path / "kv"), "bytes": "1GiB"}
        files |= {"n_read_threads": "1", "n_write_threads": "1", "cache_namespace": "v1"}
        scheduler = make_scheduler(
            make_config(), len(capacities), second_tier=files | more, cpu_block_size=cpu_block_size
        )
        scheduler.bind_kv_cache_manager(drive().world.scheduler.kv_cache_manager)
        scheduler.agree_on_capacity(capacities)
        return scheduler

    return open_it


@pytest.mark.parametrize(("cpu_block_size", "rows"), [(None, 1), (8, 2)])
def test_a_second_tier_may_have_room_for_64_objects(
    open_second_tier: Callable[..., OffloadScheduler],
    capacity: RankCapacity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_block_size: int | None,
    rows: int,
) -> None:
    """An object has the rows of all sub-blocks of a host block. Two ranks: one tells of them."""
    describe = Mock(return_value={"model": "scripted"})
    monkeypatch.setattr(namespace, "describe", describe)
    other = RankCapacity("s", NUM_ROWS, NUM_ROWS, 64, row_bytes=ROW_BYTES, layout=(64, "y"))
    num_bytes = 64 * rows * ROW_BYTES
    complaint = (
        f"second_tier.bytes={num_bytes - 1}: .* has {rows * ROW_BYTES} bytes; allowed: at least "
        f"{num_bytes}, for 64 objects"
    )
    with pytest.raises(ConfigError, match=complaint):
        open_second_tier(other, capacity, cpu_block_size=cpu_block_size, bytes=num_bytes - 1)
    scheduler = open_second_tier(other, capacity, cpu_block_size=cpu_block_size, bytes=num_bytes)
    within_patience(scheduler.shutdown)
    [described] = (tmp_path / "kv").glob("*.json")
    assert json.loads(described.read_text()) == {"model": "scripted"}
    row = [rows * ROW_BYTES, rows, ['[0, "x"]', '[64, "y"]']]
    assert describe.call_args.kwargs == {"row": row, "name": "v1"}


def test_a_link_in_the_directory_is_not_followed(
    open_second_tier: Callable[..., OffloadScheduler], capacity: RankCapacity, tmp_path: Path
) -> None:
    """A group may share the directory. A member's link would have the server overwrite its user's
    own files."""
    precious = tmp_path / "precious"
    precious.touch()
    for _ in range(2):
        within_patience(open_second_tier(capacity).shutdown)
        [described] = (tmp_path / "kv").glob("*.json")
        described.unlink()
        described.symlink_to(precious)
    assert precious.read_text() == ""


@pytest.mark.parametrize(
    ("memory", "options", "complaint"),
    [
        ({}, {}, "second_tier='fs': the ranks share no memory"),
        # As in another container
        ({"token": bytes(16)}, {}, "second_tier: .* cannot reach the ranks' memory.*another file"),
        (None, {"root_dir": __file__}, rf"^second_tier\.root_dir='{__file__}': objects cannot be"),
        (None, {"locality": "Mars"}, "^second_tier={.*'Mars'.*}: it does not start: .*Mars"),
    ],
    ids=["no memory", "other memory", "a file", "an option"],
)
def test_a_second_tier_that_does_not_start(
    open_second_tier: Callable[..., OffloadScheduler],
    capacity: RankCapacity,
    tmp_path: Path,
    memory: dict[str, Any] | None,
    options: dict[str, Any],
    complaint: str,
) -> None:
    """Where the scheduler cannot reach the memory, nothing is made where files would be."""
    if memory is not None:
        assert capacity.memory is not None
        changed = capacity.memory._replace(**memory) if memory else None
        capacity = replace(capacity, memory=changed)
    with pytest.raises(ConfigError, match=complaint):
        open_second_tier(capacity, **options)
    assert memory is None or not (tmp_path / "kv").exists()
