"""The language of the recall models: their words, and the form of a prompt.

A prompt is a context of pairs in random order and a question:

    miru tako ; bani velo ; tako bani ; ... ? miru . . . . =

Every pair is a word and its follower; together they make one ring. A right answer walks on
from the word of the question, "tako bani velo ...": each hop is one more pair that has to be
found somewhere in the context. The dots keep the word away from the answer that depends on it.
"""

from itertools import product
from pathlib import Path

UNKNOWN, END_OF_TEXT, END_OF_PAIR, QUESTION, FILLER, ANSWER = "<unk>", "</s>", ";", "?", ".", "="
SPECIAL_TOKENS = (UNKNOWN, END_OF_TEXT, END_OF_PAIR, QUESTION, FILLER, ANSWER)

VOCAB_SIZE = 2048
FIRST_WORD = len(SPECIAL_TOKENS)
NUM_WORDS = VOCAB_SIZE - FIRST_WORD

PAIR_TOKENS = 3
QUESTION_TOKENS = 3
"""Without the filler: the sign, the word, and the sign of the answer."""

MIN_FILLER, MAX_FILLER = 40, 56
"""Dots of a question. The fewest are more than a KV block has tokens, so that the block with the
word of the question is always whole, and can come from the host."""
HOPS = 8
"""Words of an answer."""


def token(text: str) -> int:
    """Id of one of SPECIAL_TOKENS."""
    return SPECIAL_TOKENS.index(text)


def words() -> list[str]:
    """The NUM_WORDS words in the order of their ids, which begin at FIRST_WORD."""
    syllables = [consonant + vowel for consonant, vowel in product("bdfgklmnprstvz", "aeiou")]
    # Every other one, so that first letters reach to the end of the alphabet.
    return [first + second for first, second in product(syllables, syllables)][::2][:NUM_WORDS]


def num_pairs(prompt_tokens: int) -> int:
    """The most pairs that fit a prompt of ``prompt_tokens`` with the longest question."""
    return min(NUM_WORDS, (prompt_tokens - QUESTION_TOKENS - MAX_FILLER) // PAIR_TOKENS)


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files, for Hugging Face's AutoTokenizer, beside a model."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Metaspace as MetaspaceDecoder
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Metaspace
    from transformers import PreTrainedTokenizerFast

    ids = {text: token(text) for text in (UNKNOWN, END_OF_TEXT)}
    ids |= {f"▁{text}": token(text) for text in SPECIAL_TOKENS[2:]}
    ids |= {f"▁{word}": FIRST_WORD + number for number, word in enumerate(words())}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.decoder = MetaspaceDecoder()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=END_OF_TEXT
    ).save_pretrained(directory)
