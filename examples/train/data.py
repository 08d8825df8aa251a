"""Text in, tokens out: cleans a corpus, trains the tokenizer and packs documents.

    python data.py clean    --out train.txt part-0.txt.xz part-1.txt.xz ...
    python data.py tokenizer --vocab 4096 --out tokenizer.json train.txt
    python data.py pack     --tokenizer tokenizer.json --out train.npz train.txt

Documents in a text file are separated by ``<|endoftext|>``.
"""

from __future__ import annotations

import argparse
import html
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"

# Words keep the space or quote before them; punctuation keeps the line breaks after it.
# Both make frequent pairs ("\n\n after a closing quote) one token.
WORDS = (
    r"'(?:s|t|re|ve|m|ll|d)\b|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Invisible characters go; dashes, quotes and dots become the ASCII that most books use.
_CHARACTERS = str.maketrans(
    {"\ufeff": "", "\xad": "", "\xa0": " ", "\u200a": " ", "\t": " ", "\r": "", "_": "", "*": ""}
    | {"\u2010": "-", "\u2011": "-", "\u2013": "-", "\u2014": "--", "\u2026": "..."}
    | {"\xb4": "'", "`": "'", "\u017f": "s"}
)
_NUMERAL = r"(?:[ivxlcdm]+|\d+|the [a-z]+|[a-z]+)"
_HEADING = re.compile(
    rf"#.*|[-=~+\s]{{3,}}|(?:chapter|chap\.|book|volume|vol\.|part|letter)\s+{_NUMERAL}\.?"
    r"|[IVXLC]+\.?|the end\.?|finis\.?|end of vo[ln]\..*|\[illustration.*",
    re.IGNORECASE,
)
_INLINE_ILLUSTRATION = re.compile(r"\[illustration[^\]]*\]", re.IGNORECASE)
_NOTE_MARK = re.compile(r"\[\^?(?:\d+|[A-Z])?\]")
_SPACED_DOTS = re.compile(r"\.(?: \.){2,}")
_LOOSE_SPACE = re.compile(r" +([,;!?])")


def read_text(path: Path) -> str:
    """Returns the text of a file, decompressed when its name ends in ``.xz``."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        return stream.read()


def clean_document(text: str) -> str:
    """Returns plain paragraphs: no markup, headings or hard line wraps; one blank line between."""
    lines = [_clean_line(line) for line in html.unescape(text).split("\n")]
    width = _wrap_width(lines)
    breaks = sum(bool(line) and not before for before, line in pairwise(["", *lines]))
    blank_lines_separate = breaks > sum(map(bool, lines)) / 12
    paragraphs: list[str] = []
    fresh = True
    for before, line in pairwise(["", *lines]):
        if not line or _HEADING.fullmatch(line):
            fresh = True
        elif fresh:
            paragraphs.append(line)
            fresh = False
        elif _is_wrapped(before, line, width):
            paragraphs[-1] += " " + line
        elif blank_lines_separate and len(before) < 70:
            paragraphs[-1] += "\n" + line  # verse
        else:
            paragraphs.append(line)
    return "\n\n".join(paragraphs)


def _clean_line(line: str) -> str:
    line = line.translate(_CHARACTERS).replace("\\", "")
    line = re.sub(r"^\s*-{3,}\s*", "", line)
    line = _NOTE_MARK.sub("", _INLINE_ILLUSTRATION.sub("", line))
    line = _SPACED_DOTS.sub("...", line)
    return _LOOSE_SPACE.sub(r"\1", " ".join(line.split()))


def _wrap_width(lines: list[str]) -> int:
    """Returns the column at which a hard-wrapped document breaks its lines, 0 if it is not one."""
    lengths = sorted(len(line) for line in lines if len(line) > 20)
    if not lengths or lengths[int(len(lengths) * 0.95)] > 100:
        return 0
    return lengths[int(len(lengths) * 0.9)]


def _is_wrapped(line: str, following: str, width: int) -> bool:
    """Says whether the break after ``line`` is there only because the next word did not fit."""
    word = following.split(" ", 1)[0]
    fits = len(line) + 1 + len(word) <= width - 6
    return width > 0 and len(line) > 30 and (not fits or following[0].islower())


def documents(text: str) -> Iterator[str]:
    """Yields the documents of a text that are not empty."""
    return (part.strip() for part in text.split(SEPARATOR) if part.strip())


def clean_corpus(paths: Iterable[Path]) -> str:
    """Returns all documents of the files, cleaned, separated by ``<|endoftext|>``."""
    cleaned = (clean_document(doc) for path in paths for doc in documents(read_text(path)))
    return f"\n{SEPARATOR}\n".join(doc for doc in cleaned if doc)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with ``<|endoftext|>`` as id 0 (Sennrich et al. 2016)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack_documents(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns all tokens, each document led by the separator, and where each document starts."""
    lead = tokenizer.token_to_id(SEPARATOR)
    # Long documents go through the encoder in paragraphs-aligned pieces so that all cores work.
    pieces = [(n, piece) for n, text in enumerate(texts) for piece in _pieces(text)]
    encoded = tokenizer.encode_batch_fast([piece for _, piece in pieces])
    tokens: list[np.ndarray] = []
    starts: list[int] = []
    length, last = 0, -1
    for (n, _), encoding in zip(pieces, encoded, strict=True):
        ids = encoding.ids
        if n != last:
            starts.append(length)
            ids, last = [lead, *ids], n
        tokens.append(np.asarray(ids, np.uint16))
        length += len(ids)
    return np.concatenate(tokens), np.asarray(starts, np.int64)


def _pieces(text: str, size: int = 200_000) -> Iterator[str]:
    """Yields pieces that end just before a word's space, where the tokenizer splits anyway."""
    begin = 0
    while begin < len(text):
        end = begin + size
        match = re.compile(r"(?<=[a-z]) (?=[a-z])").search(text, min(end, len(text)))
        end = match.start() if match else len(text)
        yield text[begin:end]
        begin = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["clean", "tokenizer", "pack"])
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tokenizer", type=Path, help="needed by pack")
    args = parser.parse_args()
    if args.command == "clean":
        args.out.write_text(clean_corpus(args.inputs), encoding="utf-8")
    elif args.command == "tokenizer":
        texts = (
            piece for p in args.inputs for d in documents(read_text(p)) for piece in _pieces(d)
        )
        train_tokenizer(texts, args.vocab).save(str(args.out))
    else:
        if args.tokenizer is None:
            parser.error("pack needs --tokenizer, the file that the command tokenizer wrote")
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
        texts = [doc for path in args.inputs for doc in documents(read_text(path))]
        tokens, starts = pack_documents(tokenizer, texts)
        characters = sum(len(text.encode()) for text in texts)
        with open(args.out, "wb") as out:
            np.savez(out, tokens=tokens, starts=starts)
        print(json.dumps({"documents": len(texts), "bytes": characters, "tokens": len(tokens)}))


if __name__ == "__main__":
    main()
