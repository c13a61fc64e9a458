"""The lines that the package logs, read from its source."""

import ast
import re
from collections.abc import Iterator

from tools.set_up import ROOT

_LEVELS = {
    "info": "info",
    "warning": "warning",
    "warning_once": "warning",
    "error": "error",
    "exception": "error",  # with a traceback
}
_PLACEHOLDER = re.compile(r"%(?:\([a-z_]+\))?[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")


def log_lines() -> Iterator[tuple[str, str]]:
    """Level and text of every line except debug lines, with … for each value that is filled in."""
    for file in sorted((ROOT / "simple_offload").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                    args=[ast.Constant(value=str(text)), *_],
                ) if level in _LEVELS:
                    yield _LEVELS[level], _PLACEHOLDER.sub("…", text)
