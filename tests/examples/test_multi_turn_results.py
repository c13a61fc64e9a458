"""The numbers, tables and plots of the multi-turn benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("prometheus_client")

from prometheus_client.samples import Sample
from rich.console import Console

from examples.multi_turn.bench import counters
from examples.multi_turn.client import Reply
from examples.multi_turn.results import save_plots, summaries, summary_table, turn_table


def reply(turn: int, ttft: float, latency: float = 2.0, tokens: int = 11) -> Reply:
    return Reply("c", turn, 100 * (turn + 1), tokens, 0, ttft, latency, "")


def one_round(
    number: int, replies: Sequence[Reply], seconds: float = 4.0, **counted: float
) -> Mapping[str, Any]:
    sources = {"computed_tokens": 1.0, "device_hit_tokens": 2.0, "external_hit_tokens": 3.0}
    return {
        "round": number,
        "seconds": seconds,
        "lost": [],
        "counters": {**sources, **counted},
        "replies": [asdict(each) for each in replies],
    }


def test_numbers_of_a_round() -> None:
    replies = [reply(0, 1.0), reply(0, 1.5), reply(1, 0.2, 1.2), reply(1, 0.4, 0.4, tokens=1)]
    (summary,) = summaries({"ours": [one_round(1, replies)]}, 1000).values()
    numbers = summary.numbers
    assert numbers["requests"] == 4
    assert numbers["requests_per_second"] == 1
    assert numbers["answer_tokens_per_second"] == 34 / 4
    assert numbers["tokens_per_second"] == (34 + 600) / 4
    assert numbers["ttft_mean"] == pytest.approx(3.1 / 4)
    assert numbers["ttft_p99"] == 1.5
    assert numbers["later_ttft_mean"] == pytest.approx(0.3)
    assert numbers["tpot_mean"] == pytest.approx((0.1 + 0.05 + 0.1) / 3), "one token has no gap"
    assert numbers["external_hit_tokens"] == 3
    assert summary.by_turn[0].mean == 1.25
    assert (summary.by_turn[1].p50, summary.by_turn[1].p99) == (0.4, 0.4)


def test_bytes_are_the_connectors_or_computed() -> None:
    def loaded(bytes_per_token: int | None, **counted: float) -> float | None:
        run = {"ours": [one_round(1, [reply(0, 1.0)], **counted)]}
        return summaries(run, bytes_per_token)["ours"].numbers.get("loaded_bytes")

    assert loaded(1000, loaded_bytes=7.0) == 7
    assert loaded(1000) == 3000
    assert loaded(None) is None
    assert loaded(1000, external_hit_tokens=0.0) is None
    assert summaries({"none": [], "ours": [one_round(1, [])]}, None) == {}


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, labels, value, None, None)


def test_counters() -> None:
    samples = [
        sample("vllm:prompt_tokens_by_source_total", 5, source="local_compute", engine="0"),
        sample("vllm:prompt_tokens_by_source_total", 6, source="local_compute", engine="1"),
        sample("vllm:prompt_tokens_by_source_total", 7, source="external_kv_transfer"),
        sample("vllm:prompt_tokens_by_source_total", 9, source="something_new"),
        sample("vllm:kv_offload_load_bytes_total", 100),
        sample("vllm:kv_offload_store_bytes_total", 200, engine="0"),
        sample("vllm:kv_offload_store_bytes_total", 300, engine="1"),
        sample("vllm:kv_offload_store_bytes_created", 1e9),
        sample("vllm:simple_offload_bytes_total", 30, direction="load", path="dma"),
        sample("vllm:simple_offload_bytes_total", 4, direction="load", path="kernel"),
        sample("vllm:simple_offload_bytes_total", 1, direction="store", path="dma"),
        sample("vllm:other_total", 1),
    ]
    assert counters(samples) == {
        "computed_tokens": 11,
        "device_hit_tokens": 0,
        "external_hit_tokens": 7,
        "loaded_bytes": 134,
        "stored_bytes": 501,
    }


def test_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_contender = summaries(
        {
            "none": [one_round(1, [reply(0, 1.0), reply(1, 0.8)], external_hit_tokens=0.0)],
            "ours": [one_round(1, [reply(0, 1.0), reply(1, 0.2)], seconds=2.0)],
        },
        1000_000_000,
    )
    console = Console(width=80)
    console.print(turn_table(by_contender), summary_table(by_contender, "Title"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "none", "800", "800", "800", "800"] in lines
    assert ["ours", "200", "200", "200", "200"] in lines
    assert ["requests/s", "0.50", "1.00", "(2.00x)"] in lines
    assert ["TTFT,", "mean,", "ms", "900", "600", "(0.67x)"] in lines
    assert ["loaded,", "GB", "-", "3.00"] in lines
    assert ["stored,", "GB", "-", "-"] in lines
    assert ["requests", "done", "2", "2"] in lines
    plots = save_plots(tmp_path, by_contender, "Title")
    assert [path.name for path in plots] == ["ttft_by_turn.png", "throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
