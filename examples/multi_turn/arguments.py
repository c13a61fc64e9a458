"""The command line of ``python -m examples.multi_turn``."""

import argparse
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from examples.arguments import known_names, positive_count
from examples.engine_bench.contenders import CONTENDERS, ON_CPU
from examples.multi_turn.bench import CONVERSATIONS, Bench
from examples.multi_turn.conversations import Conversation, make_conversations, read_input
from examples.multi_turn.lengths import InputError
from examples.multi_turn.plan import PRESETS, Device, Plan
from examples.multi_turn.tokens import ModelVocabulary, Vocabulary, WordVocabulary

WORTH_NOTHING = 1
RUN_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT

ON_GPU = ("none", "ours", "builtin", "offloading")
"""Contenders, unless told otherwise."""

DESCRIPTION = """\
vLLM serves one model with one KV connector after another, and each server is asked the same
conversations over HTTP. Compare ratios: times hold on one machine only."""

EPILOG = f"""\
The input file is that of vLLM's benchmarks/multi_turn/benchmark_serving_multi_turn.py: a list of
conversations, or settings with "filetype": "generate_conversations". What generated ones say is
made up from the seed; their "text_files" are not read. What a run asks is written to
{CONVERSATIONS}, which vLLM's script reads in turn.

exit codes: 0 measured; {WORTH_NOTHING} a request was lost, answers differ, or a connector got no
hits; 2 wrong usage; {RUN_FAILED} a server failed; {INTERRUPTED} interrupted"""


def parse(argv: Sequence[str] | None) -> tuple[Bench, bool]:
    """The benchmark, and whether it is only to serve."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.multi_turn",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="cpu",
        help="model, sizes and conversations. cpu: a small model. h200: 8 billion parameters, for "
        "a GPU of 80 GB or more. fits: one of those two, by the machine, with room for everything "
        "on the device. seed: Qwen3-14B's shape and vLLM's own conversations (default: cpu)",
    )
    parser.add_argument(
        "--contenders",
        type=known_names(CONTENDERS),
        metavar="A,B",
        help=f"which, the first being the base of ratios: {', '.join(CONTENDERS)} (default: "
        f"{', '.join(ON_GPU)}; on the CPU {' and '.join(ON_CPU)})",
    )
    parser.add_argument(
        "--rounds",
        type=positive_count,
        metavar="N",
        help="replays of all conversations by each contender, from empty caches each time "
        "(default: 3; 1 on the CPU)",
    )
    parser.add_argument(
        "--input-file", type=Path, metavar="FILE", help="conversations other than the preset's"
    )
    parser.add_argument(
        "--num-clients",
        type=positive_count,
        metavar="N",
        help="who ask at the same time (default: the preset's)",
    )
    parser.add_argument(
        "--max-active-conversations",
        type=positive_count,
        metavar="N",
        help="begun and not ended, of all clients together (default: the preset's)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a model that exists, by folder or by name, instead of one that is made",
    )
    parser.add_argument(
        "--device-tokens",
        type=positive_count,
        metavar="N",
        help="which the device's KV space holds (default: the preset's)",
    )
    parser.add_argument(
        "--host-gib",
        type=positive_count,
        metavar="N",
        help="size of the host tier (default: the preset's)",
    )
    parser.add_argument(
        "--tensor-parallel", type=positive_count, default=1, metavar="N", help="ranks (default: 1)"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the first contender until Ctrl-C and ask it nothing: for vLLM's own script, "
        "whose command line is printed",
    )
    parser.add_argument("--port", type=positive_count, help="where to serve (default: a free one)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of what is asked (default: the preset's)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("multi-turn-out"),
        metavar="DIR",
        help="where numbers, plots and logs go (default: multi-turn-out)",
    )
    arguments = parser.parse_args(argv)
    plan = _plan(arguments)
    allowed = ON_CPU if plan.device == "cpu" else tuple(CONTENDERS)
    names = arguments.contenders or (ON_CPU if plan.device == "cpu" else ON_GPU)
    for name in names:
        if name not in allowed:
            parser.error(
                f"argument --contenders: {name!r} does not run on the CPU: choose from "
                f"{', '.join(allowed)}"
            )
    try:
        vocabulary = _vocabulary(plan)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        parser.error(f"argument --model: {arguments.model!r} cannot be read: {reason}")
    try:
        data = plan.settings if arguments.input_file is None else read_input(arguments.input_file)
        conversations = make_conversations(data, vocabulary, plan.seed)
    except InputError as error:
        parser.error(f"argument --input-file: {error}")
    try:
        plan = _staff(plan, conversations, arguments)
    except ValueError as error:
        parser.error(str(error))
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=arguments.output).close()
    except OSError as error:
        parser.error(f"argument --output: cannot write to {arguments.output}: {error.strerror}")
    contenders = [CONTENDERS[name] for name in names]
    bench = Bench(plan, conversations, vocabulary, contenders, arguments.output, arguments.port)
    return bench, arguments.serve


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = PRESETS[arguments.preset](_device() if arguments.preset == "fits" else "cpu")
    changes = {
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "device_tokens": arguments.device_tokens,
        "host_bytes": arguments.host_gib and arguments.host_gib << 30,
        "tensor_parallel": arguments.tensor_parallel,
    }
    plan = replace(plan, **{name: value for name, value in changes.items() if value is not None})
    return replace(plan, shape=None, model=arguments.model) if arguments.model else plan


def _device() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _vocabulary(plan: Plan) -> Vocabulary:
    """Raises OSError or ValueError if the model that ``plan`` names has none."""
    if plan.shape is not None:
        return WordVocabulary(plan.shape.vocab_size)
    assert plan.model is not None
    folder = Path(plan.model)
    # transformers takes a folder that does not exist for a name it is to download.
    if (folder.is_absolute() or folder.exists()) and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"there is no {folder / 'config.json'}")
    return ModelVocabulary(plan.model)


def _staff(
    plan: Plan, conversations: Sequence[Conversation], arguments: argparse.Namespace
) -> Plan:
    """``plan`` with the clients that are asked for, or as many as ``conversations`` keep busy.

    Raises ValueError.
    """
    active = arguments.max_active_conversations or min(plan.active, len(conversations))
    clients = arguments.num_clients or min(plan.clients, active)
    if not clients <= active <= len(conversations):
        raise ValueError(
            f"{clients} clients, {active} active conversations, {len(conversations)} "
            "conversations: none of the first may be more than the next"
        )
    return replace(plan, active=active, clients=clients)
