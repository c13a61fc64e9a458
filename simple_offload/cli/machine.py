"""Checks of the machine's memory: its size, lock limit, NUMA nodes and huge pages."""

import resource
from pathlib import Path

from simple_offload import memory
from simple_offload.cli.checks import Check, ok, warning
from simple_offload.memory import GIB

_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_memory(wanted: int | None) -> Check:
    """Whether a host tier of ``wanted`` bytes on this machine fits now. None: size unknown."""
    available, reserve = memory.available_bytes(), memory.reserve_bytes()
    limit, total = memory.limit(), memory.total_bytes()
    found = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if limit.num_bytes < total:
        found += f", cgroup limit {limit.num_bytes / GIB:.1f} GiB"
    if not limit.is_final:
        found += "; a hypervisor may add more"
    found += f"; {reserve / GIB:.1f} GiB reserved for other processes"
    if wanted is not None and wanted > available - reserve:
        return warning(
            "memory",
            found,
            f"the host tier asks for {wanted / GIB:.1f} GiB. It opens as far as memory allows, and "
            "grows when more is free (vLLM on CPU does not start). Lower cpu_bytes_to_use, or free "
            "memory",
        )
    return ok("memory", found)


def check_lock_limit(wanted: int | None, pinned: bool) -> Check:
    """Whether ``wanted`` bytes may be locked, if the backend pins memory (``pinned``)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.3g} GiB"
    if not pinned:
        return ok("lock limit", f"{found} (this backend pins no memory)")
    if soft != resource.RLIM_INFINITY and wanted is not None and wanted > soft:
        return warning(
            "lock limit",
            found,
            f"the host tier pins {wanted / GIB:.1f} GiB, and some drivers and containers refuse to "
            "exceed the limit: ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )
    return ok("lock limit", found)


def check_numa(device_nodes: list[int | None]) -> Check:
    """Whether memory of the devices' NUMA nodes (None: unknown) may be used."""
    nodes = sorted(int(node.name[4:]) for node in _NODES.glob("node[0-9]*"))
    if len(nodes) < 2:
        return ok("NUMA", "one node")
    found = f"{len(nodes)} nodes"
    known = [node for node in device_nodes if node is not None]
    if not known:
        return ok("NUMA", found)
    found += f"; devices on {', '.join(str(node) for node in sorted(set(known)))}"
    allowed = _allowed_nodes()
    if allowed is not None and not set(known) <= allowed:
        return warning(
            "NUMA",
            found,
            f"this process may use memory of nodes {sorted(allowed)} only, so copies cross nodes. "
            "Allow the device's node (numactl, cpuset)",
        )
    return ok("NUMA", found)


def check_huge_pages() -> Check:
    """Whether the kernel provides transparent huge pages."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii").strip()
    except OSError:
        return ok("huge pages", "unknown")
    chosen = text.partition("[")[2].partition("]")[0] or text
    if chosen == "never":
        return warning(
            "huge pages",
            chosen,
            f"the tier opens more slowly: echo madvise > {_HUGE_PAGES} (as root)",
        )
    return ok("huge pages", chosen)


def _allowed_nodes() -> set[int] | None:
    """NUMA nodes whose memory this process may use; None if the kernel does not list them."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Mems_allowed_list:"):
            allowed: set[int] = set()
            for part in line.split(":", 1)[1].strip().split(","):
                first, _, last = part.partition("-")
                allowed.update(range(int(first), int(last or first) + 1))
            return allowed
    return None
