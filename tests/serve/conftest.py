import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples.random_model import Architecture, save_random_model
from examples.serve_bench.tokens import WordVocabulary
from examples.serving import free_port
from tests.engine.spec import THIS_CONNECTOR
from tests.serve.server import FORKING, Server

VOCAB_SIZE = 512

KEEPS_AND_REPORTS: dict[str, Any] = {"keep_on_device_reset": True, "allow_reports": True}
OURS: dict[str, Any] = THIS_CONNECTOR | {
    "kv_connector_extra_config": {"cpu_bytes_to_use": "16MiB", **KEEPS_AND_REPORTS},
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


def save_model(directory: Path, architecture: Architecture = "llama", **sizes: int) -> Path:
    """A random model with a tokenizer. Returns ``directory``."""
    save_random_model(directory, architecture, vocab_size=VOCAB_SIZE, **sizes)
    WordVocabulary(VOCAB_SIZE).save(directory)
    return directory


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def start_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts a server and waits until it answers. Every server ends with the package."""
    with ExitStack() as servers:

        def start(*arguments: str, command: Sequence[str] = ()) -> Server:
            folder = tmp_path_factory.mktemp("server")
            server = Server(model, folder, *ARGUMENTS, *arguments, command=command)
            return servers.enter_context(server)

        yield start


@pytest.fixture(scope="package")
def replay_port() -> int:
    """TCP port where ``server`` replays its KV events."""
    return free_port()


@pytest.fixture(scope="package")
def server(start_server: StartServer, replay_port: int) -> Server:
    """The server of all tests here, with KV events. After SIGTERM it finishes running requests:
    the last test of the package needs that."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    arguments = ("--kv-events-config", json.dumps(events), "--shutdown-timeout", "60")
    return start_server(*arguments, command=FORKING)
