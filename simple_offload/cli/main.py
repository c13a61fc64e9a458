"""``simple-offload``: its command line, and the exit code."""

import signal
import sys
from collections.abc import Sequence

from simple_offload import __version__
from simple_offload.cli import doctor, size, watch
from simple_offload.cli.arguments import Parser
from simple_offload.config import ConfigError

WRONG_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
_COMMANDS = {
    "doctor": (doctor.run, doctor.add_arguments, "check that the connector works on this machine"),
    "size": (size.run, size.add_arguments, "say how much host memory a workload needs"),
    "watch": (watch.run, watch.add_arguments, "show what a running server finds, and why no more"),
}


def make_parser() -> Parser:
    """The parser of the command."""
    parser = Parser(prog="simple-offload", description="Tools of simple_offload.")
    parser.add_argument("--version", action="version", version=f"simple-offload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_COMMANDS))
    for name, (_, add_arguments, text) in _COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    arguments = make_parser().parse_args(argv)
    run, _, _ = _COMMANDS[arguments.command]
    try:
        return run(arguments)
    except ConfigError as error:
        print(f"simple-offload {arguments.command}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
