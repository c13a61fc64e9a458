"""What every test has: an environment without network, and properties that replay."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# The same examples on every run of the same command: a failure is one of the code, and is there
# again the next time. (They differ with the modules that are loaded: Hypothesis tries constants
# that it finds there.) No deadline: how long one takes depends on what else the machine does.
settings.register_profile("replay", derandomize=True, deadline=None)
settings.load_profile("replay")

_SHARING = ("engine", "faults", "serve", "vllm_0_33", "acl_sim")
"""Directories whose tests share what takes long to make, the longest first."""

PATIENCE_SECONDS = 30.0
"""How long tests wait for what must happen before they give up."""

MakeVllmConfig = Callable[..., "VllmConfig"]


def pytest_report_header() -> str:
    """Which build of its operators vLLM picks for this processor: some failures come with one."""
    from tests import operators

    return operators.describe()


def _room(nodeid: str) -> str:
    """What a test shares things with: a directory that makes what takes long, or its file."""
    path = Path(nodeid.split("::", 1)[0])
    directory = path.parts[1] if len(path.parts) > 2 else ""
    return directory if directory in _SHARING else str(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that all processes end together."""

    def place(item: pytest.Item) -> int:
        room = _room(item.nodeid)
        return _SHARING.index(room) if room in _SHARING else len(_SHARING)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``, tests of a room run in one process. (xdist's own groups do not get
    there: 3.8.0 writes them where pytest 9.2 does not look.)"""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _room(nodeid)

    return ByRoom(config, log)


class Machine:
    """A machine of 100 GiB, and the files in which its kernel tells of limits."""

    num_bytes = 100 * 2**30
    available: int | None = None
    """Bytes; None: all."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, *parts: str) -> Path:
        """Where a file of the kernel's lies here."""
        return self._root / Path(*parts).relative_to("/")

    def write(self, name: str, text: str) -> None:
        """Give a file of the kernel's this content."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """What the configuration is checked against instead of the machine that runs the test."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(
        "simple_offload.memory.psutil.virtual_memory",
        lambda: SimpleNamespace(
            total=machine.num_bytes,
            available=machine.num_bytes if machine.available is None else machine.available,
        ),
    )
    monkeypatch.setattr("simple_offload.memory._ROOT", tmp_path)
    return machine


def within_patience(call: Callable[[], object]) -> None:
    """Call something that may never return, where no test's time limit helps: once a test has
    failed, nothing limits its teardown."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), f"{call} does not return"


@pytest.fixture(autouse=True)
def no_engine_left() -> Iterator[None]:
    """Fails a test that leaves a copy lane open: it would change how the threads of all
    later tests of this process take turns."""
    before = sys.getswitchinterval()
    yield
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)
    assert after == before


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fails a test that leaves a copy thread running."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert left == []


@pytest.fixture(scope="session")
def make_vllm_config(tmp_path_factory: pytest.TempPathFactory) -> MakeVllmConfig:
    """A function that makes a real VllmConfig for a small Llama on CPU, which has this
    connector.

    Its arguments: ``extra_config`` (of the connector), ``kv_role``, ``prefix_caching`` (bool)
    and ``num_ranks``.
    """
    from transformers import LlamaConfig
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig

    directory: Path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    ).save_pretrained(directory)
    model = ModelConfig(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=512
    )

    def make(
        extra_config: dict[str, Any] | None = None,
        *,
        kv_role: Any = "kv_both",
        prefix_caching: bool = True,
        num_ranks: int = 1,
    ) -> "VllmConfig":
        config = VllmConfig(
            model_config=model,
            device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=prefix_caching),
            kv_transfer_config=KVTransferConfig(
                kv_connector="SimpleCPUOffloadConnector",
                kv_connector_module_path="simple_offload",
                kv_role=kv_role,
                kv_connector_extra_config=extra_config or {},
            ),
        )
        config.cache_config.block_size = 16
        # The ranks are not processes here, so their number is set on the side.
        config.parallel_config.world_size = num_ranks
        return config

    return make
