"""``python -m examples.demo``: conversations that outgrow the device's KV space, without and with
the host tier: turn by turn, the sources of each prompt's KV, and the time to its first token."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from examples.bench.arguments import BenchParser
from examples.bench.command import BAD_RESULT, exit_code_of, lines, print_lines, run_program
from examples.bench.connectors import CONTENDERS, NONE, OURS
from examples.bench.models import ModelShape
from examples.bench.results_file import NUMBERS, prepare_output
from examples.bench.tables import Row, make_table
from examples.serve_bench.bench import Bench
from examples.serve_bench.plan import CPU, Plan, generated
from examples.serve_bench.results import PLOT, save_plot, summaries

TALK = replace(CPU, transport="engine", clients=1, own_answers=True)
"""One request at a time. All users share the head of their first message, as they would share a
system prompt. The device has room for the longest conversation and an eighth."""
FULL = replace(
    TALK,
    shape=ModelShape(2048, 1024, num_layers=6, num_heads=16, num_kv_heads=4),
    device_tokens=4192,
    host_bytes=176 << 20,
    prompt_tokens=3712,
    settings=generated(4, messages=10, common=256, prefix=1344, question=448, answer=24),
)
"""Prompts whose prefill takes seconds on two cores."""
QUICK = replace(
    TALK,
    shape=ModelShape(512, 128, num_layers=3, num_heads=4, num_kv_heads=2),
    device_tokens=480,
    host_bytes=2 << 20,
    prompt_tokens=256,
    settings=generated(3, messages=6, common=64, prefix=191, question=64, answer=8),
)
"""Shows that everything works: no prefill takes long."""
ENVIRONMENT = {
    # The engine runs eagerly, yet vLLM compiles its helpers: that would take a C++ compiler, and
    # longer than the first prefill.
    "TORCHDYNAMO_DISABLE": "1",
    # A process fewer imports vLLM.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
Replies = Sequence[Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    parser = BenchParser(
        "demo",
        "Conversations over a small random model, whose KV does not fit the engine's KV space: "
        "without the connector every turn recomputes its history, with it the history comes back "
        "from host memory.",
    )
    text = "a tiny model, fewer users and turns: shows that it works, not that it pays"
    parser.add_argument("--quick", action="store_true", help=text)
    text = "put files behind host memory, and have the same conversations with another engine"
    parser.add_argument("--restart", action="store_true", help=text)
    arguments = parser.parse_args(argv)
    plan = (QUICK if arguments.quick else FULL).with_conversations()
    return exit_code_of(lambda: _run(plan, arguments.output, restart=arguments.restart))


def _run(plan: Plan, output: Path, *, restart: bool) -> int:
    prepare_output(output, NUMBERS, PLOT)
    console = Console()
    print_lines(
        console,
        f"{plan.active} users, one request at a time. Each conversation grows to "
        f"{plan.longest_conversation} tokens; the engine's KV space holds {plan.device_tokens}, "
        f"the host tier {plan.host_bytes >> 20} MiB.",
    )
    # "always": a small model computes sooner than a slow disk reads.
    ours = CONTENDERS["ours-files-always"] if restart else OURS
    contenders = [replace(each, environment=ENVIRONMENT) for each in (NONE, ours)]
    with tempfile.TemporaryDirectory(dir=output) as files:
        if restart:
            plan = replace(plan, workloads=("turns", "restart"), files=files)
        bench = Bench(plan, contenders, output)
        bench.run(lines())
    if bench.problems:
        print_lines(console, *bench.problems, style="bold red")
        return BAD_RESULT
    without, found, *again = (
        run["replies"] for contender in contenders for run in bench.runs[contender.name]
    )
    caption = "Means over users. TTFT: time to the first token.\n"
    caption += "Sources of the prompt's KV, with the connector."
    console.print(make_table(turns(without, found), left=0, caption=caption))
    print_lines(console, f"Plot: {save_plot(output, summaries(bench.runs))}")
    print_lines(console, f"Numbers: {output / NUMBERS}")
    verdict = (
        f"All {sum(each['answer_tokens'] for each in found)} tokens of {len(found)} answers are "
        f"the same; {sum(map(from_host, found)):.0f} prompt tokens came from host memory."
    )
    for replies in again:
        first, before = ([r for r in each if r["kind"] == "turn 1"] for each in (replies, found))
        verdict += (
            f"\nAfter the restart, the same tokens; {sum(map(from_host, first)):.0f} of the "
            f"{sum(each['prompt_tokens'] for each in first)} tokens of first messages came from "
            f"files. First token after {fmean(each['ttft'] for each in first):.2f} s, before "
            f"{fmean(each['ttft'] for each in before):.2f} s."
        )
    print_lines(console, verdict, style="bold green")
    return 0


def from_host(reply: Mapping[str, Any]) -> float:
    """Prompt tokens that the connector loaded."""
    return float(reply["sources"].get("external_hit_tokens", 0))


def turns(without: Replies, found: Replies) -> Iterator[Row]:
    """One line a turn: means over the users, tokens as counts and times in seconds."""
    for kind in dict.fromkeys(reply["kind"] for reply in found):
        mine = [reply for reply in found if reply["kind"] == kind]
        seconds = fmean(reply["ttft"] for reply in mine)
        before = fmean(reply["ttft"] for reply in without if reply["kind"] == kind)

        def source(name: str, mine: Replies = mine) -> str:
            return f"{fmean(reply['sources'].get(name, 0) for reply in mine):.0f}"

        yield {
            "turn": kind.removeprefix("turn "),
            "prompt\ntokens": f"{fmean(reply['prompt_tokens'] for reply in mine):.0f}",
            "from\ndevice": source("device_hit_tokens"),
            "from\nhost": source("external_hit_tokens"),
            "recomputed": source("computed_tokens"),
            "TTFT\nwithout": f"{before:.2f} s",
            "TTFT\nwith": f"{seconds:.2f} s",
            "speed-up": f"{before / seconds:.1f}x",
        }


if __name__ == "__main__":
    run_program(main)
