"""Disaggregated prefill: one server computes prompts, another one generates answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.serve.server import Completion, Server, completion

WITH_ONE_TOKEN: dict[str, Any] = {
    "max_tokens": 1,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}
"""Of a request whose answer another server generates. The first server's token is thrown away."""


@dataclass
class Disaggregated:
    """Both servers, and the router before them: a request goes to one and then to the other, with
    what the first one answers in ``kv_transfer_params``."""

    prefill: Server
    decode: Server

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """The answer to a prompt, by both servers."""
        return completion(self.decode.answer(prompt, max_tokens, **self.fill(prompt)))

    def fill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Compute the prompt. Returns what the request to the other server needs. The blocks wait
        there for that request, until their lease ends."""
        answer = self.prefill.answer(prompt, **WITH_ONE_TOKEN)
        return {"kv_transfer_params": answer["kv_transfer_params"]}
