"""One run of the conversations on a vLLM engine, in a process of its own.

``python -m examples.demo.engine_run --plan JSON --model DIR [--connector] --results-fd N``.
The model is made first if ``DIR`` is not there yet. What happens is written to file descriptor
N, one JSON object a line: ``{"phase": ...}`` when the run enters a phase, ``{"answer": ...}``
for each answer. The engine's own log goes to the standard streams.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.plan import Plan
from examples.demo.results import Answer

if TYPE_CHECKING:
    from vllm import LLM

REQUEST_DEADLINE = 300
"""Seconds. An answer that takes longer is a hang: its stacks go to the log, and the run fails."""

Tell = Callable[[dict[str, Any]], None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--connector", action="store_true")
    parser.add_argument("--results-fd", type=int, required=True)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.results_fd, False)
    # So that the engine is shut down in order when the parent wants an end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    with os.fdopen(arguments.results_fd, "w", buffering=1) as results:

        def tell(event: dict[str, Any]) -> None:
            # A parent that is gone breaks this pipe, which ends an orphaned run.
            results.write(json.dumps(event) + "\n")

        run(
            Plan.from_json(json.loads(arguments.plan)),
            arguments.model,
            tell,
            connector=arguments.connector,
        )


def run(plan: Plan, model: Path, tell: Tell, *, connector: bool) -> None:
    """Serve every conversation of ``plan``, one request at a time; report to ``tell``."""
    if not model.exists():
        tell({"phase": "making the model"})
        _make_model(plan, model)
    tell({"phase": "starting the engine"})
    llm = _engine(plan, model, connector=connector)
    try:
        tell({"phase": "warming up"})
        _answer(llm, "warm-up", _warm_up_prompt(plan), 2)
        tell({"phase": "talking"})
        histories = plan.first_messages()
        for turn in range(plan.turns):
            for user, history in enumerate(histories):
                if turn > 0:
                    history.extend(plan.message(user, turn))
                measured = _answer(llm, f"{turn}-{user}", history, plan.answer_tokens)
                answer = Answer(user=user, turn=turn, **measured)
                history.extend(answer.tokens)
                tell({"answer": answer.to_json()})
        tell({"phase": "stopping"})
    finally:
        llm.llm_engine.engine_core.shutdown()


def _make_model(plan: Plan, directory: Path) -> None:
    from examples.random_model import save_random_model

    save_random_model(
        directory,
        "llama",
        vocab_size=plan.model.vocab_size,
        hidden_size=plan.model.hidden_size,
        num_layers=plan.model.num_layers,
        num_heads=plan.model.num_heads,
        num_kv_heads=plan.model.num_kv_heads,
        max_model_len=plan.max_model_len,
        seed=plan.seed,
    )


def _engine(plan: Plan, model: Path, *, connector: bool) -> "LLM":
    from vllm import LLM

    transfer: dict[str, Any] = {}
    if connector:
        transfer["kv_transfer_config"] = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_module_path": "simple_offload",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": plan.host_bytes},
        }
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=plan.block_size,
        num_gpu_blocks_override=plan.device_blocks,
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=max(plan.max_model_len, 2048),
        max_num_seqs=2,
        disable_log_stats=False,
        **transfer,
    )


def _warm_up_prompt(plan: Plan) -> list[int]:
    """A prompt no user says. It lets one-time costs fall due before anything is measured."""
    return [token % 2 + 1 for token in range(plan.first_message_tokens // 2)]


def _answer(llm: "LLM", request_id: str, prompt: list[int], length: int) -> dict[str, Any]:
    """Let the engine say ``length`` tokens; return what ``Answer`` wants to know of it."""
    from vllm import RequestOutput, SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0
    )
    before = _prompt_tokens_by_source(llm)
    faulthandler.dump_traceback_later(REQUEST_DEADLINE, exit=True)
    start = time.perf_counter()
    engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)
    ttft = None
    final: RequestOutput | None = None
    while final is None:
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if ttft is None and output.outputs[0].token_ids:
                ttft = time.perf_counter() - start
            if output.finished:
                final = output
    seconds = time.perf_counter() - start
    faulthandler.cancel_dump_traceback_later()
    after = _prompt_tokens_by_source(llm)

    said = final.outputs[0]
    assert said.logprobs is not None
    if said.finish_reason != "length" or len(said.token_ids) != length:
        raise RuntimeError(
            f"request {request_id} ended by {said.finish_reason} after "
            f"{len(said.token_ids)} of {length} tokens"
        )
    source = {name: after[name] - before[name] for name in after}
    return {
        "prompt_tokens": len(prompt),
        "from_device": source["local_cache_hit"],
        "from_host": source["external_kv_transfer"],
        "recomputed": source["local_compute"],
        "ttft": ttft,
        "seconds": seconds,
        "tokens": list(said.token_ids),
        "logprobs": [
            candidates[token].logprob
            for candidates, token in zip(said.logprobs, said.token_ids, strict=True)
            if candidates is not None
        ],
    }


def _prompt_tokens_by_source(llm: "LLM") -> dict[str, int]:
    """vLLM's running totals of prompt tokens, by where their KV came from."""
    from vllm.v1.metrics.reader import Counter

    return {
        metric.labels["source"]: metric.value
        for metric in llm.get_metrics()
        if isinstance(metric, Counter) and metric.name == "vllm:prompt_tokens_by_source"
    }


if __name__ == "__main__":
    main()
