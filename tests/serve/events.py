"""The KV events that a server publishes."""

import json
from typing import Any, NamedTuple, cast

import msgspec
import zmq
from vllm.distributed.kv_events import MEDIUM_CPU, KVEventBatch, ZmqEventPublisher

from tests.serve.server import HOST, free_port


class EventPorts(NamedTuple):
    """TCP ports of a server's publisher."""

    live: int
    replay: int

    @classmethod
    def free(cls) -> "EventPorts":
        """Two ports that are free to listen on."""
        return cls(free_port(), free_port())

    def arguments(self) -> tuple[str, str]:
        """Arguments of a server that publishes here."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.live}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        return "--kv-events-config", json.dumps(config)


class Feed:
    """A late subscriber: it requests all events from the first on."""

    def __init__(self, ports: EventPorts) -> None:
        self._socket = cast(Any, zmq.Context.instance().socket(zmq.DEALER))
        self._socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self._socket.connect(f"tcp://{HOST}:{ports.replay}")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def events(self) -> list[Any]:
        """All events about host memory so far."""
        self._socket.send_multipart((b"", (0).to_bytes(8, "big")))
        events: list[Any] = []
        while True:
            *_, number, batch = self._socket.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return [e for e in events if getattr(e, "medium", "") == MEDIUM_CPU]
            events += self._decoder.decode(batch).events

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)
