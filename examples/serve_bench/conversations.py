"""Conversations, from a file of vLLM's multi-turn benchmark.

Two kinds of file exist. A list holds recorded conversations, as vLLM's
``convert_sharegpt_to_openai.py`` writes it. A mapping with ``"filetype":
"generate_conversations"`` describes the number of conversations and their lengths, as for vLLM's
``benchmark_serving_multi_turn.py``. Lengths are drawn from the same generator in the same order:
a seed gives the same ones there and here. The words follow from the seed, so the file's
``text_files`` are not read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from examples.bench.command import CannotStart
from examples.serve_bench.tokens import Vocabulary

FILETYPE = "generate_conversations"


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


# The form of a file. Keys that only vLLM's script reads are ignored.

Number = Annotated[float, Field(ge=0)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


_NEEDED = {
    "constant": {"value"},
    "uniform": {"min", "max"},
    "zipf": {"alpha"},
    "poisson": {"alpha"},
    "lognormal": {"mean", "sigma"},
}


class _Length(_Form):
    """Lognormal: of ``mean`` and ``sigma``, or of an average and the median's ratio to it."""

    distribution: Literal["constant", "uniform", "zipf", "poisson", "lognormal"]
    value: Number = 0.0
    min: Number = 0.0
    max: Number | None = None
    alpha: Number = 0.0
    average: Annotated[float, Field(ge=1)] | None = None
    median_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.85  # vLLM's default
    mean: Number = 0.0
    sigma: Number = 0.0

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = {"average"} if self.average is not None else _NEEDED[self.distribution]
        if missing := sorted(needed - self.model_fields_set):
            raise ValueError(f"{self.distribution} needs {' and '.join(missing)}")
        return self

    def draw(self, source: np.random.RandomState, size: int) -> list[int]:
        """Raises CannotStart for numbers that numpy refuses."""
        try:
            drawn = self._drawn(source, size)
        except ValueError as error:
            raise CannotStart(f"--input-file: {self.distribution}: {error}") from None
        most = math.inf if self.max is None else self.max
        return [int(length) for length in np.round(np.minimum(drawn, most))]

    def _drawn(self, source: np.random.RandomState, size: int) -> NDArray[Any]:
        match self.distribution:
            case "constant":
                return np.full(size, int(self.value))
            case "uniform":
                return source.randint(int(self.min), int(self.max or 0) + 1, size=size)
            case "zipf":
                return source.zipf(self.alpha, size)
            case "poisson":
                return source.poisson(self.alpha, size)
        if self.average is None:
            return source.lognormal(self.mean, self.sigma, size)
        sigma = math.sqrt(-2 * math.log(self.median_ratio))
        drawn = source.lognormal(math.log(self.average * self.median_ratio), sigma, size)
        return np.asarray(drawn * (self.average / drawn.mean()))


class _Questions(_Form):
    num_turns: _Length
    num_tokens: _Length
    common_prefix_num_tokens: _Length = _Length(distribution="constant", value=0)
    prefix_num_tokens: _Length


class _Answers(_Form):
    num_tokens: _Length


class _Settings(_Form):
    filetype: Literal["generate_conversations"]
    num_conversations: Annotated[int, Field(ge=1)]
    prompt_input: _Questions
    prompt_output: _Answers


class _Message(_Form):
    role: str
    content: str


class _Recorded(_Form):
    id: str
    messages: list[_Message]

    @model_validator(mode="after")
    def _takes_turns(self) -> Self:
        for index, message in enumerate(self.messages):
            if message.role != (role := "assistant" if index % 2 else "user"):
                raise ValueError(
                    f"message {index}: user and assistant take turns, the {role} is next"
                )
        return self


def read_input(path: Path) -> Any:
    """The content of a file. Raises CannotStart if it is no JSON, or cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise CannotStart(f"--input-file: {path}: {error.strerror}") from None
    except ValueError as error:
        raise CannotStart(f"--input-file: {path} is no JSON: {error}") from None


def make_conversations(
    data: Any, vocabulary: Vocabulary, seed: int, repeat: int = 0
) -> list[Conversation]:
    """The conversations that ``data``, read from a file, holds or describes. ``repeat`` changes the
    words of generated ones, and no lengths.

    Raises CannotStart.
    """
    try:
        if isinstance(data, Mapping):
            return _generated(_Settings.model_validate(data), vocabulary, seed, repeat)
        return _recorded(TypeAdapter(list[_Recorded]).validate_python(data), vocabulary)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CannotStart(
            f"--input-file: {where}: {first['msg']}, not {str(first['input'])[:80]}"
        ) from None


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
    settings: _Settings, vocabulary: Vocabulary, seed: int, repeat: int
) -> list[Conversation]:
    source = np.random.RandomState(seed)
    asks, count = settings.prompt_input, settings.num_conversations

    def words(length: int, *what: object) -> list[int]:
        return vocabulary.random(length, seed, repeat, *what)

    messages = asks.num_turns.draw(source, count)
    prefixes = asks.prefix_num_tokens.draw(source, count)
    common = words(*asks.common_prefix_num_tokens.draw(source, 1), "common")
    conversations = []
    for index, (number, prefix) in enumerate(zip(messages, prefixes, strict=True)):
        even = max(number, 2) + max(number, 2) % 2  # every question has an answer
        asked = asks.num_tokens.draw(source, even)[::2]
        answered = settings.prompt_output.num_tokens.draw(source, even)[1::2]
        # The first question begins with the prefixes.
        asked[0] = prefix + max(asked[0] - len(common), 1)
        turns = [
            Turn(words(max(1, ask), index, turn, "question"), words(max(1, answer), index, turn))
            for turn, (ask, answer) in enumerate(zip(asked, answered, strict=True))
        ]
        turns[0] = Turn(common + turns[0].question, turns[0].answer)
        conversations.append(Conversation(f"CONV_ID_{index}", turns))
    return conversations


def _recorded(items: Sequence[_Recorded], vocabulary: Vocabulary) -> list[Conversation]:
    conversations: dict[str, Conversation] = {}
    for item in items:
        if item.id in conversations:
            raise CannotStart(f"--input-file: a second conversation with id {item.id!r}")
        tokens = [vocabulary.encode(message.content) for message in item.messages]
        # The last question may have no answer, hence no length of one: it is left out.
        turns = [Turn(*pair) for pair in zip(tokens[::2], tokens[1::2], strict=False)]
        if not turns or not all(turn.question and turn.answer for turn in turns):
            raise CannotStart(f"--input-file: {item.id!r} has an empty message or no answer")
        conversations[item.id] = Conversation(item.id, turns)
    if not conversations:
        raise CannotStart("--input-file: no conversations")
    return list(conversations.values())
