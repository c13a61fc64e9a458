"""Why no load is synchronous in vLLM's sense, where the request runs in the step that starts its
load: vLLM's scheduler mishandles such a load that fails. If this test fails with another vLLM, such
loads may have become possible (docs/architecture.md, "Copies").
"""

from typing import Any

from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.simulation.remote import RemoteConnector
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_kv_cache_config, make_vllm_config

LOADED, PROMPT = 32, 40
FROM_WRONG_BYTES = 8
"""The model's token after blocks that were not loaded."""


class SynchronousConnector(RemoteConnector):
    """Offers the first tokens of every prompt, loaded within the step."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return max(0, LOADED - num_computed_tokens), False


def make_scheduler(shape: Shape) -> AsyncScheduler:
    """vLLM's scheduler with that connector. It schedules one step ahead."""
    config = make_vllm_config(
        shape,
        KVTransferConfig(
            kv_connector="SynchronousConnector",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
    )
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=generate_scheduler_kv_cache_config([make_kv_cache_config(shape)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=shape.scheduler_block_size,
        hash_block_size=shape.hash_size,
        log_stats=False,
    )


def output_of(step: SchedulerOutput, token: int, invalid_blocks: set[int]) -> ModelRunnerOutput:
    """The worker's output for a step of one request."""
    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[token]],
        kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid_blocks),
    )


def test_vllm_accepts_a_token_from_wrong_bytes_when_a_synchronous_load_fails() -> None:
    """The next step is scheduled on top of the failed one. vLLM 0.32 discards the failed step's
    token. It accepts the next step's token as the request's first one."""
    shape = Shape(async_scheduling=True)
    scheduler: Any = make_scheduler(shape)
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(PROMPT)),
        sampling_params=SamplingParams(max_tokens=5, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(shape.hash_size, sha256),
    )
    scheduler.add_request(request)
    failed, on_top = scheduler.schedule(), scheduler.schedule()
    assert failed.num_scheduled_tokens == {"r": PROMPT - LOADED}
    assert on_top.num_scheduled_tokens == {"r": 1}
    first_block = scheduler.kv_cache_manager.get_block_ids("r")[0][0]

    scheduler.update_from_output(failed, output_of(failed, FROM_WRONG_BYTES - 1, {first_block}))
    assert list(request.output_token_ids) == []
    assert request.num_computed_tokens == 0
    scheduler.update_from_output(on_top, output_of(on_top, FROM_WRONG_BYTES, set()))
    assert list(request.output_token_ids) == [FROM_WRONG_BYTES]
    scheduler.shutdown()
