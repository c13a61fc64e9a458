"""LoadBook: the prompts of a load run, their answers, and the violations."""

import itertools
import random
from collections import Counter
from threading import Lock
from typing import NamedTuple

from tests.engine.compare import LOGPROB_TOLERANCE, MIN_LEAD, Rounding, compare
from tests.engine.spec import Answer
from tests.engine.workloads import VOCABULARY

ROUNDING = Rounding(LOGPROB_TOLERANCE, MIN_LEAD)

Tokens = tuple[int, ...]


class Turn(NamedTuple):
    """A prompt, and the conversation that continues from its answer."""

    prompt: Tokens
    conversation: int


class LoadBook:
    """The first answer to every prompt, which all later answers are compared with.

    Greedy answers to one prompt agree up to the end of the shorter one. Lengths, the salt, other
    requests in the same steps and the tier of the prefix change nothing. ``violations`` has one
    line for each answer that disagreed.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        """Of clients while they use it, or the script."""
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.slowest_seconds = 0.0
        self.answers: dict[Tokens, Answer] = {}
        """The longest answer to each prompt, among those that agreed with the first."""

    def note(self, kind: str, prompt: Tokens, max_tokens: int, answer: Answer) -> bool:
        """Count a request, and check its answer: "hung up" ones have a part of it, and "cancelled"
        ones nothing. Whether it is whole and right."""
        self.counts.update(("requests", kind))
        if kind == "cancelled":
            return False
        is_whole = kind != "hung up"
        self.counts["completed"] += is_whole
        if is_whole and len(answer.tokens) != max_tokens:
            self.violations.append(f"{len(answer.tokens)} tokens, not {max_tokens}")
            return False
        return self.check(prompt, answer, keep=is_whole) and is_whole

    def check(self, prompt: Tokens, answer: Answer, *, keep: bool) -> bool:
        """Compare ``answer`` with the known one, and add a violation if they differ. With ``keep``,
        remember it if it is the first or longer than the known one."""
        known = self.answers.get(prompt)
        if known is not None:
            self.counts["compared"] += 1
            length = min(len(known.tokens), len(answer.tokens))
            name = f"prompt of {len(prompt)} tokens"
            found = compare(
                {name: known.beginning(length)}, {name: answer.beginning(length)}, ROUNDING
            )
            if found.wrong:
                self.violations += found.wrong
                return False
            self.counts["ties"] += not found.whole
        if keep and (known is None or len(answer.tokens) > len(known.tokens)):
            self.answers[prompt] = answer
        return True


class Script:
    """Prompts of conversations that share system prompts: new ones, next turns, repetitions.

    ``max_prompt_tokens`` ends a conversation; another then takes its place, so that the load
    stays the same for as long as the run lasts.
    """

    NUM_CONVERSATIONS = 40
    NUM_RECENT = 300

    def __init__(self, seed: int, max_prompt_tokens: int) -> None:
        self._rng = random.Random(seed)
        self._max_prompt_tokens = max_prompt_tokens
        self._systems = [self._some_tokens(40, 220) for _ in range(4)]
        self._numbers = itertools.count()
        self._next: dict[int, Tokens] = {}
        self._recent: list[Tokens] = []
        while len(self._next) < self.NUM_CONVERSATIONS:
            self._begin()

    def pick(self) -> Turn:
        """The next prompt to send."""
        if self._recent and self._rng.random() < 0.45:
            return Turn(self._rng.choice(self._recent), -1)
        number = self._rng.choice(list(self._next))
        return Turn(self._next[number], number)

    def go_on(self, turn: Turn, answer: Answer) -> None:
        """Let the conversation of ``turn`` continue after ``answer``."""
        if self._next.get(turn.conversation) != turn.prompt:
            return  # a repetition, or another client was faster
        self._recent.append(turn.prompt)
        del self._recent[: -self.NUM_RECENT]
        prompt = (*turn.prompt, *answer.tokens, *self._some_tokens(5, 60))
        if len(prompt) <= self._max_prompt_tokens:
            self._next[turn.conversation] = prompt
        else:
            del self._next[turn.conversation]
            self._begin()

    def _begin(self) -> None:
        prompt = (*self._rng.choice(self._systems), *self._some_tokens(5, 90))
        self._next[next(self._numbers)] = prompt

    def _some_tokens(self, least: int, most: int) -> Tokens:
        return tuple(self._rng.choices(VOCABULARY, k=self._rng.randint(least, most)))
