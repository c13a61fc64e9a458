"""bench: the program it runs, with its arguments, output, signals and exit code."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli import bench
from simple_offload.cli.bench import BENCHES, examples_root
from simple_offload.cli.main import main, make_parser

FAKE = """
import json, pathlib, signal, sys
if "--wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
    print("ready", flush=True)
    signal.pause()
print("words", *sys.argv[1:])
if "--out" in sys.argv:
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    (folder / "result.json").write_text(json.dumps({"gb": 7}))
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Environment of a `simple-offload bench copy` that runs FAKE."""
    root = tmp_path / "root"
    folder = root / "examples" / "copy_bench"
    folder.mkdir(parents=True)
    for part in (folder.parent, folder):
        (part / "__init__.py").touch()
    (folder / "__main__.py").write_text(FAKE)
    return {**os.environ, "ROOT": str(root), "PYTHONPATH": str(bench.PACKAGE.parent)}


def command(*arguments: str) -> list[str]:
    """The command, with the examples taken from $ROOT."""
    code = (
        "import os, pathlib, sys; import simple_offload.cli.bench as b;"
        "b.PACKAGE = pathlib.Path(os.environ['ROOT'], 'simple_offload');"
        "from simple_offload.cli.main import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code, "bench", *arguments]


def run(fake: dict[str, str], *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), env=fake, cwd=cwd, capture_output=True, text=True, check=False
    )


def test_arguments_and_exit_code_are_the_benchmark_s(fake: dict[str, str], tmp_path: Path) -> None:
    foreign = tmp_path / "examples" / "copy_bench"  # must not be imported
    foreign.mkdir(parents=True)
    for name in ("../__init__.py", "__main__.py"):
        (foreign / name).write_text("print('foreign')")
    done = run(fake, "copy", "--sizes", "4KiB", "--fail", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "words --sizes 4KiB --fail x\n")


def test_json_is_the_benchmark_s_result(fake: dict[str, str], tmp_path: Path) -> None:
    done = run(fake, "copy", "--json", "--out", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"gb": 7})
    assert done.stderr == f"words --out {tmp_path}\n"


def test_old_results_are_not_printed(fake: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "copy-bench-out").mkdir()
    (tmp_path / "copy-bench-out" / "result.json").write_text("{}")
    done = run(fake, "copy", "--json", "--fail", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_signal_ends_the_benchmark(fake: dict[str, str], tmp_path: Path, as_json: bool) -> None:
    asked = command("copy", "--wait", *(["--json"] if as_json else []))
    process = subprocess.Popen(
        asked,
        env=fake,
        cwd=tmp_path,
        text=True,
        stdout=None if as_json else subprocess.PIPE,
        stderr=subprocess.PIPE if as_json else None,
    )
    words = process.stderr if as_json else process.stdout
    assert words is not None
    assert words.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 99


def test_a_checkout_precedes_the_wheel_s_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "simple_offload"
    monkeypatch.setattr(bench, "PACKAGE", package)
    assert main(["bench", "demo"]) == 2
    message = capsys.readouterr().err
    assert "examples.demo is not in this installation" in message
    assert "Run it from a checkout" in message
    for root in (package / "bundled", tmp_path):
        (root / "examples" / "demo").mkdir(parents=True)
        (root / "examples" / "demo" / "__main__.py").touch()
        assert examples_root("examples.demo") == root


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_has_the_option_of_its_folder(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    each = BENCHES[name]
    program: Any = importlib.import_module(f"{each.module}.__main__")
    with pytest.raises(SystemExit):
        program.main(["--help"])
    text = capsys.readouterr().out
    assert f"{each.output_option} DIR" in text
    assert f"(default: {each.output})" in " ".join(text.replace("-\n", "-").split()).replace(
        "- ", "-"
    )


def test_help_names_all_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["bench", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in BENCHES)
