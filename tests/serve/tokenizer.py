"""A tokenizer for random models, made on the spot: token 17 is the word "w17"."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


def save_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write the tokenizer's files beside a model of ``vocab_size`` tokens."""
    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(directory)
