"""The setting of all tests: no network, and properties that replay."""

import atexit
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Imports make millions of objects that stay. To look for garbage among them takes a third of the
# imports' time, and a tenth of the tests'. Until pytest_collection_finish.
gc.disable()
atexit.register(gc.unfreeze)  # else nanobind's libraries report what they have at the end

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# OpenMP's threads wait for each other in busy loops. These take ten times as long where tests in
# other processes occupy the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run of a command, so that a failure replays. (They differ with the
# loaded modules, whose constants Hypothesis tries.) No deadline: the time depends on the machine's
# load.
settings.register_profile("replay", derandomize=True, deadline=None)
settings.load_profile("replay")

_SHARING = ("engine", "serve", "vllm_versions", "faults", "acl_sim")
"""Folders whose tests share engines or other costly things, the slowest folder first."""
_FORKED = {"faults": "engine"}
"""A folder's children are forked from the same process as another one's (``tests.engine.harness``).
"""
_SINGLE = "simulation"
"""A folder of long tests that share nothing."""

_DAY = int(os.environ.setdefault("TEST_DAY", str(int(time.time() // 86400))))
"""Since 1970. All processes of a run have the same."""

PATIENCE_SECONDS = 30.0
"""Time limit, in seconds, for anything that a test waits for."""

MakeVllmConfig = Callable[..., "VllmConfig"]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        # vLLM inspects a model's class in a process of its own, which imports vLLM: 18 s. It keeps
        # the result, but a fresh machine has none.
        registry.__dict__["_run_in_subprocess"] = lambda inspect: inspect()
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"{_builds()}\n")


def pytest_report_header(config: pytest.Config) -> str | None:
    # Where workers run the tests, one of them says it: this process need not import vLLM.
    return None if config.getoption("numprocesses", None) else _builds()


def _builds() -> str:
    """The build of vLLM's operators on this processor, which some failures depend on. vLLM's wheel
    for x86 has several, and only vLLM may choose: a second one in a process aborts it."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    # One build is in no Python module: vLLM loads it under a name that the library does not define.
    maps = Path("/proc/self/maps").read_text()
    builds = sorted(set(re.findall(r"/vllm/(_C\w*)\.[\w.-]*so$", maps, re.MULTILINE))) or ["none"]
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"vLLM {vllm.__version__}, operators {', '.join(builds)}; "
        f"torch {torch.__version__} on {capability}"
    )


def _folder(nodeid: str) -> str:
    """The folder below tests/ that has the test; "" for a test directly in tests/."""
    parts = Path(nodeid.split("::", 1)[0]).parts
    return parts[1] if len(parts) > 2 else ""


def _scope(nodeid: str) -> str:
    """The unit that runs in one process. It is the folder if its tests share costly things, the
    single test if they share nothing, and else the file."""
    folder = _folder(nodeid)
    if folder == _SINGLE:
        return nodeid
    return _FORKED.get(folder, folder) if folder in _SHARING else nodeid.split("::", 1)[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest folders first and single tests last, so that all processes end together."""
    order = {folder: place for place, folder in enumerate(_SHARING)} | {_SINGLE: len(_SHARING) + 1}
    items.sort(key=lambda item: order.get(_folder(item.nodeid), len(_SHARING)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``, run the tests of a scope in one process. (xdist's own groups have
    no effect: 3.8.0 writes them to a place that pytest 9.2 does not read.)"""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByScope(config, log)


def daily(values: Iterable[object], num_days: int) -> list[Any]:
    """Parameters of a test. Each is tried on one day in ``num_days``, and is a slow test on all
    other days."""
    return [
        pytest.param(value, marks=() if (_DAY - place) % num_days == 0 else pytest.mark.slow)
        for place, value in enumerate(values)
    ]


class Machine:
    """A machine of 100 GiB, and its kernel's files with limits."""

    num_bytes = 100 * 2**30
    available: int | None = None
    """Available bytes; None: all of the machine's."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.turns = root / "dev" / "shm"
        """The folder that processes lock for their turn."""
        self.turns.mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        """Write a file of the kernel."""
        path = self._root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Replaces the machine's memory when a configuration is checked."""
    root = tmp_path_factory.mktemp("machine")
    machine = Machine(root)
    monkeypatch.setattr(
        "simple_offload.memory.psutil.virtual_memory",
        lambda: SimpleNamespace(
            total=machine.num_bytes,
            available=machine.num_bytes if machine.available is None else machine.available,
        ),
    )
    monkeypatch.setattr("simple_offload.memory.ROOT", root)
    return machine


def within_patience(call: Callable[[], object]) -> None:
    """Call a function that may never return, outside pytest's time limit: nothing limits the
    teardown of a failed test."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), f"{call} does not return"


@pytest.fixture(autouse=True)
def no_engine_left() -> Iterator[None]:
    """Fails a test that leaves a copy lane open. An open lane changes how threads switch in all
    later tests of this process."""
    before = sys.getswitchinterval()
    yield
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)
    assert after == before


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a copy thread running."""
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
