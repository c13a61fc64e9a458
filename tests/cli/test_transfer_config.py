"""doctor's --config: accepted forms, and messages about wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli.checks import Check, Status
from simple_offload.cli.transfer_config import check_transfer_config, read_transfer_config
from simple_offload.config import ConfigError
from simple_offload.ranks import Ranks

WHOLE: dict[str, Any] = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_connector_module_path": "simple_offload",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB"},
}


def problems(config: Any) -> list[Check]:
    checks, _ = check_transfer_config(read_transfer_config(json.dumps(config)), Ranks(1, 1))
    return [check for check in checks if check.status is not Status.OK]


def test_the_readme_s_configuration_is_ok(tmp_path: Path) -> None:
    file = tmp_path / "transfer.json"
    file.write_text(json.dumps(WHOLE))
    given = read_transfer_config(json.dumps(WHOLE))
    assert read_transfer_config(str(file)) == given
    assert given.whole == WHOLE
    assert problems(WHOLE) == []


ON_TWO_NODES = Ranks(16, 8, num_local=8)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("extra", "ranks", "found"),
    [
        (
            {"cpu_bytes_to_use": "1GiB"},
            Ranks(2, 2),
            "512 MiB on each of 2 ranks; those of a NUMA node that have the same KV share it",
        ),
        (
            {"cpu_bytes_to_use": "1GiB", "host_copies": "one"},
            Ranks(2, 2),
            "512 MiB on each of 2 ranks; those of a machine that have the same KV share it",
        ),
        (
            {"cpu_bytes_to_use": "80%", "host_copies": "private"},
            ON_TWO_NODES,
            "10 GiB on each of 16 ranks, 8 ranks on this machine; none shares it",
        ),
        ({"num_cpu_blocks": 64}, Ranks(1, 1), "64 host blocks on each of 1 ranks"),
    ],
)
def test_what_each_rank_has(extra: dict[str, Any], ranks: Ranks, found: str) -> None:
    given = read_transfer_config(json.dumps(extra))
    (check,), config = check_transfer_config(given, ranks)
    assert (given.whole, check.status, check.found) == (None, Status.OK, found)
    assert config is not None


def test_ignored_keys() -> None:
    (ignored,) = problems({"num_cpu_blocks": 64, "enable_cross_layers_blocks": "true"})
    assert (ignored.status, ignored.found) == (Status.WARNING, "enable_cross_layers_blocks")


MULTI = WHOLE | {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, WHOLE]},
}


def test_the_entry_of_a_multi_connector() -> None:
    assert read_transfer_config(json.dumps(MULTI)).extra == {"cpu_bytes_to_use": "1GiB"}
    (check,) = problems(MULTI)
    assert (check.name, check.status, check.found) == ("kv_layout", Status.WARNING, "'auto'")
    extra = {"cpu_bytes_to_use": "1GiB", "kv_layout": "keep"}
    kept = {"connectors": [WHOLE | {"kv_connector_extra_config": extra}]}
    assert problems(MULTI | {"kv_connector_extra_config": kept}) == []
    (check, *_) = problems(MULTI | {"kv_connector_extra_config": {"connectors": 5}})
    assert (check.name, check.status) == ("kv_connector", Status.ERROR)


@pytest.mark.parametrize(
    ("key", "value", "status", "advice"),
    [
        ("kv_connector", "Simple", Status.ERROR, "'SimpleCPUOffloadConnector'"),
        ("kv_connector_module_path", None, Status.ERROR, "its built-in connector"),
        ("kv_role", "both", Status.ERROR, "Allowed: 'kv_both'"),
        ("kv_load_failure_policy", "fail", Status.WARNING, "'recompute'"),
        ("kv_connector_extra_config", {"cpu_bytes": 1}, Status.ERROR, "'cpu_bytes_to_use'?"),
    ],
)
def test_wrong_values_are_named(key: str, value: object, status: Status, advice: str) -> None:
    (check,) = problems({**WHOLE, key: value})
    name = "configuration" if key == "kv_connector_extra_config" else key
    assert (check.name, check.status) == (name, status)
    assert advice in check.advice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--config: not JSON"),
        ("nowhere.json", "--config='nowhere.json': No such file"),
        ("list.json", "not a JSON object but list"),
        ("latin-1.json", "--config='latin-1.json': not JSON"),
        ('{"kv_role": 1, "kv_connector_extra_config": [1]}', "extra_config=[1]: not a JSON object"),
        (json.dumps(MULTI | {"kv_connector_extra_config": "{}"}), "='{}': not a JSON object"),
    ],
)
def test_no_configuration(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "latin-1.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(ConfigError) as error:
        read_transfer_config(text)
    assert message in str(error.value)
