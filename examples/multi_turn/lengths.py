"""Lengths in tokens: the distributions of a file that describes conversations.

The file is that of vLLM's ``benchmarks/multi_turn/benchmark_serving_multi_turn.py``, and the
numbers are drawn from the same generator in the same order: a seed gives the same lengths there
and here.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Draw = Callable[[np.random.RandomState, int], Lengths]
"""Draws a number of lengths."""

FILETYPE = "generate_conversations"
MEDIAN_TO_AVERAGE = 0.85
"""Of a lognormal distribution without a ratio; vLLM's default."""


class InputError(ValueError):
    """An input file that cannot be used. The text has the place, the value and what is allowed."""


class Talk(NamedTuple):
    """One conversation, in tokens. ``questions`` and ``answers`` are equally long."""

    questions: tuple[int, ...]
    """The first includes the prefixes."""
    answers: tuple[int, ...]


class Talks(NamedTuple):
    """All conversations of a file."""

    common_prefix: int
    """Tokens that all first questions share."""
    talks: tuple[Talk, ...]


def draw_talks(settings: Mapping[str, Any], seed: int) -> Talks:
    """Lengths of the conversations that ``settings`` describe.

    Raises InputError if a setting is missing or wrong.
    """
    if settings.get("filetype") != FILETYPE:
        raise InputError(f"filetype={settings.get('filetype')!r}. Allowed: {FILETYPE!r}")
    count = settings.get("num_conversations")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"num_conversations={count!r}. Allowed: a whole number above 0")
    turns = _distribution(settings, "prompt_input", "num_turns")
    question = _distribution(settings, "prompt_input", "num_tokens")
    common_prefix = _distribution(settings, "prompt_input", "common_prefix_num_tokens", default=0)
    prefix = _distribution(settings, "prompt_input", "prefix_num_tokens")
    answer = _distribution(settings, "prompt_output", "num_tokens")

    source = np.random.RandomState(seed)
    messages = np.maximum(turns(source, count), 2)
    messages += messages % 2  # every question has an answer
    prefixes = prefix(source, count)
    common = int(common_prefix(source, 1)[0])
    talks = []
    for number in range(count):
        questions = question(source, int(messages[number]))[::2]
        answers = answer(source, int(messages[number]))[1::2]
        first = int(prefixes[number]) + max(int(questions[0]), common + 1)
        talks.append(
            Talk(
                (first, *(max(1, int(length)) for length in questions[1:])),
                tuple(max(1, int(length)) for length in answers),
            )
        )
    return Talks(common, tuple(talks))


def _distribution(
    settings: Mapping[str, Any], section: str, name: str, *, default: int | None = None
) -> Draw:
    where = f"{section}.{name}"
    inner = settings.get(section)
    found = inner.get(name) if isinstance(inner, Mapping) else None
    if found is None and default is not None:
        found = {"distribution": "constant", "value": default}
    if not isinstance(found, Mapping):
        raise InputError(f"{where} is missing. Allowed: a distribution")
    kind = found.get("distribution")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(f"{where}.distribution={kind!r}. Allowed: {', '.join(_KINDS)}")
    return _KINDS[kind](_Fields(where, found))


class _Fields:
    """The fields of one distribution."""

    def __init__(self, where: str, fields: Mapping[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def get(self, name: str, default: float) -> float:
        if name not in self:
            return default
        return self[name]

    def __getitem__(self, name: str) -> float:
        value = self._fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise self.error(name, "a number, not below 0")
        return value

    def error(self, name: str, allowed: str) -> InputError:
        return InputError(f"{self._where}.{name}={self._fields.get(name)!r}. Allowed: {allowed}")


def _constant(fields: _Fields) -> Draw:
    value = int(fields["value"])
    return lambda _, size: np.full(size, value)


def _uniform(fields: _Fields) -> Draw:
    low, high = int(fields["min"]), int(fields["max"])
    if low > high:
        raise fields.error("min", f"at most max, {high}")
    return lambda source, size: source.randint(low, high + 1, size=size)


def _zipf(fields: _Fields) -> Draw:
    alpha = fields["alpha"]
    if alpha <= 1:
        raise fields.error("alpha", "above 1")
    return _capped(fields, lambda source, size: source.zipf(alpha, size))


def _poisson(fields: _Fields) -> Draw:
    alpha = fields["alpha"]
    return _capped(fields, lambda source, size: source.poisson(alpha, size))


def _lognormal(fields: _Fields) -> Draw:
    if "average" not in fields:
        mean, sigma = fields["mean"], fields["sigma"]
        return _capped(fields, lambda source, size: source.lognormal(mean, sigma, size))
    average = fields["average"]
    ratio = fields.get("median_ratio", MEDIAN_TO_AVERAGE)
    if not 0 < ratio < 1:
        raise fields.error("median_ratio", "between 0 and 1")
    if average < 1:
        raise fields.error("average", "1 or more")
    mean, sigma = math.log(average * ratio), math.sqrt(-2 * math.log(ratio))

    def draw(source: np.random.RandomState, size: int) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = source.lognormal(mean, sigma, size)
        drawn *= average / drawn.mean()
        return drawn

    return _capped(fields, draw)


def _capped(fields: _Fields, draw: Callable[[np.random.RandomState, int], NDArray[Any]]) -> Draw:
    most = fields.get("max", math.inf)
    return lambda source, size: np.round(np.minimum(draw(source, size), most)).astype(np.int64)


_KINDS: Mapping[str, Callable[[_Fields], Draw]] = {
    "constant": _constant,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "zipf": _zipf,
    "poisson": _poisson,
}
