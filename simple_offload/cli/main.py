"""``simple-offload``: its command line, and the exit code."""

import argparse
import signal
import sys
from collections.abc import Sequence

from simple_offload import __version__
from simple_offload.cli import doctor
from simple_offload.cli.arguments import Parser
from simple_offload.config import ConfigError

WRONG_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT


def make_parser() -> Parser:
    """The parser of the command."""
    parser = Parser(
        prog="simple-offload",
        description=(
            "doctor checks that the connector works on this machine, and how it would copy: vLLM, "
            "torch, the device, memory and, if given, a configuration. It starts no engine; on a "
            "GPU it measures copies as a server does."
        ),
        epilog="exit codes: 0 the connector works here, maybe with warnings; 1 it would not; "
        "2 wrong usage",
    )
    parser.add_argument("--version", action="version", version=f"simple-offload {__version__}")
    parser.add_argument("command", choices=("doctor",), metavar="doctor")
    parser.add_argument(
        "--config",
        metavar="JSON",
        help="kv_connector_extra_config, or the whole --kv-transfer-config, or a file with either",
    )
    for option, text in (
        ("--ranks", "tensor parallel x pipeline parallel ranks of the server (default: 1)"),
        ("--nodes", "machines that share those ranks (default: 1)"),
        ("--data-parallel", "engines on this machine, each with those ranks (default: 1)"),
    ):
        parser.add_argument(option, type=_count, default=1, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run doctor; return the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        return doctor.run(arguments)
    except ConfigError as error:
        print(f"simple-offload doctor: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has closed it
        sys.stderr.close()
        return 0
