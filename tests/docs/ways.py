"""The way to run each command of the documentation: ``WAYS``, and the kinds of ways."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """test_commands.py runs it as shown, but for these changes.

    In texts, ``{out}`` is an empty folder and ``{input}`` a small input file of the serving
    benchmark. All but the ``fast`` ones are slow tests.
    """

    prints: str
    """A pattern that its output must match, as a proof that it works."""
    fast: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)
    """Shown text -> its replacement."""
    add: str = ""
    """Arguments after the shown ones."""
    output: str = ""
    """The option of a make target's program for the folder of its results."""
    code: int = 0
    """Its exit code."""
    alone: bool = False
    """Whether it runs in an environment with nothing but pip."""


@dataclass(frozen=True)
class Elsewhere:
    """test_commands.py does not run it: it takes hours, or needs a device or a server.

    ``by``: the test that runs it, or runs the same program with smaller arguments
    (``tests/file.py::name``). Or a script that contains the command."""

    by: str


@dataclass(frozen=True)
class Named:
    """A sentence shows the beginning of the command, and another place shows it ``whole``: that is
    a key of ``WAYS``."""

    whole: str


Way = Run | Elsewhere | Named

_GPU_COPIES = Elsewhere("tests/examples/test_copy_bench.py::test_on_a_gpu")
_GPU_HOST_MEMORY = Elsewhere("tests/examples/test_host_memory_bench.py::test_on_a_gpu")
_SERVE = Elsewhere("tests/examples/test_serve_bench.py::test_with_vllm")
_GPU_ACCURACY = Elsewhere("tests/examples/test_accuracy_models.py::test_answers_from_the_host_tier")
_NPU = Elsewhere("tests/acl_sim/on_npu/copies.py::test_the_hardware_check")
_SERVED = "tests/docs/test_serving.py::test_the_commands_of_a_first_run_on_an_npu"

_PAIR = Elsewhere("tests/serve/test_disaggregated.py::test_the_same_tokens_as_one_server")
_SHARED_FILES = "tests/serve/test_modes.py::test_two_engines_share_files"
_TURNS = r"later turns"
_SAME_ANSWERS = r"(?s)PASSED: all .* samples .*PASSED: all"

WAYS: Mapping[str, Way] = {
    # make
    "make set-up": Run(r"\A\Z", fast=True),
    "make check": Elsewhere(".ci/run"),
    "make test": Elsewhere(".ci/run"),
    "make test ARGS=tests/scheduler": Run(r"\d{3} passed"),
    "make test ARGS=-k tail_first": Run(r"\d passed"),
    "make test ARGS=-m slow": Elsewhere("tests/docs/test_commands.py::test_commands"),
    "make test-gpu": Named("make test-gpu GPU_PYTHON=python3"),
    "make test-gpu GPU_PYTHON=python3": Run(
        r"\d{2,}/\d+ tests collected", add="ARGS='--collect-only -q'"
    ),
    "make docs": Run(r"\A\Z", fast=True),
    "make demo": Run(r"All 480 tokens of 20 answers are the same", output="--output"),
    "make demo ARGS=--help": Run(r"--turns N", fast=True),
    "make demo ARGS=--restart": Run(r"After the restart, the same tokens", output="--output"),
    "make soak": Named("make soak STEPS=100000 SEED=0"),
    "make soak STEPS=100000 SEED=0": Run(r"no\s+violation"),
    "make soak STEPS=300000 SEED=60000": Run(r"no\s+violation"),
    "make soak STEPS=50000 SEED=6400000": Run(r"no\s+violation"),
    "make soak STEPS=50000 SEED=6450000": Run(r"no\s+violation"),
    "make simulate-builtin": Run(r"(?s)\A(?!.*stopped).*as drawn +\S simple_offload \S 0 of 200 "),
    "make accuracy": Run(_SAME_ANSWERS, output="--output"),
    "make accuracy ARGS=--samples 32": Run(_SAME_ANSWERS, output="--output"),
    "make accuracy ARGS=--corrupt": Run(
        r"FAILED", instead={"--corrupt": "--corrupt --samples 12"}, output="--output", code=2
    ),
    "make bench-serve": Run(_TURNS, output="--output"),
    "make bench-serve ARGS=--preset fits": Run(_TURNS, output="--output"),
    "make bench-serve ARGS=--traces agents.json": _SERVE,
    "make bench-scheduler": Elsewhere("tests/examples/test_scheduler_bench.py::test_a_tiny_run"),
    "make bench-scheduler ARGS=--quick": Run(r"hit rate", output="--out"),
    "make bench-scheduler ARGS=--parts cost --contenders ours,ours-128,builtin": Run(
        r"loaded +131,072 ", output="--out"
    ),
    "make bench-scheduler ARGS=--parts footprint --contenders ours,ours-128,builtin": Run(
        r"4,000,000", output="--out"
    ),
    "make bench-scheduler ARGS=--parts traces --traces …": Elsewhere(
        "tests/examples/test_traces.py::test_a_run_reports_its_replays"
    ),
    "make bench-scheduler ARGS=--parts chat": Elsewhere(
        "tests/examples/test_chat.py::test_a_run_reports_its_chats"
    ),
    "make bench-scheduler ARGS=--parts chat --contenders …": Elsewhere(
        "tests/examples/test_chat.py::test_a_run_reports_its_chats"
    ),
    "make bench-scheduler ARGS=--parts hits --contenders …": Elsewhere(
        "tests/examples/test_scheduler_bench.py::test_a_tiny_run"
    ),
    "python -m tools.vllm_members 0.33.0": Run(r"changed: vllm\..*\n +here: .*\n +there: "),
    # The command
    'simple-offload doctor --ranks 2 --config {"cpu_bytes_to_use": "64GiB"}': Run(
        r"The connector works here", instead={"64GiB": "1GiB"}
    ),
    "simple-offload doctor --ranks 4 --config {…": Run(
        r"The connector works here", instead={"256GiB": "1GiB"}
    ),
    "simple-offload doctor": Run(r"The connector works here"),
    # The examples
    "python3 -m examples.copy_bench": _GPU_COPIES,
    "python3 -m examples.copy_bench --sizes …": _GPU_COPIES,
    "python3 -m examples.host_memory_bench --…": _GPU_HOST_MEMORY,
    "python3 -m examples.serve_bench": _SERVE,
    "python3 -m examples.serve_bench --preset …": _SERVE,
    "python3 -m examples.serve_bench --preset cpu --transport engine "
    "--workloads ttft,grown,idle,mix,turns": Run(r"hit in the host tier"),
    "python3 -m examples.serve_bench --traces …": _SERVE,
    "python3 -m examples.serve_bench --input-file generate_multi_turn.json --seed 1234": Run(
        _TURNS, instead={"generate_multi_turn.json": "{input}"}
    ),
    "python3 -m examples.serve_bench --serve --contenders ours --port 8000": Elsewhere(
        "tests/examples/test_serve_bench.py::test_a_server_for_other_clients"
    ),
    "python3 -m examples.accuracy --model Qwen/Qwen3-8B --tasks gsm8k …": _GPU_ACCURACY,
    "python3 -m examples.accuracy --device cuda --model examples/accuracy/models/…": _GPU_ACCURACY,
    "python3 -m examples.accuracy.train llama --output DIR": Elsewhere(
        "tests/examples/test_accuracy_data.py"
        "::test_training_lowers_the_loss_and_saves_what_it_trained"
    ),
    ".venv/bin/python -m tests.faults.load_run --minutes 30 --seed 0": Elsewhere(
        "tests/faults/test_load_run.py::test_twenty_seconds_of_load"
    ),
    # Servers and their clients
    "vllm serve MODEL --kv-transfer-config {…": Elsewhere(
        "tests/docs/test_serving.py::test_commands_that_serve"
    ),
    "vllm serve MODEL --kv-events-config {…": Elsewhere(
        "tests/docs/test_serving.py::test_commands_that_serve"
    ),
    "curl -s http://localhost:8000/v1/chat/completions …": Elsewhere(
        "tests/serve/test_serve.py::test_wishes"
    ),
    "mount -t tmpfs -o size=128G,mode=0700 tmpfs /kv": Elsewhere(_SHARED_FILES),
    "vllm serve MODEL --data-parallel-size 4 …": Elsewhere(_SHARED_FILES),
    "VLLM_USE_SIMPLE_KV_OFFLOAD=1 vllm serve MODEL --kv-offloading-size 64 …": Elsewhere(
        "tests/docs/test_serving.py::test_commands_that_serve"
    ),
    "CUDA_VISIBLE_DEVICES=0 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve MODEL …": _PAIR,
    "CUDA_VISIBLE_DEVICES=1 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 vllm serve MODEL …": _PAIR,
    "python -m examples.vllm_command serve": Named("vllm serve MODEL --kv-transfer-config {…"),
    "vllm serve Qwen/Qwen3-8B --max-model-len 16384 …": Elsewhere(_SERVED),
    "vllm bench serve --model Qwen/Qwen3-8B --seed 0 …": Elsewhere(_SERVED),
    "lm_eval --model local-completions --tasks gsm8k --num_fewshot 8 …": Elsewhere(_SERVED),
    # Installations
    "pip install .": Run(r"Successfully installed .*simple-offload", alone=True),
    "pip install .[bench]": Run(r"Successfully installed .*lm.eval-0\.4\.13", alone=True),
    "pip install .[dev]": Run(
        r"Successfully installed .*pytest-timeout-.*simple-offload", alone=True
    ),
    "pip install .[cpu]": Elsewhere("tests/test_packaging.py::test_extras_resolve"),
    "pip install lm-eval[api]==0.4.13": Elsewhere(_SERVED),
    # An Ascend NPU
    "python3 -m tests.backends.npu_hardware check": _NPU,
    "python3 -m tests.backends.npu_hardware bench --mib 1024": _NPU,
}


THEIRS = (
    "npu-smi info",
    "docker build -f examples/deploy/Dockerfile -t vllm-simple-offload:0.32.0 .",
    "helm repo add vllm https://vllm-project.github.io/production-stack",
    "helm install vllm vllm/vllm-stack -f examples/deploy/production-stack.yaml",
)
"""Commands of the NPU's driver, of Docker and of a cluster, which cannot run here."""


def key_of(text: str) -> str | None:
    """The key of ``WAYS`` for a command's text: the text itself, or its beginning before ``…``."""
    if text in WAYS:
        return text
    beginnings = [key for key in WAYS if key.endswith("…") and text.startswith(key[:-1])]
    return beginnings[0] if len(beginnings) == 1 else None
