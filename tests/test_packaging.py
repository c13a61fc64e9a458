"""The package that is built, and the environment that tools/set_up.py makes for it."""

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import simple_offload
from tools import set_up

PROJECT = tomllib.loads((set_up.ROOT / "pyproject.toml").read_text())
PINS = set_up.read_pins(set_up.ROOT / "constraints.txt")

in_the_made_environment = pytest.mark.skipif(
    Path(sys.prefix) != set_up.ROOT / ".venv",
    reason="about the environment that `make test` runs in",
)


def _installed() -> dict[str, importlib.metadata.Distribution]:
    # In site-packages only: setuptools, once imported, puts what it bundles on sys.path.
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = importlib.metadata.distributions(path=folders)
    return {set_up.canonical(distribution.name): distribution for distribution in found}


def _required(roots: Iterable[str]) -> Iterator[Requirement]:
    """Every requirement, of whatever depth, that holds here; those of missing packages as well."""
    installed = _installed()
    waiting, seen = [Requirement(root) for root in roots], set()
    while waiting:
        requirement = waiting.pop()
        yield requirement
        name = set_up.canonical(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen or name not in installed:
                continue
            seen.add((name, extra))
            below = [Requirement(text) for text in installed[name].requires or []]
            waiting += [r for r in below if r.marker is None or r.marker.evaluate({"extra": extra})]


def _roots() -> list[str]:
    return ["simple-offload[cpu,dev]", *PROJECT["build-system"]["requires"]]


@in_the_made_environment
def test_what_is_installed_is_what_is_pinned() -> None:
    versions = {name: found.version for name, found in _installed().items()}
    for unpinned in ("pip", "simple-offload"):
        versions.pop(unpinned)
    lines = (set_up.ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for_this_machine = {
        set_up.canonical(pin.name) for pin in pins if pin.marker is None or pin.marker.evaluate()
    }
    assert versions == {name: PINS[name] for name in for_this_machine}


@in_the_made_environment
def test_pins_meet_every_requirement() -> None:
    installed = _installed()
    unmet = [
        str(requirement)
        for requirement in _required(_roots())
        if (name := set_up.canonical(requirement.name)) not in set_up.FORBIDDEN
        and (
            name not in installed
            or not requirement.specifier.contains(installed[name].version, prereleases=True)
        )
    ]
    assert unmet == []


@in_the_made_environment
def test_every_pin_is_required_by_something() -> None:
    required = {set_up.canonical(requirement.name) for requirement in _required(_roots())}
    assert _installed().keys() - required - {"pip"} == set()


def test_what_breaks_transformers_is_absent() -> None:
    assert _installed().keys().isdisjoint(set_up.FORBIDDEN)
    assert PINS.keys().isdisjoint(set_up.FORBIDDEN)
    subprocess.run([sys.executable, "-c", "import transformers.modeling_utils"], check=True)


def test_wheel_holds_the_typed_package_and_nothing_else(tmp_path: Path) -> None:
    build = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *build, str(set_up.ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = (set_up.ROOT / "simple_offload").rglob("*.py")
    assert {str(source.relative_to(set_up.ROOT)) for source in sources} < set(names)
    assert "simple_offload/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {
        "simple_offload",
        f"simple_offload-{simple_offload.__version__}.dist-info",
    }
    assert any(re.search(r"\.dist-info/licenses/LICENSE$", name) for name in names)


class _ScriptedPip(set_up.Pip):
    """Fails as often as it is told to, and remembers what it was asked."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, expected: int = 0) -> None:
        self.asked.append(arguments)
        if len(self.asked) <= self.failures:
            raise set_up.PipError(f"no matching distribution, try {len(self.asked)}")


@pytest.mark.parametrize("failures", [0, 1])
def test_torch_comes_from_pytorch_when_nothing_else_has_it(failures: int) -> None:
    pip = _ScriptedPip(failures)
    set_up.install_torch(pip, "2.13.0+cpu")
    assert [set_up.PYTORCH_INDEX in arguments for arguments in pip.asked] == [False, True][
        : failures + 1
    ]
    assert all("torch==2.13.0+cpu" in arguments for arguments in pip.asked)


def test_torch_found_nowhere_is_said() -> None:
    with pytest.raises(
        set_up.SetUpError, match=r"torch 2\.13\.0\+cpu .* was found nowhere"
    ) as told:
        set_up.install_torch(_ScriptedPip(failures=2), "2.13.0+cpu")
    for part in (set_up.PYTORCH_INDEX, "PIP_FIND_LINKS", "try 1", "try 2"):
        assert part in str(told.value)


def _tree(root: Path) -> set_up.VirtualEnvironment:
    (root / "simple_offload").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "simple_offload/__init__.py"):
        (root / name).write_bytes((set_up.ROOT / name).read_bytes())
    environment = set_up.VirtualEnvironment(root)
    environment.python.parent.mkdir(parents=True)
    environment.python.symlink_to(sys.executable)
    return environment


def _append(text: str) -> tuple[str, str]:
    return (r"\Z", text)


@pytest.mark.parametrize(
    ("file", "pattern", "text", "current"),
    [
        ("constraints.txt", *_append("colorama==0.4.6\n"), False),
        ("pyproject.toml", r'"psutil>=', '"psutil>5,>=', False),
        ("pyproject.toml", r"line-length = 100", "line-length = 99", True),
        ("simple_offload/__init__.py", r'(__version__ = ".*)"', r'\1.post1"', False),
        ("simple_offload/__init__.py", *_append("# a comment\n"), True),
    ],
)
def test_set_up_runs_again_when_what_is_installed_would_change(
    tmp_path: Path, file: str, pattern: str, text: str, current: bool
) -> None:
    environment = _tree(tmp_path)
    assert not environment.is_current()
    environment.note(environment.wanted())
    assert environment.is_current()
    before = (tmp_path / file).read_text()
    (tmp_path / file).write_text(re.sub(pattern, text, before, count=1))
    assert (tmp_path / file).read_text() != before
    assert environment.is_current() == current
    assert environment.is_usable()


def test_set_up_begins_anew_after_a_kill_or_a_move(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    environment = _tree(old)
    environment.note("busy")
    assert not environment.is_usable()
    environment.note(environment.wanted())
    assert environment.is_usable()
    old.rename(new)
    assert not set_up.VirtualEnvironment(new).is_usable()


def test_set_up_leaves_a_foreign_environment_alone(tmp_path: Path) -> None:
    environment = _tree(tmp_path)
    mine = environment.folder / "mine"
    mine.write_text("keep")
    with pytest.raises(set_up.SetUpError, match="was not made by this script"):
        environment.create()
    assert mine.read_text() == "keep"
