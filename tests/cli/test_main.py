"""The whole command: wrong arguments, help, and imports."""

import subprocess
import sys
from collections.abc import Iterable

import pytest

import simple_offload
from simple_offload.cli.bench import BENCHES
from simple_offload.cli.main import main, make_parser


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["doctr"], ("'doctr'", "'doctor', 'bench'", "did you mean 'doctor'?")),
        (["bench", "turn"], ("'turn'", "'demo'", "did you mean 'turns'?")),
        (["doctor", "--rank", "2"], ("--rank", "did you mean '--ranks'?")),
        (["doctor", "--ranks", "0"], ("--ranks", "'0' is not a whole number above 0")),
        ([], ("required: COMMAND",)),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], messages: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    text = capsys.readouterr().err
    for message in messages:
        assert message in text


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


@pytest.mark.parametrize(("command", "names"), [("doctor", ["--config"]), ("bench", BENCHES)])
def test_help_lists_exit_codes_and_names(
    command: str, names: Iterable[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help"])
    text = capsys.readouterr().out
    assert all(part in text for part in ("exit codes: ", *names))
