"""A parser of command lines whose message about a wrong name ends with the nearest valid one."""

import argparse
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from simple_offload.config import nearest

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<value>[^']*)' \(choose from (?P<choices>.*)\)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<value>-[^\s=]+)")


def whole_number(text: str) -> int:
    """A number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def number(kind: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    """A parser of numbers of one ``kind``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_right(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {kind}")
        return value

    return parse


class Parser(argparse.ArgumentParser):
    """Adds the nearest valid name to an error about a wrong one. Options cannot be abbreviated."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown arguments here: the parser above a command does not know its options."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        known: Iterable[str] = ()
        if match := _INVALID_CHOICE.search(message):
            known = re.findall(r"[^', ]+", match["choices"])
        elif match := _UNRECOGNIZED.search(message):
            known = [name for action in self._actions for name in action.option_strings]
        super().error(message + (nearest(match["value"], known) if match else ""))
