"""Checks of the machine: its memory, lock limit, NUMA nodes, huge pages and folder of files."""

import re
import resource
import shutil
import tempfile
from pathlib import Path

import psutil

from simple_offload import memory
from simple_offload.cli.checks import Check, error, ok, warning
from simple_offload.cli.console import size_text
from simple_offload.config import SecondTierConfig
from simple_offload.memory import MemoryShortageError

_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


def check_memory(wanted: int | None) -> Check:
    """Whether a host tier of ``wanted`` bytes on this machine fits now. None: size unknown."""
    limit, total = memory.limit(), memory.total_bytes()
    found = f"{size_text(memory.available_bytes())} available of {size_text(total)}"
    if limit.num_bytes < total:
        found += f", cgroup limit {size_text(limit.num_bytes)}"
    if not limit.is_final:
        found += "; a hypervisor may add more"
    found += f"; {size_text(memory.reserve_bytes())} reserved for other processes"
    try:
        if wanted is not None:
            memory.require(wanted)
    except MemoryShortageError as shortage:
        advice = "The tier opens as far as memory allows, and grows when more is free"
        return warning("memory", found, f"{shortage}. {advice} (vLLM on CPU does not start)")
    return ok("memory", found)


def check_lock_limit(wanted: int | None, pinned: bool) -> Check:
    """Whether ``wanted`` bytes may be locked, if the backend pins memory (``pinned``)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
    if not pinned:
        return ok("lock limit", f"{found} (this backend pins no memory)")
    if soft != resource.RLIM_INFINITY and wanted is not None and wanted > soft:
        return warning(
            "lock limit",
            found,
            f"the host tier pins {size_text(wanted)}, and some drivers and containers refuse to "
            "exceed the limit: ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )
    return ok("lock limit", found)


def check_numa(device_nodes: list[int | None]) -> Check:
    """Whether memory of the devices' NUMA nodes (None: unknown) may be used."""
    num_nodes = len(list(memory.ROOT.glob("sys/devices/system/node/node[0-9]*")))
    known = {node for node in device_nodes if node is not None}
    found = f"{num_nodes} nodes" if num_nodes > 1 else "one node"
    if known:
        found += f"; devices on {', '.join(map(str, sorted(known)))}"
    allowed = re.search(
        r"^Mems_allowed_list:\s*(\S+)$", memory.read("proc/self/status"), re.MULTILINE
    )
    if allowed and not known <= _nodes_of(allowed[1]):
        return warning(
            "NUMA",
            found,
            f"this process may use memory of nodes {allowed[1]} only, so copies cross nodes. "
            "Allow the device's node (numactl, cpuset)",
        )
    return ok("NUMA", found)


def check_huge_pages() -> Check:
    """Whether the kernel provides transparent huge pages."""
    chosen = re.search(r"\[(\w+)\]", memory.read(_HUGE_PAGES))
    if chosen and chosen[1] == "never":
        advice = f"the tier opens more slowly: echo madvise > /{_HUGE_PAGES} (as root)"
        return warning("huge pages", "never", advice)
    return ok("huge pages", chosen[1] if chosen else "unknown")


def check_second_tier(config: SecondTierConfig) -> Check:
    """Whether files can be made in the directory of the ``fs`` tier, or in the folder that it would
    be made in. Nothing of other tiers."""
    root_dir = config.options.get("root_dir")
    if config.type != "fs" or not isinstance(root_dir, str):
        return ok("second tier", f"{config.type}, not tried")
    root = Path(root_dir).absolute()
    try:
        root = root.resolve()
        while not root.exists():
            root = root.parent
        tempfile.TemporaryFile(dir=root).close()
    except OSError as problem:
        return error("second tier", f"{root}: {problem}", "choose another root_dir")
    systems = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    known = [systems[str(each)] for each in (root, *root.parents) if str(each) in systems]
    kind = next(iter(known), "unknown file system")  # as in a chroot
    disk = shutil.disk_usage(root)
    found = f"{root}: {kind}, {size_text(disk.free)} free of {size_text(disk.total)}"
    if config.bytes is not None and config.bytes > disk.total:
        advice = f"bytes={config.bytes} is more than the disk has ({disk.total}): ask for less"
        return warning("second tier", found, advice)
    return ok("second tier", found)


def _nodes_of(text: str) -> set[int]:
    """The numbers of a list such as "0-1,4"."""
    nodes: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes
