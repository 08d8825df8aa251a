"""How much text a token can stand for, known from the tokenizer alone."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import pre_tokenizers

from jaxstate.text import Tokenizer

_SPLITS = ("Split", "Punctuation", "Digits", "ByteLevel")


def max_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of text that one token stands for, or None where nothing bounds them.

    There is a bound for byte-level BPE that has every byte and leaves no text out: each token is
    then the bytes that it spells. A normalizer may shorten a text before that, so with one there is
    no bound here.
    """
    content = json.loads(tokenizer._tokenizer.to_str())
    model, added = content["model"], content["added_tokens"]
    vocab = model.get("vocab")
    if (
        content["normalizer"] is not None
        or model.get("type") != "BPE"
        or not set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocab)
        or not _keeps_all_bytes(content["pre_tokenizer"])
        or any(token["lstrip"] or token["rstrip"] for token in added)  # these swallow spaces
    ):
        return None
    # In the vocabulary each byte is written as one character; added tokens are plain text.
    return max([*map(len, vocab), *(len(token["content"].encode()) for token in added)])


def _keeps_all_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether text is written as bytes, and only cut into pieces otherwise."""
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        any(part["type"] == "ByteLevel" for part in parts)
        and all(part["type"] in _SPLITS for part in parts)
        and all(part.get("behavior") != "Removed" for part in parts)
    )
