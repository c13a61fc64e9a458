"""What tiers hold and what a hit saves: by hand-made figures, and by the command."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli.arguments import CommandError
from simple_offload.cli.kv_shape import kv_shape
from simple_offload.cli.main import main
from simple_offload.cli.plan import (
    GIB,
    Server,
    device_kv_bytes,
    measured_bandwidth,
    tiers,
    times,
    weight_bytes,
)
from tests.cli.models import GPT_OSS_20B, LLAMA_8B

LLAMA = kv_shape(LLAMA_8B, tensor_parallel=1, kv_dtype="auto")
GPT_OSS = kv_shape(GPT_OSS_20B, tensor_parallel=1, kv_dtype="auto")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_tiers_of_one_kind_of_layers() -> None:
    # 2 MiB a block of 16 tokens; each pool's first block is vLLM's null block.
    device, host = tiers(LLAMA, Server(1, 10 * GIB, 40 * GIB, 16), 1024)
    assert (device.blocks, device.tokens, device.conversations) == (5119, 5119 * 16, 79)
    assert (host.blocks, host.tokens, host.conversations) == (20479, 20479 * 16, 319)


def test_ranks_share_the_host_tier() -> None:
    per_rank = kv_shape(LLAMA_8B, tensor_parallel=4, kv_dtype="auto")
    device, host = tiers(per_rank, Server(4, 10 * GIB, 40 * GIB, 16), 1024)
    assert device.bytes_per_rank == host.bytes_per_rank == 10 * GIB
    assert (host.blocks, host.tokens) == (20479, 20479 * 16)


def test_windows_keep_less_on_the_device() -> None:
    # Blocks of 12 layers: 12 x 2 KiB x 16 tokens. 4096 tokens: 256 full blocks and 8 of the window.
    device, host = tiers(GPT_OSS, Server(1, 1001 * 384 << 10, 1001 * 384 << 10, 16), 4096)
    assert (device.blocks, device.conversations) == (1000, 1000 // 264)
    assert (host.blocks, host.conversations, host.tokens) == (1000, 1000 // 512, 8000)


def test_times_of_a_hit() -> None:
    expected = times(LLAMA, 16, 8192, 50e9, 0.015, 32768.0)
    assert expected.hit_bytes_per_rank == GIB
    assert expected.load == pytest.approx(GIB / 50e9)
    assert expected.hit == pytest.approx(GIB / 50e9 + 0.015)
    assert expected.recompute == pytest.approx(0.25)
    assert times(LLAMA, 16, 8192, 50e9, 0.015, None).recompute is None


def test_memory_left_for_kv() -> None:
    assert device_kv_bytes(80 * GIB, 0.9, 32 * GIB, 2, 4 * GIB) == (72 - 16 - 4) * GIB
    with pytest.raises(CommandError, match=r"--gpu-memory=.*do not hold 80\.0 GiB of weights"):
        device_kv_bytes(80 * GIB, 0.9, 80 * GIB, 1, 4 * GIB)


def test_weights_by_index_or_files(model: Path) -> None:
    assert weight_bytes(model) is None
    (model / "a.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert weight_bytes(model) == weight_bytes(model / "config.json") == 10
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 77}}')
    assert weight_bytes(model) == 77


def _results(folder: Path, rows: Any) -> Path:
    file = folder / "result.json"
    file.write_text(json.dumps({"rows": rows}))
    return file


def _row(way: str, num_bytes: int, rate: float) -> dict[str, Any]:
    return {"way": way, "size": num_bytes, "contenders": {"auto": {"gb_per_s": rate}}}


def test_measured_bandwidth_is_that_of_loads_of_the_size(tmp_path: Path) -> None:
    rows = [_row("load", 65536, 44.0), _row("load", 2 << 20, 53.0), _row("store", 2 << 20, 99.0)]
    file = _results(tmp_path, rows)
    assert measured_bandwidth(file, 2 << 20) == 53e9
    assert measured_bandwidth(file, 8 << 20) == 53e9
    assert measured_bandwidth(file, (2 << 20) - 1) == 44e9
    with pytest.raises(CommandError, match="as small as 4096 bytes"):
        measured_bandwidth(file, 4096)


def test_the_copy_benchmark_s_own_json_is_understood(tmp_path: Path) -> None:
    from examples.copy_bench.plan import Plan, Way
    from examples.copy_bench.results import Cell, Results, Row

    cell = Cell(num_bytes=2 << 30, seconds=0.05, repeats=3, fault=None)
    results = Results(Plan(), {}, rows=[Row(Way.LOAD, 2 << 20, 512, {"auto": cell})])
    file = tmp_path / "result.json"
    file.write_text(json.dumps(results.to_json()))
    assert measured_bandwidth(file, 2 << 20) == pytest.approx((2 << 30) / 0.05)


@pytest.mark.parametrize("text", ["{", '{"rows": [{}]}', "{}", "[]"])
def test_another_file_is_not_measured_bandwidth(tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(CommandError, match="not what `simple-offload bench copy` writes"):
        measured_bandwidth(file, 4096)


def test_json_has_what_the_table_has(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", str(model), "--gpu-kv-memory", "10GiB", "--host-memory", "40GiB"]
    asked += ["--conversation", "1024", "--bandwidth", "53", "--prefill-speed", "38000"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["token_bytes_per_rank"] == 128 << 10
    assert [tier["conversations"] for tier in told["tiers"]] == [79, 319]
    assert told["ttft_seconds"]["recompute"] == pytest.approx(1024 / 38000)
    assert main(asked) == 0
    text = capsys.readouterr().out
    for part in ("131072 bytes a token", "2 MiB a block", "319", "53.0 GB/s", "Recomputed: 26.9"):
        assert part in text
    assert "\x1b" not in text


def test_the_model_s_files_give_the_weights(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", str(model), "--gpu-memory", "80GiB", "--host-memory", "1GiB", "--json"]
    assert main(asked) == 2
    assert "--weights is missing" in capsys.readouterr().err
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 16 * GIB}})
    )
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["server"]["device_kv_bytes"] == 52 * GIB
    assert told["ttft_seconds"] is None


def test_input_that_contradicts_itself(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model), "--host-memory", "1GiB"]) == 2
    assert "--gpu-memory is missing. Allowed: that, or --gpu-kv-memory" in capsys.readouterr().err
    assert main(["plan", str(model / "no"), "--host-memory", "1GiB"]) == 2
    assert "Allowed: a model's folder, or its config.json" in capsys.readouterr().err
