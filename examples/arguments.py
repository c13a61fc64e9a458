"""Parsers of arguments that several examples take, for argparse's ``type``."""

import argparse
from collections.abc import Callable, Collection


def known_names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of names separated by commas, each one of ``known`` and none twice."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"a name occurs twice in {text!r}")
        return found

    return parse


def positive_count(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
