"""vLLM's built-in SimpleCPUOffloadConnector in the same scripts.

``python -m tests.simulation.builtin --scripts N --seed S`` plays N scripts with each connector's
scheduler side over this project's worker side, and prints which scripts fail and how. The
comparison is fair to the built-in one. The device under it waits at barriers and flushes fully on
preemption, which its own worker side does not. It first plays scripts in which no copy fails,
because it has no report of a failed copy.
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from simple_offload.metadata import StepMetadata
from simple_offload.transfer import Transfer
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.script import Outcome, Play, Script
from tests.simulation.shape import Shape
from tests.simulation.world import World


class BuiltinWorld(World):
    """The scheduler side of vLLM's own connector, eager stores.

    It numbers loads and stores apart; here loads have even ids and stores odd ones. It loads for
    several requests in one event, and each step's metadata names the event's requests anew.
    """

    is_ours = False
    _events: dict[int, list[str]]

    def __init__(self, shape: Shape) -> None:
        super().__init__(replace(shape, chunk_blocks=None))  # it needs all host blocks at start

    @property
    def manager(self) -> SimpleCPUOffloadScheduler:
        """The built-in scheduler side."""
        return cast(SimpleCPUOffloadScheduler, self.connector.scheduler_manager)

    def kv_transfer_config(self) -> KVTransferConfig:
        per_rank = self.shape.host_bytes
        return KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role=self.shape.kv_role,
            kv_load_failure_policy=self.shape.load_failures,
            kv_connector_extra_config={
                "cpu_bytes_to_use": per_rank * self.shape.num_ranks,
                "cpu_bytes_to_use_per_rank": per_rank,
            },
        )

    def worker_config(self) -> dict[str, Any]:
        """Compute may read blocks as soon as their load is reported."""
        return {**super().worker_config(), "sync_load_ms": 0}

    @property
    def host_pool(self) -> BlockPool:
        return self.manager.cpu_block_pool

    def ids_in_flight(self) -> set[int]:
        manager = self.manager
        loads = {2 * event for event in manager._load_event_to_reqs}
        pending = (*manager._store_event_to_blocks, *manager._abandoned_store_event_to_blocks)
        return loads | {2 * event + 1 for event in pending}

    def to_step_metadata(self, metadata: KVConnectorMetadata | None) -> StepMetadata:
        assert isinstance(metadata, SimpleCPUOffloadMetadata)
        if metadata.need_flush:
            for rank in self.ranks:
                for lane in rank.worker.lanes.values():
                    lane.flush()
                rank.device.run_all()
        self._events = metadata.load_event_to_reqs
        step = StepMetadata()
        if metadata.load_event >= 0:
            blocks = metadata.load_gpu_blocks, metadata.load_cpu_blocks
            event = metadata.load_event
            step.loads.append(Transfer.pairing(2 * event, *blocks, str(event)))
        if metadata.store_event >= 0:
            blocks = metadata.store_gpu_blocks, metadata.store_cpu_blocks
            step.stores.append(Transfer.pairing(2 * metadata.store_event + 1, *blocks))
        return step

    def to_connector_output(self, worker: OffloadWorker) -> KVConnectorOutput:
        loaded, failed = worker.poll()
        report = worker.drain_report()
        stored = {id // 2: 1 for id in report.ended if id % 2} if report is not None else {}
        return KVConnectorOutput(
            finished_recving={r for event in loaded for r in self._events.get(int(event), [])},
            failed_recving={r for event in failed for r in self._events.get(int(event), [])},
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )

    def check_bookkeeping(self, at_rest: bool) -> None:
        if at_rest:
            manager = self.manager
            assert not manager.has_pending_stores(), "stores are pending at rest"
            assert not manager._pending_cpu_hits, "hits are pinned at rest"
            assert not manager._reqs_to_load, "loads are tracked at rest"
            assert not manager._abandoned_reqs_to_load, "loads are tracked at rest"
            assert not manager._reqs_to_store, "requests are tracked at rest"


_MEANINGS = {
    "wrong page": "wrong page",
    "hang": "hang",
    "names host block": "host block that a rank does not have",
    "leaked": "leaked",
    "is free during": "block freed during its copy",
    "after a reset": "after a reset",
    "at rest": "at rest",
}
"""By a part of the message, how a script failed."""


def judge(script: Script, make_world: Callable[[Shape], World]) -> str | Outcome:
    """The outcome of ``script``, or a few words on its failure."""
    try:
        play = Play(script, make_world)
    except Exception:  # noqa: BLE001 - the built-in one raises assertions
        return "does not start with this model"
    try:
        return play.run()
    except Exception as error:  # noqa: BLE001 - vLLM's assertions count as well
        text = str(error) or type(error).__name__
    for words, meaning in _MEANINGS.items():
        if words in text:
            return meaning
    return f"stopped: {text.splitlines()[0][:60]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    console = Console(width=120)
    contenders: dict[str, Callable[[Shape], World]] = {
        "simple_offload": World,
        "built-in": BuiltinWorld,
    }
    failures: dict[tuple[str, str], dict[str, list[int]]] = {}
    loaded: Counter[tuple[str, str]] = Counter()
    seeds = range(arguments.seed, arguments.seed + arguments.scripts)
    for seed in track(seeds, "scripts", console=console):
        drawn = Script.draw(seed).with_sub_blocks(1)  # the built-in one has no larger blocks
        for kind, script in (("no faults", drawn.without_faults()), ("as drawn", drawn)):
            for name, make_world in contenders.items():
                of_kind = failures.setdefault((kind, name), {})
                verdict = judge(script, make_world)
                if isinstance(verdict, str):
                    of_kind.setdefault(verdict, []).append(seed)
                else:
                    loaded[kind, name] += verdict.num_blocks_loaded
    table = Table("scripts", "connector", "failed", "how", "seeds")
    for (kind, name), rows in failures.items():
        total = f"{sum(map(len, rows.values()))} of {arguments.scripts}"
        table.add_row(kind, name, total, "", f"({loaded[kind, name]:,} blocks loaded)")
        for how, found in sorted(rows.items()):
            more = " ..." if len(found) > 6 else ""
            table.add_row("", "", str(len(found)), how, ", ".join(map(str, found[:6])) + more)
    console.print(table)
    return int(any(rows for (_, name), rows in failures.items() if name == "simple_offload"))


if __name__ == "__main__":
    sys.exit(main())
