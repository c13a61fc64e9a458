"""The command line of a benchmark. A wrong argument ends the program with exit code 2."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from examples.bench.command import BAD_RESULT, CANNOT_START, INTERRUPTED, RUN_FAILED
from simple_offload.cli.arguments import Parser
from simple_offload.config import nearest, parse_size

MAX_SEED = 2**32 - 1
"""numpy.random.RandomState takes no larger one."""
EXIT_CODES = (
    f"exit codes: 0 all is done, and good; {BAD_RESULT} a bad result, which the last lines name; "
    f"{CANNOT_START} wrong usage, or this machine lacks something; {RUN_FAILED} a process or a "
    f"contender failed; {INTERRUPTED} interrupted"
)
T = TypeVar("T")


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``most``."""
    allowed = f"from {least}" + ("" if most is None else f" to {most}")

    def parse(given: str) -> int:
        number = int(given) if given.isdecimal() else -1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{given!r} is not a whole number {allowed}")
        return number

    return parse


def option(
    default: T,
    text: str,
    parse: Callable[[str], Any] | None = whole(),  # noqa: B008 - a constant
    *,
    name: str | None = None,
    metavar: str | None = "N",
    **more: Any,
) -> T:
    """A field of a plan with an option: ``--name``, by default the field's name. ``text`` describes
    both. ``more`` is argparse's; with ``nargs`` the option has several values, in a tuple."""
    keywords = {"help": text, **more}
    if parse is not None:
        keywords |= {"type": parse, "metavar": metavar}
    made: Any = field(default=default, metadata={"name": name, "keywords": keywords})
    return made  # type: ignore[no-any-return]


class BenchParser(Parser):
    """Options that several benchmarks take, each added in one way."""

    def __init__(self, module: str, description: str) -> None:
        """``module`` is the benchmark's name below ``examples``."""
        super().__init__(
            prog=f"python -m examples.{module}", description=description, epilog=EXIT_CODES
        )
        folder = Path(f"{module.replace('_', '-')}-out")
        text = f"where all results and logs go (default: {folder})"
        self.add_argument("--output", type=Path, default=folder, metavar="DIR", help=text)

    def add_plan(self, plan: Any, default: str | None = None) -> None:
        """The options of the fields of ``plan``. ``default`` describes their defaults, where it
        is not those of ``plan``. ``changed`` then gives the plan."""
        for each in fields(plan):
            if each.metadata:
                keywords = dict(each.metadata["keywords"])
                if (own := getattr(plan, each.name)) is not None:
                    keywords["help"] += f" (default: {default or own})"
                name = each.metadata["name"] or each.name.replace("_", "-")
                self.add_argument(f"--{name}", dest=each.name, **keywords)

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


def changed(plan: T, arguments: argparse.Namespace) -> T:
    """``plan`` with the values that its options were given."""
    options = {each.name for each in fields(plan) if each.metadata}  # type: ignore[arg-type]
    found = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in options and value is not None
    }
    return replace(plan, **found)  # type: ignore[type-var]


def size(text: str) -> int:
    """Bytes, such as "64GiB"."""
    try:
        found = parse_size(int(text) if text.isdecimal() else text)
    except PydanticCustomError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.message()}") from None
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte")
    return found
