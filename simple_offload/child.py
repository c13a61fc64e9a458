"""Answers of a module that runs in a process of its own, as an import may end it."""

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def ask(module: str, options: Mapping[str, Any], seconds: float) -> tuple[Any, str]:
    """Call ``answer(file, **options)`` of ``module``, in a process that runs for at most
    ``seconds``. It writes JSON to ``file``. It is not to ask Hugging Face's hub for anything.
    Returns the content of the file (None if there is none, or a part of it), and how the process
    ended."""
    with tempfile.TemporaryDirectory(prefix="simple-offload-") as folder:
        answer = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, module, str(answer), json.dumps(options)],
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
            last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
            end = f"the process ended with code {done.returncode}: {last_line}"
        except subprocess.TimeoutExpired:
            end = f"the process did not end within {seconds} s"
        try:
            return json.loads(answer.read_text()), end
        except (OSError, ValueError):  # none, or a full disk has cut it off
            return None, end


if __name__ == "__main__":
    # Imports make millions of objects that stay. To look for garbage takes a third of their time.
    gc.disable()
    importlib.import_module(sys.argv[1]).answer(Path(sys.argv[2]), **json.loads(sys.argv[3]))
