"""Control groups with a memory limit, on machines where tests may make them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simple_offload import memory


class NoCgroupError(Exception):
    """This machine lets the process make no group; the message has the reason."""


@contextmanager
def limited(num_bytes: int) -> Iterator[Path]:
    """A group below this process's own, whose processes may use ``num_bytes``. Write their ids to
    its ``cgroup.procs``, and end them before the context ends. Raises NoCgroupError."""
    folders = [folder for folder in memory._cgroup_folders() if folder[0].is_dir()]
    if not folders:
        raise NoCgroupError("no cgroups with a memory controller")
    parent, is_v2 = folders[0]
    group = parent / f"simple-offload-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoCgroupError(str(error)) from error
    try:
        try:
            limit = group / ("memory.max" if is_v2 else "memory.limit_in_bytes")
            if is_v2 and not limit.exists():
                (parent / "cgroup.subtree_control").write_text("+memory")
            limit.write_text(str(num_bytes))
        except OSError as error:
            raise NoCgroupError(str(error)) from error
        yield group
    finally:
        group.rmdir()
