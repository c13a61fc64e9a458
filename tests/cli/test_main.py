"""The whole command: wrong arguments, and imports."""

import shlex
import subprocess
import sys

import pytest

from simple_offload.cli.main import main

URL_FORM = "must be HOST:PORT, with or without http:// and /metrics"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "required: doctor|size|watch"),
        ("doctr", "'doctr' (choose from 'doctor', "),
        ("doctr", "did you mean 'doctor'?"),
        ("wach host:1", "did you mean 'watch'?"),
        ("doctor --rank 2", "did you mean '--ranks'?"),
        ("doctor --ranks 0", "--ranks: '0' is not a whole number above 0"),
        ("doctor --ranks 3 --nodes 2", "doctor: --nodes 2: must divide --ranks, which is 3"),
        ("size", "--trace FILE, --model CONFIG.JSON, or both"),
        ("size --trace x", "--trace needs --kv-bytes-per-token N or --model"),
        ("size --kv-bytes-per-token 2", "nothing to size"),
        ("size --model x --host-memory 2", "--host-memory needs --trace FILE"),
        ("size --model x --device-memory 2", "--device-memory needs --trace FILE"),
        ("size --model x --kv-bytes-per-token 2", "one of them"),
        ("size --trace /none --kv-bytes-per-token 2", "/none cannot be read"),
        ("size --model /none", "--model='/none': No such file"),
        ("size --host-memory 64GB", "'64GB' is not a number from 0"),
        ("size --device-memory 1e300", "'1e300' is not a number from 0 to 1e12"),
        ("size --kv-bytes-per-token 0", "'0' is not a number from 1 to 1e12"),
        ("size --agents 0", "'0' is not a whole number above 0"),
        ("size --traces x", "did you mean '--trace'"),
        ("watch htp://host:8000", "simple-offload watch: URL 'htp://host:8000': "),
        ("watch htp://host:8000", "scheme 'htp' is none of http, https; did you mean 'http'?"),
        ("watch host:80000", "URL 'host:80000' must be HOST:PORT"),
        ("watch http://", f"URL 'http://' {URL_FORM}"),
        ("watch user:password@host:8000", f" {URL_FORM}"),
        ("watch 'my host'", "URL 'my host' must be HOST:PORT"),
        ("watch host:1 --interval 0", "'0' is not a number of seconds from 0.1 to 86400"),
        ("watch host:1 --interval nan", "'nan' is not a number of seconds"),
        ("watch host:1 --interval 5s", "'5s' is not a number of seconds"),
        ("watch host:1 --intervall 5", "did you mean '--interval'?"),
        ("watch", "required: URL"),
    ],
)
def test_wrong_input_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(shlex.split(words))
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_it_starts_without_torch_and_vllm() -> None:
    # In a process of its own: this one has imported both.
    code = (
        "import sys, simple_offload.cli.main as m; m.make_parser();"
        "sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
