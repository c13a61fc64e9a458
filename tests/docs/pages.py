"""The pages of the documentation, and the commands on them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.set_up import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_IN_SENTENCES = r"make|simple-offload|\S*python3?|vllm serve|vllm bench|pip install|lm_eval|npu-smi"
"""Beginnings of commands between backticks. At least one more word has to follow."""


class Command(NamedTuple):
    """A line of a shell block, or a command between backticks, which may be a part of one."""

    page: str
    words: tuple[str, ...]

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
    shown = [block.replace("\\\n", " ") for block in blocks(text, "sh")]
    shown += re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    sentences = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(rf"`((?:{_IN_SENTENCES})\s[^`]+)`", sentences)
    shown += (" ".join(span.split()) for span in spans)
    for each in shown:
        # One command a line. An open quotation continues on the next line.
        waiting = ""
        for line in each.splitlines():
            waiting += f"{line}\n"
            try:
                words = shlex.split(waiting, comments=True)
            except ValueError:  # no closing quotation
                continue
            waiting = ""
            if words:
                yield Command(page.name, tuple(words))
        assert waiting == "", f"{page.name}: {waiting}"


COMMANDS = [command for page in PAGES for command in shown_commands(page)]
