"""The pages of the documentation, and the commands on them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.set_up import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

BEGINNINGS = (
    *("make", "simple-offload", r"\S*python3?", "vllm serve", "vllm bench", "pip install"),
    *("lm_eval", "npu-smi"),
)
"""Patterns that begin a command between backticks. At least one more word has to follow."""


class Command(NamedTuple):
    """A line of a shell block, or a command between backticks."""

    page: str
    words: tuple[str, ...]
    whole: bool
    """Whether the command is complete; in a sentence it may be a part of one."""

    @property
    def text(self) -> str:
        """Its words in one line, without the shell's quotes."""
        return " ".join(" ".join(self.words).split())


def blocks(text: str, language: str) -> Iterator[str]:
    """The fenced blocks of that language."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1]


def shown_commands(page: Path) -> Iterator[Command]:
    """The commands of shell blocks, of sessions (``$ ...``) and between backticks."""
    text = page.read_text()
    for block in blocks(text, "sh"):
        yield from _commands(page, block.replace("\\\n", " "), whole=True)
    for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        yield from _commands(page, line, whole=True)
    sentences = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(rf"`((?:{'|'.join(BEGINNINGS)}) [^`]+)`", sentences):
        yield from _commands(page, " ".join(span.split()), whole=False)


def _commands(page: Path, text: str, *, whole: bool) -> Iterator[Command]:
    """The commands of a text, one per line. An open quotation continues on the next line."""
    waiting = ""
    for line in text.splitlines():
        waiting += f"{line}\n"
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:  # no closing quotation
            continue
        waiting = ""
        if words:
            yield Command(page.name, tuple(words), whole)
    assert waiting == "", f"{page.name}: {waiting}"


COMMANDS = [command for page in PAGES for command in shown_commands(page)]
