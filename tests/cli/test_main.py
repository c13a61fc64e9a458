"""The command as a whole: names, wrong ones, pipes, and what it costs to start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import simple_offload
from simple_offload.cli.main import main, make_parser


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["doctr"], ("'doctr'", "'doctor', 'plan', 'bench'", "did you mean 'doctor'?")),
        (["bench", "turn"], ("'turn'", "'demo'", "did you mean 'turns'?")),
        (["doctor", "--rank", "2"], ("--rank", "did you mean '--ranks'?")),
        (["doctor", "--ranks", "0"], ("--ranks", "'0' is not a whole number above 0")),
        (["plan", ".", "--host-memory", "8GB/s"], ("--host-memory", "'8GB/s' must be a number of")),
        (["plan", ".", "--host-memory", "0"], ("'0' is not a size above 0",)),
        (
            ["plan", ".", "--host-memory", "1", "--kv-cache-dtype", "fp9"],
            ("'fp9'", "fp8_e4m3", "did you mean 'fp8'?"),
        ),
        (["plan", ".", "--host-memory", "1", "--bandwidth", "inf"], ("inf is not above 0",)),
        (["plan", ".", "--host-memory", "1", "--bandwidth", "x"], ("'x' is not a number",)),
        (
            ["plan", ".", "--host-memory", "1", "--gpu-memory-utilization", "1.5"],
            ("1.5 is not above 0 and up to 1",),
        ),
        (["plan"], ("the following arguments are required: MODEL, --host-memory",)),
        ([], ("required: COMMAND",)),
    ],
)
def test_wrong_input_is_named(
    asked: list[str], told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(asked)
    assert end.value.code == 2
    text = capsys.readouterr().err
    for part in told:
        assert part in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"simple-offload {simple_offload.__version__}\n"


def test_it_starts_without_torch_and_vllm() -> None:
    # In a process of its own: this one has imported both.
    code = (
        "import sys, simple_offload.cli.main as m; m.make_parser();"
        "sys.exit(bool({'torch', 'vllm', 'matplotlib'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_colours_in_a_pipe_even_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}'
    )
    command = [sys.executable, "-m", "simple_offload.cli", "plan", str(tmp_path)]
    command += ["--gpu-kv-memory", "1GiB", "--host-memory", "1GiB"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "FORCE_COLOR": "1"}
    )
    assert "conversations of 8192" in done.stdout
    assert "\x1b" not in done.stdout


def test_every_subcommand_says_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("doctor", "plan", "bench"):
        with pytest.raises(SystemExit):
            make_parser().parse_args([name, "--help"])
        assert "exit codes: " in capsys.readouterr().out
