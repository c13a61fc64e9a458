"""Messages between the server and the process of its helper."""

import pickle
from typing import Any

RECEIVE_BYTES = 1 << 20
"""Most that is received at once."""
_LENGTH_BYTES = 8

Message = tuple[Any, ...]


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(message)
    return len(data).to_bytes(_LENGTH_BYTES) + data


def take(received: bytearray) -> list[Message]:
    """Take the whole messages from what has come so far."""
    messages: list[Message] = []
    start = 0
    while len(received) >= start + _LENGTH_BYTES:
        data_start = start + _LENGTH_BYTES
        end = data_start + int.from_bytes(received[start:data_start])
        if len(received) < end:
            break
        messages.append(pickle.loads(received[data_start:end]))  # noqa: S301 - from our own process
        start = end
    del received[:start]
    return messages
