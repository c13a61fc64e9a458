"""Builds the simulated ACL runtime, and the libraries beside it that torch_npu links to."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tools.set_up import ROOT, exclusive_lock

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
BESIDE = ("acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "hccl")
_FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fPIC", "-fvisibility=hidden", "-shared", "-pthread"),
)


@cache
def library(*, has_batch: bool = True) -> Path:
    """The simulated libascendcl.so, in a folder with the others. ``has_batch=False`` builds an
    older one. It lacks batches, the query of its version, and the query for the owner of an
    address.

    Built by the system's C compiler, again when a source has changed. Raises RuntimeError with the
    compiler's output when the build fails.
    """
    digest = hashlib.sha256("".join(_FLAGS).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    name = f"acl-sim-{digest.hexdigest()[:12]}{'' if has_batch else '-without-batch'}"
    folder = ROOT / ".cache" / name
    if not folder.is_dir():
        with exclusive_lock(folder.parent / "acl-sim.lock"):
            if not folder.is_dir():
                _build(folder, has_batch)
    return folder / "libascendcl.so"


def _build(folder: Path, has_batch: bool) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "The simulated ACL runtime needs a C compiler (Debian, Ubuntu: apt install gcc), "
            "or CC to name one"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        defines = [] if has_batch else ["-DACL_SIM_WITHOUT_BATCH"]
        code = [str(source) for source in SOURCES if source.suffix == ".c"]
        _compile(compiler, [*defines, *code], made, "ascendcl")
        for name in BESIDE:
            # What is looked up in one of these is found in the library that it links to.
            linked = ["-x", "c", "/dev/null", f"-L{made}", "-Wl,--no-as-needed", "-lascendcl"]
            _compile(compiler, linked, made, name)
        made.replace(folder)


def _compile(compiler: str, arguments: list[str], folder: Path, name: str) -> None:
    file = f"lib{name}.so"
    command = [compiler, *_FLAGS, f"-Wl,-soname,{file}", "-o", str(folder / file), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
