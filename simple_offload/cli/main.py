"""``simple-offload``: runs doctor, and sets the exit code."""

import signal
import sys
from collections.abc import Sequence

from simple_offload import __version__
from simple_offload.cli import doctor
from simple_offload.cli.arguments import CommandError, Parser

WRONG_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT


def make_parser() -> Parser:
    """The parser of the command and its subcommand."""
    parser = Parser(
        prog="simple-offload", description="Check that the connector works on a machine."
    )
    parser.add_argument("--version", action="version", version=f"simple-offload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand; return the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        return doctor.run(arguments)
    except CommandError as error:
        print(f"simple-offload {arguments.command}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has closed it
        sys.stderr.close()
        return 0
