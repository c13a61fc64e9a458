"""Text as tokens, for made models and for real ones."""

import random
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = {"unk_token": "<unknown>", "bos_token": "<s>", "eos_token": "</s>"}
"""A made model's first tokens, which are no text. vLLM refuses a text with more characters than
tokens as long as the vocabulary's longest would make: with one that is longer than any word and
its space, text has the same limit as tokens."""

FIRST_TEXT_TOKEN = len(SPECIAL)

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
"""A conversation is its messages, and nothing else."""


class Vocabulary(ABC):
    """A model's tokens and their texts."""

    def __init__(self, texts: Sequence[int]) -> None:
        """``texts``: the tokens that are text."""
        self._texts = texts

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """``text`` as tokens."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """``tokens`` as text."""

    def random(self, length: int, *what: object) -> list[int]:
        """``length`` tokens of text; the same for the same ``what``."""
        return random.Random(" ".join(map(str, what))).choices(self._texts, k=length)


class WordVocabulary(Vocabulary):
    """Of a made model: token 17 is the word "w17". Any other word is the token that its hash
    picks, so that text in any language becomes a token a word, and equal text equal tokens."""

    def __init__(self, size: int) -> None:
        super().__init__(range(FIRST_TEXT_TOKEN, size))

    def encode(self, text: str) -> list[int]:
        return [self._token(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files beside a model, for clients that send text to the server."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        words = [*SPECIAL.values(), *(f"w{token}" for token in self._texts)]
        numbers = {word: token for token, word in enumerate(words)}
        tokenizer = Tokenizer(WordLevel(numbers, SPECIAL["unk_token"]))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **SPECIAL
        ).save_pretrained(directory)

    def _token(self, word: str) -> int:
        if re.fullmatch(r"w\d{1,9}", word, re.ASCII) and int(word[1:]) in self._texts:
            return int(word[1:])
        return self._texts[zlib.crc32(word.encode()) % len(self._texts)]


class ModelVocabulary(Vocabulary):
    """Of a model that comes with a tokenizer."""

    def __init__(self, model: str) -> None:
        """Raises OSError if there is no tokenizer of that name."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        special = set(self._tokenizer.all_special_ids)
        super().__init__(sorted(set(range(self._tokenizer.vocab_size)) - special))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))
