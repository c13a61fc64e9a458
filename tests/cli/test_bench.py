"""bench: the program it runs, with its arguments, output, signals and exit code."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli import bench
from simple_offload.cli.bench import BENCHES, examples_root
from simple_offload.cli.main import main

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


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A function that starts `simple-offload bench copy` in ``tmp_path``; it runs FAKE."""
    folder = tmp_path / "root" / "examples" / "copy_bench"
    folder.mkdir(parents=True)
    for part in (folder.parent, folder):
        (part / "__init__.py").touch()
    (folder / "__main__.py").write_text(FAKE)
    code = (
        "import pathlib, sys; import simple_offload.cli.bench as b;"
        f"b.PACKAGE = pathlib.Path({str(tmp_path / 'root' / 'simple_offload')!r});"
        "from simple_offload.cli.main import main; sys.exit(main())"
    )

    def start(*arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", code, "bench", "copy", *arguments],
            env={**os.environ, "PYTHONPATH": str(bench.PACKAGE.parent)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_arguments_and_exit_code_are_the_benchmark_s(start: Start, tmp_path: Path) -> None:
    foreign = tmp_path / "examples" / "copy_bench"  # must not be imported
    foreign.mkdir(parents=True)
    for name in ("../__init__.py", "__main__.py"):
        (foreign / name).write_text("print('foreign')")
    process = start("--sizes", "4KiB", "--fail", "x")
    assert process.communicate()[0] == "words --sizes 4KiB --fail x\n"
    assert process.returncode == 3


def test_json_is_the_benchmark_s_result(start: Start, tmp_path: Path) -> None:
    process = start("--json", "--out", str(tmp_path))
    output, errors = process.communicate()
    assert (process.returncode, json.loads(output)) == (0, {"gb": 7})
    assert errors == f"words --out {tmp_path}\n"
    # An old result is not printed.
    (tmp_path / "copy-bench-out").mkdir()
    (tmp_path / "copy-bench-out" / "result.json").write_text("{}")
    process = start("--json", "--fail")
    assert process.communicate()[0] == ""
    assert process.returncode == 3


@pytest.mark.parametrize("as_json", [False, True])
def test_a_signal_ends_the_benchmark(start: Start, as_json: bool) -> None:
    process = start("--wait", *(["--json"] if as_json else []))
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
