"""Runs of the conversations, one after another, each on a vLLM engine in a process of its own.

Reports ``{"run": name, "phase": ...}`` when a run enters a phase, and ``{"run": name, "answer":
...}`` for each answer. The first run makes the model.
"""

import faulthandler
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from pydantic import TypeAdapter

from examples.bench.child import Event, Report, how_ended, run_child, without_collection
from examples.bench.connectors import Contender
from examples.bench.models import save_model
from examples.demo.plan import Plan
from examples.serve_bench.client import counted, counters

if TYPE_CHECKING:
    from vllm import LLM

REQUEST_DEADLINE = 300
"""Seconds. An answer that takes longer is a hang: its stacks go to the log, and the run fails."""


def run(arguments: dict[str, Any], report: Report) -> None:
    """Play the ``runs``: the name of each, and its contender."""
    # Imported once: the processes are forked.
    with without_collection():
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.models import llama  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401

    for name, contender in arguments["runs"].items():
        each = {**arguments, "contender": contender}

        def report_run(event: Event, name: str = name) -> None:
            report({"run": name, **event})

        process: Any = get_context("fork").Process(
            target=_play, args=(each, report_run), daemon=True
        )
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the run {name!r} ended: {how_ended(process.exitcode)}")


def _play(arguments: dict[str, Any], report: Report) -> None:
    """Serve every conversation of the plan, one request at a time."""
    plan = TypeAdapter(Plan).validate_python(arguments["plan"])
    contender = TypeAdapter(Contender).validate_python(arguments["contender"])
    model = Path(arguments["model"])
    if not model.exists():
        report({"phase": "making the model"})
        save_model(plan.model, plan.max_model_len, plan.seed, model)
    report({"phase": "starting the engine"})
    llm = _engine(plan, model, contender)
    try:
        report({"phase": "warming up"})
        # One-time costs fall due with a prompt of no user, before any measurement.
        _answer(llm, "warm-up", [1, 2] * (plan.first_message_tokens // 4), 2)
        report({"phase": "talking"})
        histories = plan.first_messages()
        for turn in range(plan.turns):
            for user, history in enumerate(histories):
                if turn > 0:
                    history.extend(plan.message(user, turn))
                answer = _answer(llm, f"{turn}-{user}", history, plan.answer_tokens)
                history.extend(answer["tokens"])
                report({"answer": {"user": user, "turn": turn, **answer}})
        report({"phase": "stopping"})
    finally:
        llm.llm_engine.engine_core.shutdown()


def _engine(plan: Plan, model: Path, contender: Contender) -> "LLM":
    from vllm import LLM

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
        kv_transfer_config=contender.transfer_config(plan.host_bytes),
    )


def _answer(llm: "LLM", name: str, prompt: list[int], length: int) -> dict[str, Any]:
    """Generate ``length`` tokens; return the fields of ``Answer`` but for user and turn."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0
    )
    before = _counters()
    faulthandler.dump_traceback_later(REQUEST_DEADLINE, exit=True)
    start = time.perf_counter()
    (final,) = llm.generate({"prompt_token_ids": list(prompt)}, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    faulthandler.cancel_dump_traceback_later()
    source = counted(before, _counters())

    completion = final.outputs[0]
    assert completion.logprobs is not None
    assert final.metrics is not None
    if completion.finish_reason != "length" or len(completion.token_ids) != length:
        raise RuntimeError(
            f"request {name} ended by {completion.finish_reason} after "
            f"{len(completion.token_ids)} of {length} tokens"
        )
    return {
        "prompt_tokens": len(prompt),
        "from_device": source["device_hit_tokens"],
        "from_host": source["external_hit_tokens"],
        "recomputed": source["computed_tokens"],
        "ttft": final.metrics.first_token_latency,
        "seconds": seconds,
        "tokens": list(completion.token_ids),
        "logprobs": [
            candidates[token].logprob
            for candidates, token in zip(completion.logprobs, completion.token_ids, strict=True)
            if candidates is not None
        ],
    }


def _counters() -> dict[str, float]:
    return counters(sample for family in REGISTRY.collect() for sample in family.samples)


if __name__ == "__main__":
    run_child(run)
