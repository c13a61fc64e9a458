"""Namespaces are equal where KV may be shared, and differ with whatever decides its bytes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import vllm
from huggingface_hub import snapshot_download
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file
from transformers import LlamaConfig, PreTrainedConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.multimodal import MultiModalConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from simple_offload.config import ConfigError
from simple_offload.second_tier import namespace
from tests.worker.kv_memory import full, group, mixed_group, window

ROW = {"block_bytes": 4096, "backends": ["FLASH_ATTN"]}
GROUPS = [group(full(block_size=16), "0", "1"), group(window(block_size=16), "2", "3")]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 256,
}
MISSING = r'weights .* Set "cache_namespace" in second_tier .*"cache_namespace": "'

Change = Callable[[VllmConfig], None]


def write_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A model whose weights are random numbers in two files of 2 MiB. Its values fill the files."""
    common = dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaConfig(**(common | config)).save_pretrained(folder)
    random = np.random.default_rng(seed)
    for part in ("1", "2"):
        weights = random.random((512, 1024), dtype=np.float32)
        save_file({"weight": weights}, folder / f"model-{part}.safetensors")
    return folder


def make_config(
    folder: Path,
    drafter: Path | None = None,
    load: dict[str, Any] | None = None,
    **model: Any,
) -> VllmConfig:
    arguments: dict[str, Any] = dict(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=512
    )
    model_config = ModelConfig(**(arguments | model))
    speculative_config = None
    if drafter is not None:
        speculative_config = SpeculativeConfig(
            method="draft_model",
            model=str(drafter),
            num_speculative_tokens=2,
            target_model_config=model_config,
            target_parallel_config=ParallelConfig(),
        )
    return VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=16, prefix_match_unit=16, enable_prefix_caching=True),
        load_config=LoadConfig(**(load or {})),
        speculative_config=speculative_config,
    )


def describe(
    config: VllmConfig,
    groups: list[KVCacheGroupSpec] = GROUPS,
    row: object = ROW,
    name: str | None = None,
) -> dict[str, Any]:
    return namespace.describe(config, KVCacheConfig(4, [], groups), row=row, name=name)


def digest(config: VllmConfig, **more: Any) -> str:
    return namespace.digest(describe(config, **more))


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("drafter"), seed=1)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same model elsewhere."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


# Equal


def test_it_is_json_and_the_digest_is_short(folder: Path, drafter: Path) -> None:
    described = describe(make_config(folder, drafter))
    assert json.loads(json.dumps(described)) == described
    assert len(namespace.digest(described)) == 32
    assert int(namespace.digest(described), 16) > 0
    assert str(folder) not in json.dumps(described)
    assert namespace.digest(dict(reversed(described.items()))) == namespace.digest(described)


def test_a_copy_elsewhere_is_the_same_in_another_process(folder: Path, copy: Path) -> None:
    """Its files were written in another order, and so are the fields of its configuration."""
    for path in sorted(copy.glob("*.safetensors")):
        contents = path.read_bytes()
        path.unlink()
        path.write_bytes(contents)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    (copy / "README.md").write_text("A copy")
    code = (
        "import gc, sys; from pathlib import Path; gc.disable(); "
        "from tests.second_tier.test_namespace import digest, make_config; "
        "print('digest', digest(make_config(Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert f"digest {digest(make_config(folder))}" in done.stdout


def _other_engine(config: VllmConfig) -> None:
    config.instance_id = "other"
    config.parallel_config.data_parallel_size = 8
    config.parallel_config.data_parallel_rank = 3
    config.cache_config.num_gpu_blocks = 1234
    config.cache_config.gpu_memory_utilization = 0.5
    config.scheduler_config.max_num_seqs = 7
    config.model_config.max_model_len = 100
    config.model_config.served_model_name = "other"
    config.model_config.tokenizer = "other"
    config.model_config.seed = 5


def test_engines_may_differ_in_what_does_not_touch_kv(folder: Path) -> None:
    config = make_config(folder)
    expected = digest(config)
    _other_engine(config)
    assert digest(config) == expected


# Different


def _set(path: str, value: object) -> Change:
    """Set a field of a configuration, by dotted path."""

    def change(config: VllmConfig) -> None:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        assert getattr(target, name) != value
        setattr(target, name, value)

    return change


DIFFERENT_CONFIG = {
    "algorithm": _set("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "block size of hashes": _set("cache_config.prefix_match_unit", 8),
    "cache dtype": _set("cache_config.cache_dtype", "fp8"),
    "quantization": _set("model_config.quantization", "fp8"),
    "quantization options": _set("model_config.quantization_config", {"ignore": ["lm_head"]}),
    "code revision": _set("model_config.code_revision", "other"),
    "implementation": _set("model_config._architecture", "TransformersForCausalLM"),
    "class": _set("model_config.model_class_overrides", {"LlamaForCausalLM": "other:Llama"}),
    "multimodal": _set("model_config.multimodal_config", MultiModalConfig()),
    "indexer dtype": _set("attention_config.indexer_kv_dtype", "fp8"),
    "non-causal": _set("attention_config.use_non_causal", True),
    "rounding of states": _set("mamba_config.enable_stochastic_rounding", True),
    "tensor parallel": _set("parallel_config.tensor_parallel_size", 2),
    "pipeline": _set("parallel_config.pipeline_parallel_size", 2),
    "decode context parallel": _set("parallel_config.decode_context_parallel_size", 2),
    "prefill context parallel": _set("parallel_config.prefill_context_parallel_size", 2),
    "interleave": _set("parallel_config.cp_kv_cache_interleave_size", 16),
    "platform": _set("additional_config", {"enable_kv_nz": True}),
}


@pytest.mark.parametrize("change", DIFFERENT_CONFIG.values(), ids=DIFFERENT_CONFIG)
def test_settings_differ(folder: Path, change: Change) -> None:
    config = make_config(folder)
    before = digest(config)
    change(config)
    assert digest(config) != before


def _other_epsilon(config: PreTrainedConfig) -> PreTrainedConfig:
    config.rms_norm_eps = 0.5
    return config


@pytest.mark.parametrize(
    ("model", "other"),
    [
        ({"dtype": "bfloat16"}, {}),
        ({"hf_overrides": {"rms_norm_eps": 0.5}}, {}),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, {}),
        ({"hf_overrides": _other_epsilon}, {}),
        ({"hf_overrides": {"architectures": ["MistralForCausalLM"]}}, {}),
        ({"hf_overrides": {"kinds": ["a", "b"]}}, {"hf_overrides": {"kinds": ["b", "b"]}}),
    ],
    ids=["dtype", "overrides", "rope", "function", "architecture", "lists"],
)
def test_models_differ(folder: Path, model: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(make_config(folder, **model)) != digest(make_config(folder, **other))


MLA: dict[str, Any] = dict(block_size=16, num_kv_heads=1, head_size=8, dtype="float16")
FULL, WINDOW = GROUPS
DIFFERENT_GROUPS = {
    "block size": [group(full(block_size=32), "0", "1"), WINDOW],
    "heads": [group(full(num_heads=1, block_size=16), "0", "1"), WINDOW],
    "window": [FULL, group(replace(cast(Any, WINDOW.kv_cache_spec), sliding_window=64), "2", "3")],
    "kind": [FULL, group(full(block_size=16), "2", "3")],
    "latents": [FULL, group(MLAAttentionSpec(**MLA), "2", "3")],
    "hidden states": [FULL, group(HiddenStateCacheSpec(**MLA), "2", "3")],
    "order of groups": [WINDOW, FULL],
    "order of layers": [group(FULL.kv_cache_spec, "1", "0"), WINDOW],
    "names of layers": [group(FULL.kv_cache_spec, "0", "4"), WINDOW],
    "one group": [FULL],
    "drafter's": [FULL, replace(WINDOW, is_eagle_group=True)],
    "a spec per layer": [mixed_group({"0": full(block_size=16), "1": full(block_size=16)}), WINDOW],
    "its specs": [mixed_group({"0": full(block_size=16), "1": full(1, block_size=16)}), WINDOW],
}


def test_groups_differ(folder: Path) -> None:
    config = make_config(folder)
    digests = [digest(config, groups=groups) for groups in [GROUPS, *DIFFERENT_GROUPS.values()]]
    assert len(set(digests)) == 1 + len(DIFFERENT_GROUPS)


def test_rows_differ(folder: Path) -> None:
    config = make_config(folder)
    rows = [ROW, {**ROW, "block_bytes": 8192}, {**ROW, "backends": ["CPU_ATTN"]}, None]
    assert len({digest(config, row=row) for row in rows}) == len(rows)


def test_versions_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(folder)
    digests = []
    for version in ("0.32.0", "0.32.1", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        digests.append(digest(config))
    assert digests[0] == digests[1] != digests[2]
    assert describe(config)["format"] == namespace.FORMAT_VERSION
    # vLLM 0.33 has these hashes, not yet with a KV connector.
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", 2, raising=False)
    digests.append(digest(config))
    assert len(set(digests[1:])) == 3


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", [None, "0", "7"])
def test_it_has_the_hash_that_vllm_starts_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any, seed: str | None
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = make_config(folder)
    config.cache_config.prefix_caching_hash_algo = algorithm
    described = describe(config)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    assert described["hash"]["algorithm"] == algorithm
    assert described["hash"]["none_hash"] == kv_cache_utils.NONE_HASH.hex()


def test_images_differ_with_their_processor(folder: Path) -> None:
    config = make_config(folder)
    settings: list[dict[str, Any]] = [
        {},
        {"language_model_only": True},
        {"mm_processor_kwargs": {"max_pixels": 100}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
    ]
    digests = set()
    for setting in settings:
        config.model_config.multimodal_config = MultiModalConfig(**setting)
        digests.add(digest(config))
    assert len(digests) == len(settings)
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=1)
    assert digest(config) in digests


# max_model_len


@pytest.mark.parametrize(
    ("overrides", "lengths", "matters"),
    [
        ({}, (128, 512), False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, (128, 512), False),
        ({"rope_parameters": LONGROPE}, (128, 512), True),
        # -1: vLLM loads the model for the full length, and then fits the length to memory.
        ({"rope_parameters": LONGROPE}, (-1, 512), True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, (128, 512), True),
        ("Llama 4", (128, 512), True),
    ],
    ids=["none", "linear", "longrope", "at load", "dynamic", "Llama 4"],
)
def test_the_length_matters_where_positions_depend_on_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: Any,
    lengths: tuple[int, int],
    matters: bool,
) -> None:
    if overrides == "Llama 4":
        monkeypatch.setattr(ModelConfig, "architecture", "Llama4ForConditionalGeneration")
        overrides = {}
    first, second = (
        make_config(folder, hf_overrides=overrides, max_model_len=length) for length in lengths
    )
    if lengths[0] == -1:
        first.model_config.max_model_len = lengths[1]
    assert (digest(first) != digest(second)) == matters


# Weights


def _fine_tune(model: Path) -> None:
    write_model(model, seed=2)


def _change_a_64th(model: Path) -> None:
    with (model / "model-2.safetensors").open("r+b") as file:
        file.seek(-(2**15), os.SEEK_END)
        file.write(bytes(2**15))


def _rename(model: Path) -> None:
    path = model / "model-2.safetensors"
    path.rename(path.with_name("model-3.safetensors"))


def _add(name: str) -> Callable[[Path], None]:
    def add(model: Path) -> None:
        (model / name).write_text("{}")

    return add


OTHER_FILES: dict[str, Callable[[Path], None]] = {
    "fine-tune": _fine_tune,
    "the last 32 KiB": _change_a_64th,
    "name": _rename,
    "one file less": lambda model: (model / "model-2.safetensors").unlink(),
    "size": lambda model: os.truncate(model / "model-2.safetensors", 2**21),
    "bin": _add("pytorch_model.bin"),
    "quantization": _add("hf_quant_config.json"),
    "images": _add("preprocessor_config.json"),
    "code": _add("modeling_other.py"),
}


@pytest.mark.parametrize("change", OTHER_FILES.values(), ids=OTHER_FILES)
def test_other_files_differ(folder: Path, copy: Path, change: Callable[[Path], None]) -> None:
    config = make_config(copy)
    assert digest(config) == digest(make_config(folder))
    change(copy)
    assert digest(config) != digest(make_config(folder))


@pytest.mark.parametrize("size", [1, 4097, 2**18, 2**18 + 1])
def test_a_small_file_is_read_whole(copy: Path, size: int) -> None:
    config = make_config(copy)
    digests = set()
    places = sorted({0, size // 2, max(0, size - 70), size - 1})
    for place in places:
        contents = bytearray(size)
        contents[place] = 1
        (copy / "extra.bin").write_bytes(contents)
        digests.add(digest(config))
    assert len(digests) == len(places)
    for zeros in (2**21, 2**22):
        (copy / "extra.bin").write_bytes(bytes(zeros))
        digests.add(digest(config))
    assert len(digests) == len(places) + 2


def test_files_may_be_listed_in_any_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(folder)
    glob = Path.glob
    digests = set()
    for reverse in (False, True):
        monkeypatch.setattr(
            Path,
            "glob",
            lambda path, pattern, reverse=reverse: sorted(glob(path, pattern), reverse=reverse),
        )
        digests.add(digest(config))
    assert len(digests) == 1


def test_a_model_may_be_one_file(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, load={"load_format": "gguf"})
    digests = set()
    for contents in ("a", "b"):
        config.model_config.model = str(tmp_path / "model.gguf")
        Path(config.model_config.model).write_text(contents)
        digests.add(digest(config))
    assert len(digests) == 2


def test_drafters_differ(folder: Path, drafter: Path, tmp_path: Path) -> None:
    config = make_config(folder, drafter)
    speculative = config.speculative_config
    assert speculative is not None
    digests = {digest(make_config(folder)), digest(config)}
    digests.add(digest(make_config(folder, write_model(tmp_path, seed=3))))
    speculative.num_speculative_tokens = 3
    digests.add(digest(config))
    speculative.kv_cache_dtype = "fp8"
    digests.add(digest(config))
    speculative.draft_load_config = LoadConfig(load_format="dummy")
    digests.add(digest(config))
    speculative.method = "suffix"
    digests.add(digest(config))
    cast(Any, speculative).draft_model_config = None  # of this method
    digests.add(digest(config))
    assert len(digests) == 8


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Path:
    """A cache of the Hugging Face Hub with two commits of a model: the same files twice."""
    repository = tmp_path / "models--org--model"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return tmp_path


def _from_hub(folder: Path, hub: Path, revision: str | None) -> VllmConfig:
    config = make_config(folder, load={"download_dir": str(hub)})
    config.model_config.model = "org/model"
    config.model_config.revision = revision
    return config


def test_revisions_and_the_weights_of_a_snapshot_differ(folder: Path, hub: Path) -> None:
    newest, main, first, second = (
        digest(_from_hub(folder, hub, revision)) for revision in (None, "main", "a" * 40, "b" * 40)
    )
    assert newest == main == first != second
    _fine_tune(hub / "models--org--model" / "snapshots" / ("a" * 40))
    assert digest(_from_hub(folder, hub, None)) != newest


def test_a_snapshot_may_lack_files_that_vllm_does_not_load(folder: Path, hub: Path) -> None:
    """The list of a commit's files is beside the snapshot if vLLM has downloaded some of them."""
    config = _from_hub(folder, hub, None)
    before = digest(config)
    trees = hub / "models--org--model" / "trees"
    trees.mkdir()
    entry = TreeCacheEntry(size=1, blob_id="0" * 40, lfs_sha256=None, lfs_size=None, xet_hash=None)
    write_tree_cache(str(trees.parent), "a" * 40, {"onnx/model.onnx": entry})
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download("org/model", cache_dir=hub, local_files_only=True)
    assert digest(config) == before


def _no_files(config: VllmConfig) -> None:
    for path in Path(config.model_config.model).glob("*.safetensors"):
        path.unlink()


ELSEWHERE: dict[str, Change] = {
    "no files": _no_files,
    "object store": _set("model_config.model_weights", "s3://bucket/model"),
    "server": _set("load_config.load_format", "modelexpress"),
    "daemon": _set("load_config.load_format", "ipc_cache"),
    "plugin": _set("load_config.load_format", "mine"),
    "not in the cache": _set("model_config.model", "org/unknown"),
    "no path": _set("model_config.model", "/no/such/folder"),
    "file of no weights": lambda config: _set(
        "model_config.model", f"{config.model_config.model}/config.json"
    )(config),
}


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
def test_weights_elsewhere_need_a_name(copy: Path, change: Change) -> None:
    config = make_config(copy)
    change(config)
    with pytest.raises(ConfigError, match=MISSING):
        describe(config)
    first, second = (digest(config, name=name) for name in ("llama-v1", "llama-v2"))
    assert first != second


def test_a_drafter_elsewhere_needs_a_name(copy: Path, folder: Path) -> None:
    config = make_config(folder, copy)
    for path in copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match=MISSING):
        describe(config)
    assert describe(config, name="llama-v1")


def test_modelscope_is_not_the_hub(
    folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match=MISSING):
        describe(_from_hub(folder, hub, None))


def test_a_name_replaces_the_weights_and_nothing_else(folder: Path, copy: Path) -> None:
    config = make_config(copy)
    expected = digest(config, name="llama-v1")
    assert expected != digest(config)
    _fine_tune(copy)
    assert digest(config, name="llama-v1") == expected
    assert digest(make_config(folder), name="llama-v1") == expected
    assert digest(make_config(folder, dtype="bfloat16"), name="llama-v1") != expected
    assert digest(config, name="llama-v1", row=None) != expected


def test_dummy_weights_come_from_the_seed(copy: Path) -> None:
    config = make_config(copy, load={"load_format": "dummy"})
    _no_files(config)
    before = digest(config)
    config.model_config.seed += 1
    assert digest(config) != before


# Hashes that others compute too


@pytest.mark.parametrize(
    ("algorithm", "seed", "reproducible"),
    [
        ("sha256", "random", True),
        ("sha256_cbor", "", True),
        ("xxhash", "", False),
        ("xxhash_cbor", "random", False),
        ("xxhash", "0", True),
    ],
)
def test_hashes_must_be_reproducible(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: Any,
    seed: str,
    reproducible: bool,
) -> None:
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = make_config(folder)
    config.cache_config.prefix_caching_hash_algo = algorithm
    allowed = "--prefix-caching-hash-algo sha256_cbor .* PYTHONHASHSEED"
    complaint = f"prefix_caching_hash_algo='{algorithm}': .*Allowed: {allowed}"
    with nullcontext() if reproducible else pytest.raises(ConfigError, match=complaint):
        namespace.require_reproducible_hashes(config)
