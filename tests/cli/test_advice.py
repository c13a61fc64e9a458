"""Advice: a rule, a sentence."""

from typing import Any

import pytest

from simple_offload.cli.advice import advise
from simple_offload.cli.scrape import Scrape

GIB = 2**30
FITS = {0.0: 0.4, 0.25: 0.5, 0.5: 0.6, 1.0: 0.7, 2.0: 0.71, 4.0: 0.72, 8.0: 0.72}
"""Ratios by multiple of the host memory."""


def server(
    *,
    missed: dict[str, float] | None = None,
    ratios: dict[float, float] = FITS,
    failures: dict[str, float] | None = None,
    used: float = 1000,
    capacity: float = 1000,
    same: dict[str, float] | None = None,
    prompts: float = 1000,
) -> Scrape:
    """One with 64 GiB, and ten prompts of ``prompts`` tokens in all. ``same``: prompts by bucket of
    unseen_from_tokens, cumulated."""
    missed = missed or {"unseen": 300 * prompts / 1000}
    counters = {
        ("prompt_tokens_total", "source", "compute"): sum(missed.values()),
        ("prompt_tokens_total", "source", "host"): prompts - sum(missed.values()),
        ("lookups_total", "result", "hit"): 6,
        ("lookups_total", "result", "miss"): 4,
    }
    counters |= {("missed_tokens_total", "reason", key): num for key, num in missed.items()}
    for reason, num in (failures or {}).items():
        counters["failed_transfers_total", "reason", reason] = num
    for le, num in (same or {}).items():
        counters["unseen_from_tokens_bucket", "le", le] = num
    gauges = {
        ("capacity_blocks", "engine", "0"): capacity,
        ("used_blocks", "engine", "0"): used,
        ("host_memory_bytes", "engine", "0"): 64 * GIB,
    }
    gauges |= {
        ("predicted_hit_ratio", "host_memory", f"{times:g}x"): ratio
        for times, ratio in ratios.items()
    }

    def samples(values: dict[tuple[str, str, str], float]) -> dict[Any, float]:
        return {
            (f"vllm:simple_offload_{name}", frozenset({("engine", "0"), (label, value)})): num
            for (name, label, value), num in values.items()
        }

    return Scrape(samples(counters), samples(gauges))


def ratios(*values: float) -> dict[float, float]:
    return dict(zip(FITS, values, strict=True))


def test_a_server_that_fits() -> None:
    assert advise(server()).startswith("The host memory fits")
    none = server(prompts=0, missed={"unseen": 0})
    assert advise(none) == "No prompts yet."
    assert advise(server(), none) == "No prompts in the last hour."


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("below_threshold", "store_threshold"),
        ("boundary", "state or window"),
        ("no_room", "--max-num-seqs"),
        ("not_asked", "streaming session"),
        ("not_stored", "left the device before their store"),
        ("other_key", "cache_salt"),
        ("overload", "were bypassed"),
        ("prompt_end", "shorter than a block"),
        ("reset", "keep_on_device_reset"),
        ("wish", "requests wished so"),
    ],
)
def test_tokens_that_could_have_been_found(reason: str, words: str) -> None:
    """From 3% of the prompt tokens on, and the largest part first."""
    text = advise(server(missed={reason: 30, "unseen": 200}))
    assert text.startswith("3% of the prompt tokens ")
    assert words in text
    assert words not in advise(server(missed={reason: 29, "unseen": 200}))
    other = "wish" if reason != "wish" else "reset"
    assert words in advise(server(missed={other: 80, reason: 90}))
    assert words not in advise(server(missed={other: 90, reason: 80}))


def test_more_memory() -> None:
    more = ratios(0.1, 0.3, 0.4, 0.5, 0.59, 0.61, 0.62)
    wanted = "Host memory of 128 GiB (twice as much) would find 9 points more."
    assert advise(server(ratios=more)) == wanted
    assert advise(server(ratios=more, missed={"prompt_end": 80})) == wanted
    assert "shorter than a block" in advise(server(ratios=more, missed={"prompt_end": 95}))
    little = ratios(0.1, 0.3, 0.4, 0.5, 0.52, 0.525, 0.529)
    assert advise(server(ratios=little)).startswith("The host memory fits")


def test_memory_for_a_loop_that_does_not_fit() -> None:
    loop = ratios(0, 0, 0.05, 0.1, 0.14, 0.6, 0.61)
    text = advise(server(ratios=loop))
    assert text == "Host memory of 256 GiB (four times as much) would find 50 points more."


def test_more_memory_without_a_prediction() -> None:
    text = advise(server(ratios={}, missed={"evicted": 60, "unseen": 100}))
    assert text == "6% of the prompt tokens were evicted from host memory: more finds them."
    assert advise(server(ratios={})).startswith("Nothing yet")


@pytest.mark.parametrize(
    ("curve", "text"),
    [
        (ratios(0.4, 0.5, 0.7, 0.7, 0.7, 0.7, 0.7), "Half of the host memory (32 GiB) would"),
        (ratios(0.4, 0.695, 0.7, 0.7, 0.7, 0.7, 0.7), "A quarter of the host memory (16 GiB)"),
        (ratios(0.695, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7), "The device alone would find as much"),
    ],
)
def test_less_memory(curve: dict[float, float], text: str) -> None:
    assert advise(server(ratios=curve)).startswith(text)


def test_a_tier_that_is_half_empty() -> None:
    """It says nothing yet of what half of it would find."""
    half = ratios(0.4, 0.5, 0.7, 0.7, 0.7, 0.7, 0.7)
    text = advise(server(ratios=half, used=499))
    assert text == "The tier is half empty: contents take 50% of 64 GiB."
    assert advise(server(ratios=half, used=500)).startswith("Half of the host memory")


def test_prompts_that_differ_early() -> None:
    """Not those that grow: they differ where the last one ended."""
    early = {"0.0": 1.0, "16.0": 1.0, "64.0": 2.0, "256.0": 9.0, "1024.0": 10.0, "+Inf": 10.0}
    text = advise(server(same=early, prompts=1e5))
    assert text.startswith("Most prompts differ after about 146 tokens: ")
    assert advise(server(same=early, prompts=2e3)).startswith("The host memory fits")
    few = {"unseen": 10e3, "evicted": 11e3}
    assert advise(server(same=early, prompts=1e5, missed=few)).startswith("The host memory fits")
    none = {"0.0": 6.0, "16.0": 10.0, "+Inf": 10.0}
    assert "from their first token on" in advise(server(same=none))
    fewer = {"0.0": 3.0, "16.0": 3.0, "+Inf": 3.0}  # of ten: most were hits, or parted late
    assert advise(server(same=fewer)).startswith("The host memory fits")


def test_faults_come_first() -> None:
    more = ratios(0.1, 0.3, 0.4, 0.5, 0.9, 0.9, 0.9)
    text = advise(server(ratios=more, missed={"load_failed": 10, "prompt_end": 100}))
    assert text.startswith("Loads fail: 1% of the prompt tokens")
    assert "128 GiB" in advise(server(ratios=more, missed={"load_failed": 9, "prompt_end": 100}))
    for reason in ("thread_died", "switched_off"):
        assert advise(server(failures={reason: 1})).startswith("A copy thread has died")
    assert advise(server(failures={"copy_error": 1})).startswith("The host memory fits")
    assert advise(server(capacity=0, used=0)) == "The host tier is not open yet."
