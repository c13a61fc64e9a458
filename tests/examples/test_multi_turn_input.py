"""The input files of the multi-turn benchmark, and the conversations that it makes of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.bench.connectors import CONTENDERS
from examples.bench.models import LLAMA_8B, QWEN3_14B, ModelShape, save_model
from examples.multi_turn.conversations import (
    Conversation,
    Turn,
    make_conversations,
    read_input,
    to_messages,
)
from examples.multi_turn.lengths import InputError, draw_talks
from examples.multi_turn.plan import PRESETS, generated
from examples.multi_turn.tokens import FIRST_TEXT_TOKEN, ModelVocabulary, WordVocabulary

VOCABULARY = WordVocabulary(512)

SETTINGS: Mapping[str, Any] = {
    "filetype": "generate_conversations",
    "num_conversations": 24,
    "text_files": ["pg1184.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}},
}
"""vLLM's own example."""


def with_setting(path: str, value: object) -> dict[str, Any]:
    """SETTINGS with a replaced value at a path with dots; None removes the key."""
    settings = json.loads(json.dumps(SETTINGS))
    *parents, name = path.split(".")
    inner = settings
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    if value is None:
        del inner[name]
    return dict(settings)


def test_lengths_are_those_of_the_settings() -> None:
    common, talks = draw_talks(SETTINGS, seed=1234)
    assert common == 500
    assert len(talks) == 24
    assert {len(talk.questions) for talk in talks} == {6, 7, 8, 9}
    for talk in talks:
        assert len(talk.questions) == len(talk.answers)
        assert 500 < talk.questions[0] <= 5501
        assert all(120 <= length <= 160 for length in talk.questions[1:])
        assert all(80 <= length <= 120 for length in talk.answers)
    prefixes = [talk.questions[0] - 501 for talk in talks]
    assert sum(prefixes) / len(prefixes) == pytest.approx(1000, rel=0.01)
    assert draw_talks(SETTINGS, seed=1234).talks == talks
    assert draw_talks(SETTINGS, seed=1235).talks != talks


def test_lengths_are_those_that_vllm_draws() -> None:
    """Recorded from vLLM 0.32's ``generate_conversations`` for SETTINGS and seed 1234: number of
    messages of each conversation, tokens of the first prefixes, and of the first conversation's
    messages."""
    _, talks = draw_talks(SETTINGS, seed=1234)
    assert [2 * len(talk.questions) for talk in talks[:8]] == [16, 18, 18, 16, 16, 12, 14, 14]
    assert [talk.questions[0] - 501 for talk in talks[:6]] == [767, 553, 1288, 488, 695, 475]
    assert list(talks[0].questions[1:]) == [156, 125, 154, 148, 138, 145, 143]
    assert list(talks[0].answers) == [114, 113, 87, 119, 80, 81, 83, 92]


@pytest.mark.parametrize(
    ("distribution", "mean", "most"),
    [
        ({"distribution": "constant", "value": 50}, 50, 50),
        ({"distribution": "uniform", "min": 40, "max": 60}, 50, 60),
        ({"distribution": "poisson", "alpha": 50, "max": 55}, 48.5, 55),
        ({"distribution": "zipf", "alpha": 4.0, "max": 7}, 1.1, 7),
        ({"distribution": "lognormal", "average": 50, "median_ratio": 0.5}, 50, 1000),
        ({"distribution": "lognormal", "mean": 3.0, "sigma": 0.1, "max": 24}, 20, 24),
    ],
)
def test_distributions(distribution: Mapping[str, Any], mean: float, most: int) -> None:
    settings = with_setting("prompt_output.num_tokens", distribution)
    answers = [
        length
        for talk in draw_talks({**settings, "num_conversations": 50}, 0).talks
        for length in talk.answers
    ]
    assert np.mean(answers) == pytest.approx(mean, rel=0.15)
    assert 1 <= max(answers) <= most
    assert (len(set(answers)) == 1) == (distribution["distribution"] == "constant")


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("filetype", "other", "filetype='other'. Allowed: 'generate_conversations'"),
        ("num_conversations", 0, "num_conversations=0. Allowed: a whole number above 0"),
        ("num_conversations", None, "num_conversations=None"),
        ("prompt_input", None, "prompt_input.num_turns is missing"),
        ("prompt_output.num_tokens", None, "prompt_output.num_tokens is missing"),
        (
            "prompt_input.num_tokens.distribution",
            "normal",
            "prompt_input.num_tokens.distribution='normal'. Allowed: constant, uniform, lognormal",
        ),
        ("prompt_input.num_tokens.min", None, "prompt_input.num_tokens.min=None. Allowed: a num"),
        ("prompt_input.num_tokens.min", 161, "prompt_input.num_tokens.min=161. Allowed: at most"),
        ("prompt_input.num_tokens.min", -1, "prompt_input.num_tokens.min=-1. Allowed: a number, "),
        ("prompt_input.prefix_num_tokens.median_ratio", 1, "median_ratio=1. Allowed: between"),
        ("prompt_input.prefix_num_tokens.average", 0.5, "average=0.5. Allowed: 1 or more"),
        (
            "prompt_output.num_tokens",
            {"distribution": "zipf", "alpha": 1},
            "prompt_output.num_tokens.alpha=1. Allowed: above 1",
        ),
    ],
)
def test_wrong_settings(path: str, value: object, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        make_conversations(with_setting(path, value), VOCABULARY, seed=0)
    assert complaint in str(error.value)


def test_generated_conversations() -> None:
    settings = generated(3, messages=6, common=40, prefix=(100, 200), question=50, answer=8)
    conversations = make_conversations(settings, VOCABULARY, seed=5)
    assert len({conversation.id for conversation in conversations}) == 3
    first = [conversation.turns[0].question for conversation in conversations]
    assert all(question[:40] == first[0][:40] for question in first)
    assert len({tuple(question[40:60]) for question in first}) == 3, "only the prefix is shared"
    assert all(150 <= len(question) <= 250 for question in first)
    one = conversations[0]
    assert [len(turn.question) for turn in one.turns[1:]] == [50, 50]
    assert [len(turn.answer) for turn in one.turns] == [8, 8, 8]
    assert one.turns[1].question != one.turns[2].question
    assert conversations == make_conversations(settings, VOCABULARY, seed=5)
    assert conversations != make_conversations(settings, VOCABULARY, seed=6)


def test_a_prompt_has_the_whole_conversation() -> None:
    conversation = Conversation("one", [Turn([1, 2], [3]), Turn([4], [5, 6]), Turn([7], [8])])
    assert conversation.prompt(0) == [1, 2]
    assert conversation.prompt(1) == [1, 2, 3, 4]
    assert conversation.prompt(2) == [1, 2, 3, 4, 5, 6, 7]
    assert conversation.num_tokens == 8


def message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_recorded_conversations() -> None:
    messages = [
        message("user", "How do you do? 你好"),
        message("assistant", "w17 w18"),
        message("user", "And how do you do?"),
        message("assistant", "fine"),
        message("user", "Nobody answers this."),
    ]
    (conversation,) = make_conversations([{"id": "x", "messages": messages}], VOCABULARY, seed=0)
    assert conversation.id == "x"
    assert [len(turn.question) for turn in conversation.turns] == [5, 5]
    assert conversation.turns[0].answer == [17, 18]
    how, do, you = conversation.turns[0].question[:3]
    assert conversation.turns[1].question[1:4] != [how, do, you], "How is not how"
    assert conversation.turns[1].question[2:4] == [do, you], "equal words are equal tokens"
    everything = conversation.prompt(1)
    assert all(FIRST_TEXT_TOKEN <= token < 512 for token in everything)


def test_conversations_of_a_run_can_be_read_again() -> None:
    settings = generated(3, messages=4, common=8, prefix=(10, 20), question=5, answer=3)
    conversations = make_conversations(settings, VOCABULARY, seed=0)
    file = json.dumps(to_messages(conversations, VOCABULARY))
    assert make_conversations(json.loads(file), VOCABULARY, seed=0) == conversations


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("text", "neither a list of conversations nor settings"),
        ([], "no conversations"),
        ([{"messages": []}], "[0]: no conversation of the form"),
        ([{"id": "x", "messages": "hello"}], "[0]: no conversation of the form"),
        ([{"id": "x", "messages": []}], "conversation 'x': a message is empty, or there is no"),
        ([{"id": "x", "messages": [message("user", "a")]}], "or there is no answer"),
        ([{"id": "x", "messages": [message("user", "a"), message("assistant", "")]}], "is empty"),
        ([{"id": "x", "messages": [message("assistant", "a")]}], "message 0: {'role': 'assis"),
        ([{"id": "x", "messages": [message("user", "a"), message("user", "b")]}], "message 1: "),
        ([{"id": "x", "messages": [message("user", None)]}], "take turns"),
        (
            [{"id": "x", "messages": [message("user", "a"), message("assistant", "b")]}] * 2,
            "[1]: a second conversation with id 'x'",
        ),
    ],
)
def test_wrong_conversations(data: object, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        make_conversations(data, VOCABULARY, seed=0)
    assert complaint in str(error.value)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_input(tmp_path / "missing.json")
    (tmp_path / "wrong.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        read_input(tmp_path / "wrong.json")


def test_text_means_the_same_to_clients_and_servers(tmp_path: Path) -> None:
    """The tokenizer that is saved with a generated model encodes the words of a conversation as the
    tokens that the run sent. A chat adds no token to its messages."""
    from transformers import AutoTokenizer

    save_model(ModelShape(128, 16, 1, 2, 1, "bfloat16", intermediate_size=32), 256, 0, tmp_path)
    vocabulary = WordVocabulary(128)
    vocabulary.save(tmp_path)
    settings = generated(2, messages=4, common=8, prefix=(10, 20), question=5, answer=3)
    for conversation in make_conversations(settings, vocabulary, seed=0):
        (recorded,) = to_messages([conversation], vocabulary)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        chat = tokenizer.apply_chat_template(recorded["messages"][:3], tokenize=False)
        assert tokenizer.encode(chat, add_special_tokens=False) == conversation.prompt(1)
        assert ModelVocabulary(str(tmp_path)).encode(chat) == conversation.prompt(1)
    longest = max(map(len, AutoTokenizer.from_pretrained(tmp_path).get_vocab()))
    assert longest > len(f"w{QWEN3_14B.vocab_size}"), "vLLM takes that many characters a token"
    assert min(ModelVocabulary(str(tmp_path)).random(1000, "any")) >= 3, "no special tokens"


@pytest.mark.parametrize(("shape", "parameters"), [(LLAMA_8B, 7.24e9), (QWEN3_14B, 14.77e9)])
def test_large_shapes_are_those_of_their_names(
    shape: ModelShape, parameters: float, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    save_model(shape, 4096, 0, tmp_path)
    assert not list(tmp_path.glob("*.safetensors")), "vLLM fills in dummy weights"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(
        parameters, rel=0.01
    )
    assert shape.kv_bytes_per_token == {32: 128, 40: 160}[shape.num_layers] << 10


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_presets(name: str, device: Any) -> None:
    plan = PRESETS[name](device)
    assert plan.shape is not None
    conversations = make_conversations(plan.settings, WordVocabulary(plan.shape.vocab_size), 0)
    assert plan.clients <= plan.active <= len(conversations)
    arguments = plan.server_arguments(CONTENDERS["ours"], conversations)
    held = (arguments["num_gpu_blocks_override"] - 1) * plan.block_size
    longest = max(conversation.num_tokens for conversation in conversations)
    everything = sum(conversation.num_tokens for conversation in conversations)
    assert longest <= arguments["max_model_len"] <= held
    assert everything * plan.shape.kv_bytes_per_token < 0.8 * plan.host_bytes
    if name == "fits":
        assert plan.device == device
        assert everything <= held
        assert not plan.expects_hits
    else:
        assert plan.device == ("cpu" if name == "cpu" else "cuda")
        assert held < 0.5 * everything
        assert plan.expects_hits
    assert arguments["enable_prefix_caching"] is True
    assert arguments["kv_transfer_config"]["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": plan.host_bytes
    }
