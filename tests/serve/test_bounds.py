"""The most text that a token stands for."""

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from jaxstate.lm import DEMO
from jaxstate.serve import model
from jaxstate.serve.bounds import max_token_bytes
from jaxstate.text import Tokenizer

BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
SPLIT = pre_tokenizers.Split(" ", "isolated")


def bytes_and(*merges: tuple[str, str]) -> tokenizers.Tokenizer:
    """A token for every byte, and those merges."""
    vocab = BYTES | {a + b: len(BYTES) + i for i, (a, b) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def test_the_longest_token_counts_bytes_of_text():
    assert max_token_bytes(Tokenizer(bytes_and())) == 1
    # é is two bytes, written as Ã and ©; so this token is of three bytes.
    backend = bytes_and(("Ã", "©"), ("t", "Ã©"))
    tokenizer = Tokenizer(backend)
    assert max_token_bytes(tokenizer) == 3
    assert len(tokenizer.encode("té" * 5)) == 5
    backend.pre_tokenizer = pre_tokenizers.Sequence([SPLIT, backend.pre_tokenizer])
    assert max_token_bytes(tokenizer) == 3
    backend.add_special_tokens([AddedToken("<é>", special=True)])
    assert max_token_bytes(tokenizer) == 4


def test_the_bound_of_the_model_that_comes_with_jaxstate_is_reached():
    tokenizer = Tokenizer.load(DEMO)
    bound = max_token_bytes(tokenizer)
    texts = [tokenizer.decode([i]) for i in range(1, tokenizer.vocab_size)]
    longest = max(texts, key=lambda text: len(text.encode()))
    assert bound == max(len(longest.encode()), len("<|endoftext|>"))
    assert len(tokenizer.encode(longest)) == 1
    loaded = model.load("demo", dtype=None, report=print, rows=1, max_len=64)
    assert loaded.prompt_bytes == 63 * bound, "one token of 64 is left for the model"


def removes(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer]
    )


def drops_spaces(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer]
    )


def swallows(backend):
    backend.add_tokens([AddedToken("x", rstrip=True)])


def lacks_bytes(backend):
    backend.model = models.BPE({"a": 0}, [])


def is_of_words(backend):
    backend.model = models.WordLevel(BYTES | {"?": 256}, unk_token="?")


def strips(backend):
    backend.normalizer = normalizers.Strip()


def has_no_bytes(backend):
    backend.pre_tokenizer = None


@pytest.mark.parametrize(
    "change", [removes, drops_spaces, swallows, lacks_bytes, is_of_words, strips, has_no_bytes]
)
def test_there_is_no_bound_where_text_may_vanish(change):
    backend = bytes_and()
    change(backend)
    tokenizer = Tokenizer(backend)
    assert max_token_bytes(tokenizer) is None
