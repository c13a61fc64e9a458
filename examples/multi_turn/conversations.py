"""Conversations, from a file of vLLM's multi-turn benchmark.

Two kinds of file exist. A list holds recorded conversations: ``[{"id": ..., "messages": [{"role":
"user", "content": ...}, {"role": "assistant", ...}, ...]}, ...]``, as vLLM's
``convert_sharegpt_to_openai.py`` writes it. A mapping with ``"filetype":
"generate_conversations"`` describes the number of conversations and their lengths; their words
follow from the seed, so its ``text_files`` are not read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.multi_turn.lengths import InputError, draw_talks
from examples.multi_turn.tokens import Vocabulary


@dataclass(frozen=True)
class Turn:
    """Tokens of a question and of its recorded answer, which the history of later turns has."""

    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: list[Turn]

    def prompt(self, turn: int) -> list[int]:
        """The history before ``turn`` (from 0), and its question."""
        before = [token for each in self.turns[:turn] for token in (*each.question, *each.answer)]
        return before + self.turns[turn].question

    @property
    def num_tokens(self) -> int:
        """At its end."""
        return sum(len(turn.question) + len(turn.answer) for turn in self.turns)


def read_input(path: Path) -> Any:
    """The content of a file. Raises InputError if it is no JSON, or cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None


def make_conversations(data: Any, vocabulary: Vocabulary, seed: int) -> list[Conversation]:
    """The conversations that ``data``, read from a file, holds or describes.

    Raises InputError.
    """
    if isinstance(data, Mapping):
        return _generated(data, vocabulary, seed)
    if isinstance(data, Sequence) and not isinstance(data, str):
        return _recorded(data, vocabulary)
    raise InputError("neither a list of conversations nor settings to generate some")


def to_messages(
    conversations: Sequence[Conversation], vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """The conversations in the form of a file that vLLM's benchmark reads."""
    return [
        {
            "id": conversation.id,
            "messages": [
                {"role": role, "content": vocabulary.decode(tokens)}
                for turn in conversation.turns
                for role, tokens in (("user", turn.question), ("assistant", turn.answer))
            ],
        }
        for conversation in conversations
    ]


def _generated(
    settings: Mapping[str, Any], vocabulary: Vocabulary, seed: int
) -> list[Conversation]:
    common_prefix, talks = draw_talks(settings, seed)
    common = vocabulary.random(common_prefix, seed, "common")

    def question(number: int, turn: int, length: int) -> list[int]:
        shared = common if turn == 0 else []
        return shared + vocabulary.random(length - len(shared), seed, number, turn, "question")

    return [
        Conversation(
            f"CONV_ID_{number}",
            [
                Turn(question(number, turn, asked), vocabulary.random(answered, seed, number, turn))
                for turn, (asked, answered) in enumerate(zip(*talk, strict=True))
            ],
        )
        for number, talk in enumerate(talks)
    ]


def _recorded(items: Sequence[Any], vocabulary: Vocabulary) -> list[Conversation]:
    conversations: dict[str, Conversation] = {}
    for number, item in enumerate(items):
        messages = item.get("messages") if isinstance(item, Mapping) else None
        id = item.get("id") if isinstance(item, Mapping) else None
        if not isinstance(id, str) or not isinstance(messages, list):
            raise InputError(f'[{number}]: no conversation of the form {{"id", "messages"}}')
        if id in conversations:
            raise InputError(f"[{number}]: a second conversation with id {id!r}")
        texts = [_text_of(message, index, id) for index, message in enumerate(messages)]
        tokens = [vocabulary.encode(text) for text in texts]
        # The last question may have no answer, hence no length of one: it is left out.
        turns = [
            Turn(question, answer)
            for question, answer in zip(tokens[::2], tokens[1::2], strict=False)
        ]
        if not turns or not all(turn.question and turn.answer for turn in turns):
            raise InputError(f"conversation {id!r}: a message is empty, or there is no answer")
        conversations[id] = Conversation(id, turns)
    if not conversations:
        raise InputError("no conversations")
    return list(conversations.values())


def _text_of(message: Any, index: int, id: str) -> str:
    role = "assistant" if index % 2 else "user"
    if (
        not isinstance(message, Mapping)
        or message.get("role") != role
        or not isinstance(message.get("content"), str)
    ):
        raise InputError(
            f"conversation {id!r}, message {index}: {str(message)[:80]}. Allowed: a message of "
            f'the {role}, as {{"role", "content"}}; user and assistant take turns'
        )
    return str(message["content"])
