"""Tokenizer files and text that grows token by token."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxstate.errors import CheckpointError, RequestError
from jaxstate.text import TextStream, Tokenizer

WORDS = ("ab", "c d", "axb", "abc", "\N{GRINNING FACE}", "é", "the cat", " sat")


def byte_level(*words: str) -> Tokenizer:
    """One token for each byte, in byte order, then one for each given text."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_of)
    spelled = ["".join(pieces[b] for b in word.encode()) for word in words]
    vocab = {piece: i for i, piece in enumerate([*pieces, *spelled])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(backend)


def byte_of(piece: str) -> int:
    """The byte of a byte-level piece: printable ones are themselves, the rest run from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if ord(piece) < 0x100:
        return ord(piece)
    return [b for b in range(0x100) if b not in printable][ord(piece) - 0x100]


TOKENIZER = byte_level(*WORDS)
ID = {word: 256 + i for i, word in enumerate(WORDS)} | {"e": ord("e")}


def stream(ids, stop=()) -> tuple[str, TextStream]:
    """Push one token at a time until stopped, as an engine does."""
    text = TextStream(TOKENIZER, stop)
    pieces = []
    for i in ids:
        pieces.append(text.push([i]))
        if text.stopped:
            break
    return "".join([*pieces, text.finish()]), text


def test_bytes_are_tokens_of_this_tokenizer():
    assert TOKENIZER.decode("héllo".encode()) == "héllo"
    assert TOKENIZER.encode("héllo") == list("héllo".encode())
    assert TOKENIZER.vocab_size == 256 + len(WORDS) + 1


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        ("bcd", "abc de", 3),  # there is a blank between c and d
        ("b c", "abc de", 3),  # and none between b and c
        ("bc", "a", 2),
        ("ab", "", 1),
        ("e", "abc d", 3),
        ("de", "abc ", 3),
    ],
)
def test_stop_text_that_does_not_align_with_tokens(stop, text, kept):
    got, state = stream([ID["ab"], ID["c d"], ID["e"]], [stop])
    assert (got, state.kept_tokens) == (text, kept)
    assert state.stopped == (kept < 3 or stop in ("e", "de"))


def test_stop_text_inside_one_token():
    got, state = stream([ID["axb"], ID["e"]], ["x"])
    assert (got, state.text, state.kept_tokens, state.stopped) == ("a", "a", 1, True)


def test_the_match_that_starts_first_wins():
    assert stream([ID["c d"], ID["ab"]], ["b", "d", "a"])[0] == "c "
    assert stream([ID["ab"], ID["c d"]], ["b", "abc"])[0] == ""
    # "abc" might have started before "b"; it did not.
    got, state = stream([ID["ab"], ID["e"]], ["b", "abc"])
    assert (got, state.kept_tokens) == ("a", 1)
    # Nothing comes after "ab", so nothing is left to wait for.
    assert stream([ID["ab"]], ["b", "abc"])[0] == "a"


def test_of_two_that_start_together_the_shorter_does_not_wait():
    for stop in (["b", "bc"], ["bc", "b"]):
        text = TextStream(TOKENIZER, stop)
        assert text.push([ID["ab"]]) == "a"
        assert text.stopped
        both = TextStream(TOKENIZER, stop)
        both.push([ID["ab"], ID["c d"]])
        assert both.kept_tokens == text.kept_tokens == 1


def test_text_that_may_start_a_stop_text_is_held_back():
    text = TextStream(TOKENIZER, ["cat."])
    assert text.push([ID["the cat"]]) == "the "
    assert text.push(b" ") == "cat "
    assert text.push([ID["the cat"]]) == "the "
    assert text.finish() == "cat"
    assert text.text == "the cat the cat"
    assert not text.stopped


def test_pushed_after_the_stop_is_ignored():
    text = TextStream(TOKENIZER, ["c"])
    assert text.push([ID["ab"], ID["c d"], ID["e"]]) == "ab"
    assert text.push([ID["e"]]) == text.finish() == ""
    assert (text.text, text.kept_tokens) == ("ab", 2)


def test_a_character_over_two_tokens_is_one_character():
    grin = "\N{GRINNING FACE}".encode()
    text = TextStream(TOKENIZER)
    assert [text.push(grin[:2]), text.push(grin[2:]), text.finish()] == [
        "", "\N{GRINNING FACE}", "",
    ]  # fmt: skip


def test_half_a_character_at_the_end_is_one_replacement_mark():
    text = TextStream(TOKENIZER)
    assert text.push(b"a\xf0\x9f") == ""
    assert text.finish() == "a\N{REPLACEMENT CHARACTER}"
    assert text.kept_tokens == 3


def test_bytes_that_are_no_character_do_not_hold_up_what_follows():
    assert stream([*b"a\xf0", *b"b"])[0] == "a\N{REPLACEMENT CHARACTER}b"


def test_special_tokens_are_not_text():
    end = TOKENIZER.vocab_size - 1
    assert stream([*b"a", end, *b"b"])[0] == "ab"
    assert stream([*b"a", end])[0] == "a"


@pytest.mark.parametrize("stop", [[""], ["a", ""], ""])
def test_an_empty_stop_text_is_refused(stop):
    if stop == "":
        stop = [stop]
    with pytest.raises(RequestError, match="empty") as caught:
        TextStream(TOKENIZER, stop)
    assert caught.value.param == "stop"


ids = st.lists(
    st.integers(0, TOKENIZER.vocab_size - 1) | st.sampled_from([*ID.values()]), max_size=24
)
ascii_ids = st.lists(st.sampled_from([*b"abc ", *ID.values()]), max_size=24)
stops = st.lists(st.text("abc dé", min_size=1, max_size=4), max_size=3)


def cut(text: str, stop: list[str]) -> str:
    return text[: min([at for s in stop if (at := text.find(s)) >= 0], default=len(text))]


@settings(deadline=None)
@given(ids | ascii_ids, stops, st.data())
def test_pieces_are_the_decoded_tokens_cut_at_the_first_stop(ids, stop, data):
    text = TextStream(TOKENIZER, stop)
    pieces, rest = [], ids
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        pieces.append(text.push(rest[:n]))
        rest = rest[n:]
        assert "".join(pieces) == text.text
        assert cut(TOKENIZER.decode(ids), stop).startswith(text.text)
    pieces.append(text.finish())
    assert "".join(pieces) == text.text == cut(TOKENIZER.decode(ids), stop)
    assert text.stopped == any(s in TOKENIZER.decode(ids) for s in stop)
    # However the tokens came, the same number of them is kept, and that many hold a whole stop
    # text.
    single, state = stream(ids, stop)
    assert (single, state.kept_tokens) == (text.text, text.kept_tokens)
    if text.stopped:
        kept = TOKENIZER.decode(ids[: text.kept_tokens])
        assert any(kept[len(single) :].startswith(s) for s in stop)
        fewer = TOKENIZER.decode(ids[: text.kept_tokens - 1])
        assert not any(fewer[len(single) :].startswith(s) for s in stop)


def byte_fallback(*words: str) -> Tokenizer:
    """Words with a mark for a blank, and bytes for all else; no byte of a run is text if one is not."""
    names = [*(f"<0x{i:02X}>" for i in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


FALLBACK = byte_fallback("\u2581the", "\u2581", "cat", "\u2581a", "b", "é")


@settings(deadline=None)
@given(st.lists(st.integers(128, 261) | st.integers(0, 261), max_size=12), stops)
def test_bytes_that_are_no_text_are_no_error_with_any_tokenizer(ids, stop):
    text = TextStream(FALLBACK, stop)
    pieces = [text.push([i]) for i in ids]
    assert "".join([*pieces, text.finish()]) == text.text
    assert text.text == cut(text.text, stop)


@settings(deadline=None)
@given(
    st.lists(st.text("aé€\N{GRINNING FACE} ", min_size=1).map(str.encode) | st.integers(256, 261))
)
def test_text_spelled_in_bytes_is_that_text(parts):
    ids = [i for part in parts for i in (part if isinstance(part, bytes) else [part])]
    text = TextStream(FALLBACK)
    pieces = [text.push([i]) for i in ids]
    assert "".join([*pieces, text.finish()]) == FALLBACK.decode(ids)


@pytest.fixture
def folder(tmp_path):
    TOKENIZER._tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def test_the_end_token_is_the_one_the_folder_names(folder):
    assert Tokenizer.load(folder).eos_id == TOKENIZER.vocab_size - 1  # <|endoftext|> by custom
    write(folder / "config.json", {"eos_token_id": [7, 8]})
    assert Tokenizer.load(folder).eos_id == 7
    write(folder / "config.json", {"eos_token_id": 0})
    assert Tokenizer.load(folder).eos_id == 0
    write(folder / "tokenizer_config.json", {"eos_token": {"content": "a"}})
    assert Tokenizer.load(folder).eos_id == ord("a")
    write(folder / "tokenizer_config.json", {"eos_token": "nowhere"})
    with pytest.raises(CheckpointError, match=r"'nowhere'.*tokenizer\.json does not have"):
        Tokenizer.load(folder)


def test_a_prompt_is_never_cut_or_padded(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {
        "max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    }  # fmt: skip
    write(folder / "tokenizer.json", content)
    assert Tokenizer.load(folder).encode("abcdef") == list(b"abcdef")


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a tokenizer file"):
        Tokenizer.load(tmp_path)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(RequestError, match="surrogate at character 1") as caught:
        TOKENIZER.encode("a\ud83d")
    assert (caught.value.code, caught.value.param) == ("bad_encoding", "prompt")
