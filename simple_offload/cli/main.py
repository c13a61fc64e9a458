"""``simple-offload``: runs a subcommand, and sets the exit code."""

import signal
import sys
from collections.abc import Callable, Sequence

from simple_offload import __version__
from simple_offload.cli import bench, doctor
from simple_offload.cli.arguments import CommandError, Parser

WRONG_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT


def make_parser() -> Parser:
    """The parser of all subcommands. Its namespace has ``run``, a function from that namespace to
    the exit code."""
    parser = Parser(
        prog="simple-offload",
        description="Check that the connector works on a machine, and run its benchmarks.",
    )
    parser.add_argument("--version", action="version", version=f"simple-offload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, bench):
        module.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = make_parser().parse_args(argv)
    run: Callable[..., int] = arguments.run
    try:
        return run(arguments)
    except CommandError as error:
        print(f"simple-offload {arguments.command}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has closed it
        sys.stderr.close()
        return 0
