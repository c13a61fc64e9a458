"""The command line of a benchmark. A wrong argument ends the program with exit code 2."""

import argparse
import textwrap
from collections.abc import Collection
from pathlib import Path

from pydantic_core import PydanticCustomError

from examples.bench.command import BAD_RESULT, CANNOT_START, INTERRUPTED, RUN_FAILED
from simple_offload.cli.arguments import Parser
from simple_offload.config import nearest, parse_size

MAX_SEED = 2**32 - 1
"""numpy.random.RandomState takes no larger one."""
_COLUMNS = 78


class BenchParser(Parser):
    """Options that several benchmarks take, each added in one way."""

    def __init__(self, module: str, description: str, epilog: str) -> None:
        """``module`` is the benchmark's name below ``examples``. Texts are wrapped here; an empty
        line separates paragraphs."""
        super().__init__(
            prog=f"python -m examples.{module}",
            description=_wrap(description),
            epilog=_wrap(epilog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_number(
        self,
        option: str,
        text: str,
        *,
        default: int | None = None,
        least: int = 1,
        most: int | None = None,
        metavar: str = "N",
        nargs: str | None = None,
    ) -> None:
        """A whole number from ``least`` to ``most``; with ``nargs`` several of them."""

        def parse(given: str) -> int:
            try:
                number = int(given)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{given!r} is not a whole number") from None
            if most is not None and not least <= number <= most:
                raise argparse.ArgumentTypeError(f"{number} is not within {least} and {most}")
            if number < least:
                raise argparse.ArgumentTypeError(f"{number} is less than {least}")
            return number

        self.add_argument(
            option, help=text, type=parse, default=default, metavar=metavar, nargs=nargs
        )

    def add_names(
        self,
        option: str,
        text: str,
        known: Collection[str],
        default: str = "all",
    ) -> None:
        """Names separated by commas, each one of ``known`` and none twice; None by default, which
        ``default`` describes."""

        def parse(given: str) -> list[str]:
            found = given.split(",")
            for name in found:
                if name not in known:
                    raise argparse.ArgumentTypeError(
                        f"{name!r} is none of {', '.join(known)}{nearest(name, known)}"
                    )
            if len(set(found)) < len(found):
                raise argparse.ArgumentTypeError(f"a name occurs twice in {given!r}")
            return found

        text = f"{text}: {', '.join(known)} (default: {default})"
        self.add_argument(option, help=text, type=parse, metavar="A,B")

    def add_output(self, option: str, folder: str, contents: str) -> None:
        """Where ``contents`` go, as ``arguments.output``."""
        self.add_argument(
            option,
            dest="output",
            type=Path,
            default=Path(folder),
            metavar="DIR",
            help=f"where {contents} go (default: {folder})",
        )


def exit_codes(good: str, bad: str, failed: str, cannot_start: str = "wrong usage") -> str:
    """For the end of the help."""
    return (
        f"exit codes: 0 {good}; {BAD_RESULT} {bad}; {CANNOT_START} {cannot_start}; "
        f"{RUN_FAILED} {failed}; {INTERRUPTED} interrupted"
    )


def size(text: str) -> int:
    """Bytes, such as "64GiB"."""
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except PydanticCustomError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.message()}") from None


def _wrap(text: str) -> str:
    return "\n\n".join(textwrap.fill(each, _COLUMNS) for each in text.split("\n\n"))
