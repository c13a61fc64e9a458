import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.random_model import save_random_model
from tests.serve.server import START_SECONDS, Server
from tests.serve.tokenizer import save_word_tokenizer

VOCAB_SIZE = 512

ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "640", "--max-num-seqs", "4", "--num-gpu-blocks-override", "24"),
    "--kv-transfer-config",
    json.dumps(
        {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_module_path": "simple_offload",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB"},
        }
    ),
)

StartServer = Callable[..., Server]


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer."""
    directory = save_random_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    save_word_tokenizer(directory, VOCAB_SIZE)
    return directory


@pytest.fixture(scope="module")
def start_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts a server and waits until it answers. None outlives the module."""
    servers: list[Server] = []

    def start(*arguments: str, seconds: float = START_SECONDS) -> Server:
        server = Server(model, tmp_path_factory.mktemp("server"), *ARGUMENTS, *arguments)
        servers.append(server)
        server.wait_until_ready(seconds)
        return server

    yield start
    for server in servers:
        server.kill()
