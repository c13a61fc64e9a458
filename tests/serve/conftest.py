import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.random_model import save_random_model
from examples.serving import free_port
from tests.serve.server import Server
from tests.serve.tokenizer import save_word_tokenizer

VOCAB_SIZE = 512

OURS: Mapping[str, Any] = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_connector_module_path": "simple_offload",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": "64MiB",
        "keep_on_device_reset": True,
        "allow_reports": True,
    },
}


def configured(config: Mapping[str, Any]) -> tuple[str, str]:
    """Arguments of a server; the last ``--kv-transfer-config`` counts."""
    return "--kv-transfer-config", json.dumps(config)


PLAIN = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "640", "--max-num-seqs", "4", "--num-gpu-blocks-override", "24"),
)
"""Arguments of a server without a connector."""
ARGUMENTS = (*PLAIN, *configured(OURS))

StartServer = Callable[..., Server]


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer."""
    directory = save_random_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    save_word_tokenizer(directory, VOCAB_SIZE)
    return directory


@pytest.fixture(scope="package")
def start_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts a server and waits until it answers. Every server ends with the package."""
    servers: list[Server] = []

    def start(*arguments: str) -> Server:
        server = Server(model, tmp_path_factory.mktemp("server"), *ARGUMENTS, *arguments)
        servers.append(server)
        server.wait_until_ready()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="package")
def event_ports() -> tuple[int, int]:
    """TCP ports where ``server`` publishes its KV events, and replays them."""
    return free_port(), free_port()


@pytest.fixture(scope="package")
def server(start_server: StartServer, event_ports: tuple[int, int]) -> Server:
    """The server of all tests here, with KV events. After SIGTERM it finishes running requests:
    the last test of the package needs that."""
    live, replay = event_ports
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{live}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    return start_server("--kv-events-config", json.dumps(events), "--shutdown-timeout", "60")
