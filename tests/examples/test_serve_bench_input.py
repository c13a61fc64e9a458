"""The conversations of the serving benchmark: input files, and what is made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.bench.command import CannotStart
from examples.bench.models import QWEN3_14B, ModelShape, save_model
from examples.serve_bench.conversations import make_conversations, to_messages
from examples.serve_bench.plan import SEED, generated
from examples.serve_bench.tokens import FIRST_TEXT_TOKEN, ModelVocabulary, WordVocabulary

VOCABULARY = WordVocabulary(512)
SETTINGS = SEED.settings
"""Those of vLLM's own example."""


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


def test_lengths_are_those_that_vllm_draws() -> None:
    """Recorded from vLLM 0.32's ``generate_conversations`` for SETTINGS and seed 1234: number of
    messages of each conversation, tokens of the first prefixes, and of the first conversation's
    messages."""
    more = {**SETTINGS, "text_files": ["pg1184.txt"], "print_stats": False}
    talks = make_conversations(more, VOCABULARY, seed=1234)
    assert len(talks) == 24
    assert [2 * len(talk.turns) for talk in talks[:8]] == [16, 18, 18, 16, 16, 12, 14, 14]
    prefixes = [len(talk.turns[0].question) - 501 for talk in talks]
    assert prefixes[:6] == [767, 553, 1288, 488, 695, 475]
    assert np.mean(prefixes) == pytest.approx(1000, rel=0.01)
    questions = [len(turn.question) for turn in talks[0].turns[1:]]
    assert questions == [156, 125, 154, 148, 138, 145, 143]
    answers = [len(turn.answer) for turn in talks[0].turns]
    assert answers == [114, 113, 87, 119, 80, 81, 83, 92]


@pytest.mark.parametrize(
    ("distribution", "mean", "most"),
    [
        ({"distribution": "poisson", "alpha": 50, "max": 55}, 48.5, 55),
        ({"distribution": "zipf", "alpha": 4.0, "max": 7}, 1.1, 7),
        ({"distribution": "lognormal", "average": 50, "median_ratio": 0.5}, 50, 1000),
        ({"distribution": "lognormal", "mean": 3.0, "sigma": 0.1, "max": 24}, 20, 24),
    ],
)
def test_distributions(distribution: Mapping[str, Any], mean: float, most: int) -> None:
    settings = with_setting("prompt_output.num_tokens", distribution) | {"num_conversations": 50}
    talks = make_conversations(settings, VOCABULARY, 0)
    answers = [len(turn.answer) for talk in talks for turn in talk.turns]
    assert np.mean(answers) == pytest.approx(mean, rel=0.15)
    assert 1 <= max(answers) <= most


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
    file = json.dumps(to_messages(conversations, VOCABULARY))
    assert make_conversations(json.loads(file), VOCABULARY, seed=0) == conversations
    assert conversations == make_conversations(settings, VOCABULARY, seed=5)
    others = make_conversations(settings, VOCABULARY, seed=5, repeat=1)
    assert [each.num_tokens for each in others] == [each.num_tokens for each in conversations]
    assert others[0].prompt(0)[:20] != conversations[0].prompt(0)[:20]


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
    first, second = conversation.turns
    everything = conversation.prompt(1)
    assert everything == [*first.question, *first.answer, *second.question]
    assert conversation.prompt(0) == first.question
    assert conversation.num_tokens == len(everything) + len(second.answer) == 13
    assert all(FIRST_TEXT_TOKEN <= token < 512 for token in everything)


def recorded(*messages: dict[str, object]) -> dict[str, object]:
    return {"id": "x", "messages": list(messages)}


ASKED, ANSWERED = message("user", "a"), message("assistant", "b")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (with_setting("filetype", "other"), "filetype: Input should be 'generate_conversations'"),
        (with_setting("prompt_input.num_tokens.distribution", "normal"), "be 'constant', 'uni"),
        (with_setting("prompt_input.num_tokens.min", 161), "uniform: low >= high"),
        (with_setting("prompt_input.num_tokens.min", True), "be a valid number, not True"),
        (with_setting("prompt_input.prefix_num_tokens.average", None), "needs mean and sigma"),
        ("text", "the file: Input should be a valid list, not text"),
        ([], "no conversations"),
        ([recorded()], "'x' has an empty message or no answer"),
        ([recorded(ASKED, message("assistant", ""))], "an empty message"),
        ([recorded(ASKED, ASKED)], "message 1: user and assistant take turns, the assistant is"),
        ([recorded(message("user", None))], "0.messages.0.content: Input should be a valid string"),
        ([recorded(ASKED, ANSWERED)] * 2, "a second conversation with id 'x'"),
    ],
)
def test_wrong_input(data: object, complaint: str) -> None:
    with pytest.raises(CannotStart) as error:
        make_conversations(data, VOCABULARY, seed=0)
    assert complaint in str(error.value)


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
