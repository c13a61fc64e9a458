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

from examples.serve_bench.tokens import Vocabulary

FILETYPE = "generate_conversations"


class InputError(ValueError):
    """An input file that cannot be used. The text has the place, the value and what is allowed."""


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


class _Constant(_Form):
    distribution: Literal["constant"]
    value: Number

    def draw(self, _source: np.random.RandomState, size: int) -> NDArray[Any]:
        return np.full(size, int(self.value))


class _Uniform(_Form):
    distribution: Literal["uniform"]
    min: Number
    max: Number

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self

    def draw(self, source: np.random.RandomState, size: int) -> NDArray[Any]:
        return source.randint(int(self.min), int(self.max) + 1, size=size)


class _Zipf(_Form):
    distribution: Literal["zipf"]
    alpha: Annotated[float, Field(gt=1)]
    max: Number | None = None

    def draw(self, source: np.random.RandomState, size: int) -> NDArray[Any]:
        return source.zipf(self.alpha, size)


class _Poisson(_Form):
    distribution: Literal["poisson"]
    alpha: Number
    max: Number | None = None

    def draw(self, source: np.random.RandomState, size: int) -> NDArray[Any]:
        return source.poisson(self.alpha, size)


class _Lognormal(_Form):
    """Of an average and the median's ratio to it, or of ``mean`` and ``sigma``."""

    distribution: Literal["lognormal"]
    average: Annotated[float, Field(ge=1)] | None = None
    median_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.85  # vLLM's default
    mean: Number | None = None
    sigma: Number | None = None
    max: Number | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.average is None and (self.mean is None or self.sigma is None):
            raise ValueError("average, or mean and sigma, are missing")
        return self

    def draw(self, source: np.random.RandomState, size: int) -> NDArray[Any]:
        if self.average is None:
            assert self.mean is not None
            assert self.sigma is not None
            return source.lognormal(self.mean, self.sigma, size)
        sigma = math.sqrt(-2 * math.log(self.median_ratio))
        drawn = source.lognormal(math.log(self.average * self.median_ratio), sigma, size)
        return np.asarray(drawn * (self.average / drawn.mean()))


Distribution = Annotated[
    _Constant | _Uniform | _Zipf | _Poisson | _Lognormal, Field(discriminator="distribution")
]


class _Questions(_Form):
    num_turns: Distribution
    num_tokens: Distribution
    common_prefix_num_tokens: Distribution = _Constant(distribution="constant", value=0)
    prefix_num_tokens: Distribution


class _Answers(_Form):
    num_tokens: Distribution


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
    """The content of a file. Raises InputError if it is no JSON, or cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None


def make_conversations(
    data: Any, vocabulary: Vocabulary, seed: int, repeat: int = 0
) -> list[Conversation]:
    """The conversations that ``data``, read from a file, holds or describes. ``repeat`` changes the
    words of generated ones, and no lengths.

    Raises InputError.
    """
    try:
        if isinstance(data, Mapping):
            return _generated(_Settings.model_validate(data), vocabulary, seed, repeat)
        return _recorded(TypeAdapter(list[_Recorded]).validate_python(data), vocabulary)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{where}: {first['msg']}, not {str(first['input'])[:80]}") from None


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

    def draw(distribution: Distribution, size: int) -> list[int]:
        most = getattr(distribution, "max", None)
        drawn = np.minimum(distribution.draw(source, size), math.inf if most is None else most)
        return [int(length) for length in np.round(drawn)]

    def words(length: int, *what: object) -> list[int]:
        return vocabulary.random(length, seed, repeat, *what)

    messages = draw(asks.num_turns, count)
    prefixes = draw(asks.prefix_num_tokens, count)
    common = words(*draw(asks.common_prefix_num_tokens, 1), "common")
    conversations = []
    for index, (number, prefix) in enumerate(zip(messages, prefixes, strict=True)):
        even = max(number, 2) + max(number, 2) % 2  # every question has an answer
        asked = draw(asks.num_tokens, even)[::2]
        answered = draw(settings.prompt_output.num_tokens, even)[1::2]
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
            raise InputError(f"a second conversation with id {item.id!r}")
        tokens = [vocabulary.encode(message.content) for message in item.messages]
        # The last question may have no answer, hence no length of one: it is left out.
        turns = [Turn(*pair) for pair in zip(tokens[::2], tokens[1::2], strict=False)]
        if not turns or not all(turn.question and turn.answer for turn in turns):
            raise InputError(f"conversation {item.id!r}: a message is empty, or there is no answer")
        conversations[item.id] = Conversation(item.id, turns)
    if not conversations:
        raise InputError("no conversations")
    return list(conversations.values())
