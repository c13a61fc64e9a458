"""What of the machine matters to host memory: how much, how much of it may be locked, where."""

import resource
from pathlib import Path

from simple_offload import memory
from simple_offload.cli.checks import Check, ok, warning
from simple_offload.memory import GIB

_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_memory(wanted: int | None) -> Check:
    """Memory for a host tier of ``wanted`` bytes on the whole machine; None: not known."""
    available, reserve = memory.available_bytes(), memory.reserve_bytes()
    limit, total = memory.limit(), memory.total_bytes()
    found = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if limit.num_bytes < total:
        found += f", cgroup limit {limit.num_bytes / GIB:.1f} GiB"
    if not limit.is_final:
        found += ", and a hypervisor that may add more"
    found += f"; {reserve / GIB:.1f} GiB are left to others"
    if wanted is not None and wanted > available - reserve:
        return warning(
            "memory",
            found,
            f"the host tier asks for {wanted / GIB:.1f} GiB: it opens as far as memory goes, and "
            "the rest when there is more (vLLM on CPU: it does not start). Lower "
            "cpu_bytes_to_use, or free memory",
        )
    return ok("memory", found)


def check_lock_limit(wanted: int | None, pinned: bool) -> Check:
    """Whether ``wanted`` bytes may be locked; ``pinned``: whether the backend pins memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.3g} GiB"
    if not pinned:
        return ok("lock limit", f"{found} (no memory is pinned by this backend)")
    if soft != resource.RLIM_INFINITY and wanted is not None and wanted > soft:
        return warning(
            "lock limit",
            found,
            f"the host tier pins {wanted / GIB:.1f} GiB, which some drivers and containers refuse "
            "beyond the limit: ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )
    return ok("lock limit", found)


def check_numa(device_nodes: list[int | None]) -> Check:
    """Nodes of this machine, and where its devices are."""
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
            f"this process may use memory of nodes {sorted(allowed)} only: copies cross to the "
            "device's. Allow its node (numactl, cpuset)",
        )
    return ok("NUMA", found)


def check_huge_pages() -> Check:
    """Whether memory can come in huge pages."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii").strip()
    except OSError:
        return ok("huge pages", "not known")
    chosen = text.partition("[")[2].partition("]")[0] or text
    if chosen == "never":
        return warning(
            "huge pages",
            chosen,
            f"the tier opens more slowly: echo madvise > {_HUGE_PAGES} (as root)",
        )
    return ok("huge pages", chosen)


def _allowed_nodes() -> set[int] | None:
    """That this process may take memory from, by the kernel; None where it does not say."""
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
