"""Bytes into lines."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstate.serve import lines
from jaxstate.serve.lines import Line, LineReader


def read(data: bytes, *writes: bytes) -> list[Line]:
    """Lines of what a pipe carried."""
    source, sink = os.pipe()
    for part in (data, *writes):
        os.write(sink, part)
    os.close(sink)
    reader = LineReader(source)
    found = []
    while not reader.ended:
        found += [line] if (line := reader.next()) is not None else []
    os.close(source)
    return found


def test_byte_order_mark_crlf_blank_lines_and_no_final_newline():
    found = read(b'\xef\xbb\xbf{"a"}\r\n\r\n  \n\n{"b"}')
    assert found == [Line(1, b'{"a"}'), Line(5, b'{"b"}')]


def test_only_a_newline_ends_a_line():
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\rg".encode()
    assert read(text + b"\nh\n") == [Line(1, text), Line(2, b"h")]


def test_an_empty_input_has_no_lines():
    assert read(b"") == read(b"\n\r\n") == read(b"\xef\xbb\xbf\n") == []


def test_a_line_may_arrive_in_pieces():
    assert read(b"ab", b"c\nd", b"", b"e\n") == [Line(1, b"abc"), Line(2, b"de")]


def test_a_line_too_long_is_known_as_such_and_not_kept(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE", 8)
    monkeypatch.setattr(lines, "_CHUNK", 3)
    found = read(b"12345678\n123456789\n" + b"x" * 100 + b"\nabc\n")
    assert [(line.number, line.cut) for line in found] == [
        (1, False), (2, True), (3, True), (4, False),
    ]  # fmt: skip
    assert (found[0].data, found[3].data) == (b"12345678", b"abc")
    assert all(len(line.data) <= 8 for line in found)


def test_nothing_yet_is_not_the_end():
    source, sink = os.pipe()
    reader = LineReader(source)
    assert reader.next(timeout=0.01) is None
    assert not reader.ended
    os.write(sink, b"a\nb")
    assert reader.next() == Line(1, b"a")
    assert reader.next(timeout=0.01) is None, "b may go on"
    os.close(sink)
    assert reader.next() == Line(2, b"b")
    assert reader.next() is None
    assert reader.ended
    os.close(source)


def test_no_more_is_read_than_is_asked_for(tmp_path):
    path = tmp_path / "many"
    path.write_bytes(b"".join(b"%07d\n" % i for i in range(100_000)))
    fd = os.open(path, os.O_RDONLY)
    reader = LineReader(fd)
    assert reader.next() == Line(1, b"0000000")
    assert os.lseek(fd, 0, os.SEEK_CUR) <= lines._CHUNK < path.stat().st_size
    assert reader.bytes_taken == 8
    os.close(fd)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("byte", [b"\0", b"\n"])
def test_an_input_that_never_gives_a_line_does_not_keep_the_caller(monkeypatch, byte):
    """A device without lines and a file of blank ones look like this; signals went unheard."""
    reads = []
    monkeypatch.setattr(lines.os, "read", lambda fd, size: reads.append(fd) or byte * size)
    fd = os.open(os.devnull, os.O_RDONLY)
    reader = LineReader(fd)
    for timeout in (0.0, 0.1):
        reads.clear()
        assert reader.next(timeout) is None
        assert 1 <= len(reads) <= 4
    assert not reader.ended
    os.close(fd)


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@settings(deadline=None)
@given(data=st.lists(st.sampled_from([b"\n", b"\r", b"a", b" ", b"\xc3\xa9", b"\xff"])))
def test_lines_are_those_of_a_plain_split(chunk, data):
    data = b"x" + b"".join(data)  # no byte order mark here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK", chunk)
        found = read(data)
    split = [part.removesuffix(b"\r") for part in data.split(b"\n")]
    assert found == [Line(i, part) for i, part in enumerate(split, 1) if part.strip()]
