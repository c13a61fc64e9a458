"""The whole command: wrong arguments, and imports."""

import subprocess
import sys

import pytest

from simple_offload.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["doctr"], ("'doctr'", "(choose from 'doctor', ", "did you mean 'doctor'?")),
        (["wach", "host:1"], ("'wach'", "did you mean 'watch'?")),
        (["doctor", "--rank", "2"], ("--rank", "did you mean '--ranks'?")),
        (["doctor", "--ranks", "0"], ("--ranks", "'0' is not a whole number above 0")),
        ([], ("required: doctor|",)),
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


def test_options_may_precede_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """As the help once showed them, when it was the only command."""
    assert main(["--ranks", "3", "--nodes", "2", "doctor"]) == 2
    message = "simple-offload doctor: --nodes 2: must divide --ranks, which is 3"
    assert message in capsys.readouterr().err


def test_it_starts_without_torch_and_vllm() -> None:
    # In a process of its own: this one has imported both.
    code = (
        "import sys, simple_offload.cli.main as m; m.make_parser();"
        "sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
