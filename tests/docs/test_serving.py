"""The servers and clients of the documentation, as shown, with a small model."""

import json
import re
import signal
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from examples.random_model import save_random_model
from examples.serving import Server, free_port
from tests.docs.pages import COMMANDS
from tests.docs.shell import as_run, empty_environment, reader_environment, run, start, stop
from tests.docs.test_commands import SLOW_SECONDS
from tests.docs.ways import Run
from tests.serve.tokenizer import save_word_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SLOW_SECONDS)]

HITS = "vllm:external_prefix_cache_hits_total"

CPU = "--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --block-size 32"
"""Additional arguments for a server of a small model on the CPU."""

VOCAB_SIZE = 512

TASK = """
task: small
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl, train: questions.jsonl}}
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 4, until: [], do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
"""A local task that replaces the documented one, whose questions come over the network."""


def shown(beginning: str) -> Sequence[str]:
    """The words of the only complete command with this beginning."""
    (words,) = {each.words for each in COMMANDS if each.whole and each.text.startswith(beginning)}
    return words


@pytest.fixture
def places(tmp_path: Path) -> Mapping[str, str]:
    model = save_random_model(tmp_path / "model", vocab_size=VOCAB_SIZE, max_model_len=1024)
    save_word_tokenizer(model, VOCAB_SIZE)
    return {
        "model": str(model),
        "port": str(free_port()),
        "events": str(free_port()),
        "folder": str(tmp_path),
    }


@contextmanager
def served(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], port: int
) -> Iterator[Server]:
    """The server that a command starts, once it answers. Ends with SIGINT, as by Ctrl-C."""
    log = folder / "serve.log"
    process = start(words, folder, environment, log)
    try:
        server = Server(process, port, log)
        server.wait_until_ready()
        yield server
    finally:
        code = stop(process, signal.SIGINT)
    assert code in (0, -signal.SIGINT, 128 + signal.SIGINT), log.read_text()[-6000:]


@pytest.mark.parametrize(
    ("beginning", "size", "less"),
    [
        ("vllm serve MODEL --kv-transfer-config", "64GiB", "64MiB"),
        ("vllm serve MODEL --kv-events-config", "64GiB", "64MiB"),
        ("VLLM_USE_SIMPLE_KV_OFFLOAD=1 vllm serve MODEL ", "64", "0.0625"),
    ],
    ids=["of the README", "with KV events", "with vLLM's option"],
)
def test_commands_that_serve(
    tmp_path: Path, places: Mapping[str, str], beginning: str, size: str, less: str
) -> None:
    """The server answers, and a prompt that the device has evicted comes back from the host."""
    instead = {"MODEL": "{model}", size: less}
    if "kv-events" in beginning:
        instead["5557"] = "{events}"
    way = Run("", instead=instead, add=CPU)
    words = ["env", *as_run(shown(beginning), way, places)]
    environment = _cpu(reader_environment(tmp_path))
    with served(words, tmp_path, environment, int(places["port"])) as server:
        first = _complete(server, places["model"])
        server.reset_prefix_cache(external=False)
        assert server.metric(HITS) == 0
        assert _complete(server, places["model"]) == first
        assert server.metric(HITS) == 288


def test_the_commands_of_a_first_run_on_an_npu(tmp_path: Path, places: Mapping[str, str]) -> None:
    """The commands that send requests, with lm_eval installed as shown, beside vLLM."""
    programs = empty_environment(tmp_path / "eval")
    environment = _cpu(reader_environment(tmp_path, programs))

    def run_shown(beginning: str, way: Run) -> str:
        words = as_run(shown(beginning), way, places)
        code, output = run(words, tmp_path, environment)
        assert code == way.code, output[-6000:]
        return output

    run_shown("pip install lm-eval", Run(""))
    (site,) = programs.parent.glob("lib/python*/site-packages")
    (site / "vllm.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (tmp_path / "small.yaml").write_text(TASK)
    with (tmp_path / "questions.jsonl").open("w") as file:
        for number in range(16):
            words = " ".join(f"w{7 * number + each}" for each in range(60))
            file.write(json.dumps({"question": words, "answer": f"w{number}"}) + "\n")

    small = {"Qwen/Qwen3-8B": "{model}", "16384": "1024", "600": "40", "64GiB": "64MiB"}
    command = as_run(shown("vllm serve Qwen/Qwen3-8B"), Run("", instead=small, add=CPU), places)
    with served(command, tmp_path, environment, int(places["port"])) as server:
        asked = {"Qwen/Qwen3-8B": "{model}", ":8000": ":{port}", "gsm8k": "small"}
        for _ in range(2):
            output = run_shown(
                "lm_eval --model local-completions",
                Run("", instead=asked, add="--include_path {folder}"),
            )
            assert "exact_match" in output
        assert list(tmp_path.rglob("small*.json")), "no results"

        hits = server.metric(HITS)
        load = {"Qwen/Qwen3-8B": "{model}", "240": "24", "40": "6", "8192": "512", "256": "32"}
        output = run_shown("vllm bench serve", Run("", instead=load, add="--port {port}"))
        assert re.search(r"Successful requests: +24\b", output)
        assert server.metric(HITS) > hits


def _complete(server: Server, model: str) -> list[int]:
    """The tokens that the model generates after a prompt of 300 tokens."""
    asked = {
        "model": model,
        "prompt": list(range(3, 303)),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = Request(
        f"{server.url}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    return list(choice["token_ids"])


def _cpu(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        **environment,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
