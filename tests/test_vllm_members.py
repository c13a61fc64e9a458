"""tools.vllm_members: what another vLLM lacks of what we use."""

import re
from importlib.util import find_spec
from pathlib import Path

from tools.set_up import ROOT
from tools.vllm_members.__main__ import find_release, report
from tools.vllm_members.release import Member, Release
from tools.vllm_members.uses import uses_of

OURS = """\
from typing import TYPE_CHECKING

from vllm import envs
from vllm.core import Base, make

if TYPE_CHECKING:
    from vllm.core import Manager

try:
    from vllm.core import Later
except ImportError:
    Later = None


class Ours(Base):
    def on_step(self, output): ...


class Holder:
    def __init__(self, manager: "Manager") -> None:
        self._manager = manager

    def use(self) -> None:
        for block in self._manager.pool.blocks:
            print(block.name, block.width, getattr(block, "extra", None))
        self._manager.grow(1)
        make(size=1)
        print(envs.SOME, Later.HERE)
"""
THEIRS = """\
class Later:
    HERE = 1

class Base:
    def on_step(self, output): ...

class Block:
    name: str

class WideBlock(Block):
    width: int
    extra: int

class Pool:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

class Manager:
    def __init__(self, pool: "Pool") -> None:
        self.pool: Pool = pool

    def grow(self, count: int) -> None: ...

def make(size: int) -> Pool: ...
"""
CHANGES = {
    "    name: str\n": ("    title: str\n", "missing: vllm.core.Block.name"),
    "    width: int\n": ("", "missing: vllm.core.Block.width"),
    "    extra: int\n": (
        "    more: int\n",
        "missing, with a substitute: vllm.core.Block.extra",
    ),
    "on_step(self, output)": (
        "on_step(self, output, step)",
        "changed: vllm.core.Base.on_step\n    here:  self, output\n    there: self, output, step",
    ),
    "grow(self, count: int)": (
        "grow(self, count: int, *, at: int = 0)",
        "changed: vllm.core.Manager.grow\n    here:  self, count\n    there: self, count, *, at=0",
    ),
    "def make(size: int) -> Pool: ...": (
        "def produce(size: int) -> Pool: ...",
        "missing: vllm.core.make",
    ),
    "    HERE = 1\n": (
        "    pass\n",
        "missing, with a substitute: vllm.core.Later.HERE",
    ),
}
"""By text of THEIRS: what replaces it, and the line of the report without the places."""


def lines_of(pinned: Release, other: Release, package: Path) -> tuple[list[str], bool]:
    lines, lacks_needed = report(pinned, other, package, package)
    return [re.sub(r" \(ours\.py:\d+.*?\)", "", line) for line in lines], lacks_needed


def write(folder: Path, core: str = THEIRS, envs: str = "SOME: int\n") -> Release:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("")
    (folder / "vllm" / "core.py").write_text(core)
    (folder / "vllm" / "envs.py").write_text(envs)
    return Release(folder)


def test_each_planted_change_is_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "ours.py").write_text(OURS)
    pinned = write(tmp_path / "pinned")
    assert report(pinned, pinned, package, package) == ([], False)
    for number, (text, (other, line)) in enumerate(CHANGES.items()):
        assert text in THEIRS
        changed = write(tmp_path / str(number), THEIRS.replace(text, other))
        needed = line.startswith("missing:")
        assert lines_of(pinned, changed, package) == ([line], needed)
    without = write(tmp_path / "without", envs="")
    assert lines_of(pinned, without, package) == (["missing: vllm.envs.SOME"], True)
    ((line,), _) = report(pinned, without, package, package)
    (number,) = (n for n, text in enumerate(OURS.splitlines(), 1) if "envs.SOME" in text)
    assert line.endswith(f"(ours.py:{number})")


def test_what_our_package_uses() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    installed = find_release(str(Path(vllm.origin).parents[1]))
    uses = uses_of(ROOT / "simple_offload", installed, ROOT)
    assert len(uses) > 200
    assert uses[Member("vllm.v1.core.kv_cache_utils", "resolve_kv_cache_block_sizes")].is_called
