"""Middleware for ``vllm serve`` that records the cached tokens of each prompt.

lm_eval drops the usage of each answer, and the server's own metrics are sums. With
``--middleware examples.accuracy.usage.RecordUsage --enable-prompt-tokens-details`` each answer
adds a line to the file that the environment variable ACCURACY_USAGE names.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIDDLEWARE = f"{__name__}.RecordUsage"
VARIABLE = "ACCURACY_USAGE"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Usage:
    """Of one prompt, in tokens."""

    prompt_tokens: int
    cached_tokens: int


class RecordUsage:
    """ASGI middleware. Answers pass through it unchanged."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.path = Path(os.environ[VARIABLE])

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            await self.app(scope, receive, send)
            return
        body = bytearray()

        async def send_and_keep(message: Message) -> None:
            if message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, send_and_keep)
        if line := _usage_line(bytes(body)):
            # One write in append mode, so that lines of several server processes stay whole.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)


def _usage_line(body: bytes) -> str | None:
    """The line for an answer; None without usage, as errors are."""
    try:
        usage = json.loads(body)["usage"]
    except (ValueError, KeyError):
        return None
    details = usage.get("prompt_tokens_details") or {}
    kept = Usage(usage["prompt_tokens"], details.get("cached_tokens") or 0)
    return json.dumps(vars(kept)) + "\n"


def read_usage(path: Path, *, skip: int = 0) -> list[Usage]:
    """The recorded usages without the first ``skip``; empty if there is no such file yet."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[skip:]
    return [Usage(**json.loads(line)) for line in lines]
