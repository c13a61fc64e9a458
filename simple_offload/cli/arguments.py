"""Parsing of the command's arguments, and messages about wrong ones."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from simple_offload.config import nearest

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<value>[^']*)' \(choose from (?P<choices>.*)\)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<value>-[^\s=]+)")


class CommandError(Exception):
    """Wrong input. The message names the key, the value and what is allowed."""


class Parser(argparse.ArgumentParser):
    """Adds the nearest valid name to an error about a wrong one. Options cannot be abbreviated."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Like argparse, but the subcommand's own ``parser`` refuses unrecognized arguments."""
        arguments, rest = self.parse_known_args(args, namespace)
        if rest:
            parser: Parser = getattr(arguments, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        known: Iterable[str] = ()
        if match := _INVALID_CHOICE.search(message):
            known = re.findall(r"'([^']*)'", match["choices"])
        elif match := _UNRECOGNIZED.search(message):
            known = [name for action in self._actions for name in action.option_strings]
        super().error(message + (nearest(match["value"], known) if match else ""))


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
