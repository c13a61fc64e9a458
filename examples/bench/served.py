"""Servers of the benchmarks over HTTP: one model, one memory, one contender after another."""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from examples.bench.arguments import BenchParser
from examples.bench.child import Device
from examples.bench.client import RequestLost, Target, ask, client_session
from examples.bench.connectors import Contender
from examples.bench.models import ModelShape, save_model
from examples.bench.replies import Reply
from examples.bench.tokens import ModelVocabulary, Vocabulary, WordVocabulary
from examples.serving import Server, command_line, server_environment, serving

MODEL = "bench"
"""The name under which models are served."""
ON_GPU = ("none", "ours", "builtin", "offloading")
"""Contenders, unless others are named."""


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """What all contenders serve, and their memory."""

    device: Device
    shape: ModelShape | None
    """Of a model that is made; None where ``model`` names one that exists."""
    model: str | None = None
    block_size: int
    host_bytes: int
    """Size of the host tier, for all ranks together."""
    seed: int = 0
    tensor_parallel: int = 1

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV of all layers; None if not known."""
        return self.shape.kv_bytes_per_token if self.shape else None

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def vllm_arguments(
        self, contender: Contender, *, max_model_len: int, num_device_blocks: int
    ) -> dict[str, Any]:
        """For vLLM's command line."""
        return {
            "dtype": self.shape.dtype if self.shape else "auto",
            "load_format": self.shape.load_format if self.shape else "auto",
            "block_size": self.block_size,
            "max_model_len": max_model_len,
            "num_gpu_blocks_override": num_device_blocks,
            "enable_prefix_caching": True,
            "tensor_parallel_size": self.tensor_parallel,
            "enforce_eager": self.device == "cpu",
            "enable_prompt_tokens_details": True,
            "disable_uvicorn_access_log": True,
            "kv_transfer_config": contender.transfer_config(self.host_bytes),
        }

    def vocabulary(self) -> Vocabulary:
        """Raises OSError or ValueError if the model that the plan names has none."""
        if self.shape is not None:
            return WordVocabulary(self.shape.vocab_size)
        assert self.model is not None
        folder = Path(self.model)
        # transformers takes a folder that does not exist for a name to download.
        if (folder.is_absolute() or folder.exists()) and not (folder / "config.json").is_file():
            raise FileNotFoundError(f"there is no {folder / 'config.json'}")
        return ModelVocabulary(self.model)


P = TypeVar("P", bound=ServedPlan)


def add_options(parser: BenchParser) -> None:
    """Options for what is served, which ``with_options`` reads."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a model that exists, by folder or by name, instead of one that is made",
    )
    parser.add_number(
        "--device-tokens", "capacity of the device's KV space (default: the preset's)"
    )
    parser.add_number("--host-gib", "size of the host tier (default: the preset's)")
    parser.add_number("--tensor-parallel", "ranks (default: 1)", default=1)


def with_options(plan: P, arguments: argparse.Namespace, **changes: object) -> P:
    """``plan`` with what the arguments name, and with those ``changes`` that are not None."""
    changes |= {
        "seed": arguments.seed,
        "device_tokens": arguments.device_tokens,
        "host_bytes": arguments.host_gib and arguments.host_gib << 30,
        "tensor_parallel": arguments.tensor_parallel,
    }
    given: Mapping[str, Any] = {key: value for key, value in changes.items() if value is not None}
    plan = replace(plan, **given)
    return replace(plan, shape=None, model=arguments.model) if arguments.model else plan


def vocabulary_of(parser: BenchParser, plan: ServedPlan) -> Vocabulary:
    """Exits if the model that ``--model`` names has none."""
    try:
        return plan.vocabulary()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        parser.error(f"argument --model: {plan.model!r} cannot be read: {reason}")


@contextmanager
def made_model(plan: ServedPlan, max_model_len: int, output: Path) -> Iterator[str]:
    """The model, by folder or by name. One that is made is below ``output``, and removed at the
    end."""
    if plan.shape is None:
        assert plan.model is not None
        yield plan.model
        return
    with tempfile.TemporaryDirectory(prefix="work-", dir=output) as work:
        folder = Path(work).absolute() / "model"
        save_model(plan.shape, max_model_len, plan.seed, folder)
        WordVocabulary(plan.shape.vocab_size).save(folder)
        yield str(folder)


@contextmanager
def served(
    plan: ServedPlan,
    contender: Contender,
    model: str,
    arguments: Mapping[str, Any],
    output: Path,
    port: int | None = None,
) -> Iterator[Server]:
    """Serve ``model`` with one contender, as ``serving`` does. The log goes to ``output``."""
    offline = "1" if Path(model).exists() else "0"
    log = output / f"{contender.name}.log"
    with tempfile.TemporaryDirectory(prefix="offload-serve-") as scratch:
        environment = server_environment(
            plan.device, Path(scratch), HF_HUB_OFFLINE=offline, **contender.environment
        )
        line = command_line(arguments)
        with serving(model, line, environment, log, port=port, name=MODEL) as server:
            yield server


def warm_up(server: Server, vocabulary: Vocabulary, seed: int, longest: int) -> None:
    """One-time costs fall due: a short prompt, the longest, and that one as a hit of the
    connector's. Raises RunFailed if there is no answer."""

    async def ask_once(name: str, prompt: list[int]) -> Reply:
        async with client_session() as session:
            return await ask(session, Target(server.url, MODEL), name, 0, prompt, 1)

    for length, name in ((64, "short"), (longest, "long"), (longest, "long")):
        prompt = vocabulary.random(length, seed, "warm-up", name)
        try:
            asyncio.run(ask_once(f"warm-up, {name}", prompt))
        except RequestLost as error:
            raise server.failure(f"answers nothing: {error}") from None
        server.reset_prefix_cache(external=False)
