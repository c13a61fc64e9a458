"""Deep compressor states, which no kernel reads after a hit."""

import pytest
import torch
from vllm import _custom_ops as ops

from simple_offload.unread_groups import unread_groups
from tests.simulation.real_models import REAL_MODELS, place_groups, plan_groups
from tests.simulation.real_shape import real_config

RATIO, HEAD_SIZE, HIT = 128, 512, 256
"""Of DeepSeek-V4's deep compressors, and tokens of the hit, a multiple of its block size."""


@pytest.mark.parametrize("name", REAL_MODELS)
def test_only_the_deep_compressors(name: str) -> None:
    model = REAL_MODELS[name]
    config = real_config(model)
    placed = place_groups(plan_groups(model, config), config, 1000)
    expected = {5} if name == "DeepSeek-V4" else set()
    assert unread_groups(config, placed, model.block_size) == expected
    # A hit that may end inside an entry's tokens would need their states.
    assert unread_groups(config, placed, RATIO // 2) == set()


@pytest.mark.skipif(
    not hasattr(torch.ops._C, "compress_norm_rope_store_cpu"), reason="not in this build of vLLM"
)
@pytest.mark.parametrize("hit", [HIT, pytest.param(HIT - RATIO // 2, id="inside an entry")])
def test_vllms_kernel_reads_no_states_before_the_hit(hit: int) -> None:
    """The one of vLLM's CPU build; those of GPUs have the same condition."""
    assert torch.equal(_entries_after(hit, 0.0), _entries_after(hit, 7.0)) == (hit % RATIO == 0)


def _entries_after(hit: int, before: float) -> torch.Tensor:
    """Entries that the kernel makes of the tokens after ``hit``. ``before``: the states of earlier
    tokens."""
    torch.manual_seed(0)
    positions = torch.arange(hit, hit + HIT)
    states = torch.full((2 * HIT // 8, 8, 2 * HEAD_SIZE), before)
    values, scores = torch.randn(HIT, HEAD_SIZE), torch.randn(HIT, HEAD_SIZE)
    ops.save_partial_states_cpu(
        values, scores, torch.randn(RATIO, HEAD_SIZE), positions, states, positions
    )
    entries = torch.zeros(1, 64 * 584, dtype=torch.uint8)
    ops.compress_norm_rope_store_cpu(
        states,
        positions[:, None] - RATIO + 1 + torch.arange(RATIO),
        positions,
        positions // RATIO,
        torch.ones(HEAD_SIZE),
        1e-6,
        torch.randn(2 * HIT, 64),
        entries,
        64,
        RATIO,
    )
    assert entries.any()
    return entries
