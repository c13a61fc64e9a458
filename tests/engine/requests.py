"""An engine's arguments, its requests and its answers, in vLLM's types."""

import gc
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from tests.engine.spec import Answer, EngineSpec

AnyArgs = TypeVar("AnyArgs", bound=EngineArgs)


def engine_args(spec: EngineSpec, kind: type[AnyArgs]) -> AnyArgs:
    """``spec`` as the arguments of an engine of that kind."""
    transfer = None
    if spec.connector is not None:
        transfer = KVTransferConfig(
            **{
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_module_path": "simple_offload",
                "kv_role": "kv_both",
                "kv_connector_extra_config": spec.connector,
                **spec.transfer_arguments,
            }
        )
    return kind(model=str(spec.model), kv_transfer_config=transfer, **spec.arguments)


def prompt_of(tokens: tuple[int, ...], cache_salt: str | None = None) -> TokensPrompt:
    """A prompt of these token ids."""
    prompt = TokensPrompt(prompt_token_ids=list(tokens))
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    """Sampling parameters: always the best token, with the logprobs of the two best. ``others``
    override them."""
    usual: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 2,
        "detokenize": False,
    }
    if others.get("n", 1) > 1:
        usual["output_kind"] = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**usual | others)


def answer_of(output: RequestOutput) -> Answer:
    """The answer so far; several completions of one prompt are concatenated."""
    tokens = [token for completion in output.outputs for token in completion.token_ids]
    logprobs = [
        {token: entry.logprob for token, entry in (at or {}).items()}
        for completion in output.outputs
        for at in completion.logprobs or ()
    ]
    ranked = [sorted(at.values(), reverse=True) for at in logprobs]
    return Answer(
        tokens=tokens,
        logprobs=[at[token] for at, token in zip(logprobs, tokens, strict=True)],
        leads=[best - second for best, second, *_ in ranked],
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def clean_up_process() -> None:
    """Remove the state that an engine leaves in its process, so that another can start."""
    gc.collect()
    ensure_kv_transfer_shutdown()  # a start that failed half-way leaves its connector
    cleanup_dist_env_and_memory()
