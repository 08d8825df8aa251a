"""Between text and token ids: a model's tokenizer, and text that grows as tokens arrive.

`TextStream` turns the tokens of one request into text as they come. What it has released never
changes: characters whose bytes are not all there, and text that may yet become a stop text, are
held back until they are decided. So the pieces, put together, are the decoded tokens cut at the
first stop text, however the tokens were grouped on the way.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from jaxstate.errors import CheckpointError, RequestError

_USUAL_END = "<|endoftext|>"


class Tokenizer:
    """The tokenizer that belongs to a model."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_id: int | None = None):
        self._tokenizer = tokenizer
        # A file may ask for prompts to be cut or padded; a prompt is neither without being told.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.eos_id = eos_id

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read `tokenizer.json` of a model folder, and the end token that the folder names.

        The end token is `eos_token` of `tokenizer_config.json`, else `eos_token_id` of
        `config.json`, else `<|endoftext|>` where the vocabulary has it, else none.

        Raises:
          CheckpointError: the file is missing or unreadable, or the named end token is not in the
            vocabulary.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; put the model's tokenizer there, "
                "or give prompts as token ids"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise CheckpointError(f"{path} is not a tokenizer file: {error}") from error
        return cls(tokenizer, _end_token(Path(folder), tokenizer))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included; a model may be padded past it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the file adds to a prompt.

        Raises:
          RequestError: code `bad_encoding`, for a text with half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "bad_encoding",
                f"the text has a lone surrogate at character {error.start}, which is no character",
                "prompt",
            ) from error
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones left out; a broken character is U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _end_token(folder: Path, tokenizer: tokenizers.Tokenizer) -> int | None:
    named = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    if named is not None:
        end = tokenizer.token_to_id(named) if isinstance(named, str) else None
        if end is None:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'} names the end token {named!r}, "
                "which tokenizer.json does not have"
            )
        return end
    ids = _read_json(folder / "config.json").get("eos_token_id")
    if isinstance(ids, list) and ids:
        ids = ids[0]
    return ids if isinstance(ids, int) else tokenizer.token_to_id(_USUAL_END)


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


class TextStream:
    """The text of one request, released as its tokens arrive.

    A stop text ends the text just before its match. Of several matches the one that starts first
    wins, whichever was complete first: with stops "abc" and "b", text that reads "ab" is held until
    the next character decides.

    Raises:
      RequestError: code `unsupported_value`, for an empty stop text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        if isinstance(stop, str):
            stop = (stop,)
        if not all(stop):
            raise RequestError(
                "unsupported_value", "a stop text is empty; it would match everywhere", "stop"
            )
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._undecoded: list[int] = []  # tokens since the decoder last gave text
        self._decoded_chars = 0
        self._ends: list[
            tuple[int, int]
        ] = []  # (characters, tokens) wherever the decoder gave text
        self._released: list[str] = []
        self._held = ""
        self._match: tuple[int, int] | None = (
            None  # first and last character of the stop text, plus one
        )

    @property
    def stopped(self) -> bool:
        """Whether a stop text ended the text; tokens pushed after that are ignored."""
        return self._match is not None

    @property
    def text(self) -> str:
        """The text released so far."""
        return "".join(self._released)

    @property
    def kept_tokens(self) -> int:
        """Tokens up to and with the one that completed the stop text; all of them when none did."""
        if self._match is None:
            return len(self._ids)
        return self._ends[bisect.bisect_left(self._ends, (self._match[1],))][1]

    @property
    def settled_tokens(self) -> int:
        """Tokens that no stop text still to be decided can take back: `kept_tokens` will not be less."""
        if self.stopped or not self._held:
            return self.kept_tokens
        # A stop text that begins with the first character held ends there at the earliest.
        first_held = self._decoded_chars - len(self._held) + 1
        return self._ends[bisect.bisect_left(self._ends, (first_held,))][1]

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that they release, which may be none."""
        if self.stopped:
            return ""
        ids = list(ids)
        # Where a stop text ends tells which tokens to keep, so then each token is looked at alone.
        for step in [[i] for i in ids] if self._stop else [ids] if ids else []:
            self._ids += step
            self._undecoded += step
            self._take(self._decode(step))
        return self._release(last=False)

    def finish(self) -> str:
        """Return what was held back: no more tokens will come. Half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        if self._undecoded:
            decoded, whole = self.text + self._held, self._tokenizer.decode(self._ids)
            if whole.startswith(decoded):
                self._take(whole[len(decoded) :])
            else:
                self._take(self._tokenizer.decode(self._undecoded))
        return self._release(last=True)

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._decoder.step(self._tokenizer._tokenizer, ids) or ""
        except Exception:  # a bare one: with these tokens, those before would read otherwise
            # Some tokenizers do that to bytes that are no character. What is released stays.
            self._decoder = DecodeStream(ids=self._undecoded, skip_special_tokens=True)
            return self._tokenizer.decode(self._undecoded)

    def _take(self, text: str) -> None:
        if text:
            self._undecoded = []
            self._decoded_chars += len(text)
            self._held += text
            if self._stop:
                self._ends.append((self._decoded_chars, len(self._ids)))

    def _release(self, *, last: bool) -> str:
        start, end = _first_match(self._held, self._stop)
        undecided = len(self._held) if last else _first_undecided(self._held, self._stop)
        if start <= undecided and end:
            offset = self._decoded_chars - len(self._held)
            self._match = (offset + start, offset + end)
            piece, self._held = self._held[:start], ""
        else:
            piece, self._held = self._held[:undecided], self._held[undecided:]
        if piece:
            self._released.append(piece)
        return piece


def _first_match(text: str, stop: tuple[str, ...]) -> tuple[int, int]:
    """Return where the first stop text begins and ends, or (0, 0)."""
    # Two that begin together cut the text alike. The shorter is complete sooner, hence does not
    # wait for the longer.
    found = [(at, at + len(s)) for s in stop if (at := text.find(s)) >= 0]
    return min(found, default=(0, 0))


def _first_undecided(text: str, stop: tuple[str, ...]) -> int:
    """Return from where on the text may be the start of a stop text, else its length."""
    longest = max(
        (k for s in stop for k in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:k])),
        default=0,
    )
    return len(text) - longest
