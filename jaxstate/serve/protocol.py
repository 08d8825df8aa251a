"""What a line of input may say, and what a row of output says: the file contract.

Every line of input that is not blank gives exactly one row. A line that cannot be served gives an
error row with a stable code; nothing in a line is ignored. Rows are strict JSON: a number that is
not finite is null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from jaxstate.errors import CapacityError, RequestError
from jaxstate.request import Completion, Request, SamplingParams
from jaxstate.serve.lines import MAX_LINE, Line


class PlainLine(msgspec.Struct, kw_only=True):
    """The fields of a line of JSON; null is the same as left out."""

    id: str | None = None
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None


FIELDS = PlainLine.__struct_fields__
SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name in FIELDS)

_SHORT = 100  # characters of a user's value that a message repeats

_NAMES = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
_NAMES |= {"array": "a list", "object": "an object", "null": "null"}


@dataclasses.dataclass(frozen=True)
class Job:
    """A line that became a request."""

    line: int
    request: Request
    logprobs: bool = False


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A line that did not, and why."""

    line: int
    id: str
    error: RequestError


@dataclasses.dataclass(frozen=True)
class Rules:
    """What lines are read against: defaults of this run and facts of its model."""

    sampling: SamplingParams
    logprobs: bool
    encode: Callable[[str], list[int]] | None  # None: the model has no tokenizer
    vocab_size: int
    prompt_bytes: int | None = None  # a longer text cannot fit; None: no such bound is known


class Plain:
    """Lines of JSON, one object each."""

    name = "jsonl"

    def __init__(self, rules: Rules):
        self._rules = rules
        self._lines: dict[str, int] = {}  # by id; the one thing that grows with the file

    def parse(self, line: Line) -> Job | Refusal:
        """Return the request that a line asks for, or why it is refused."""
        name = str(line.number)
        try:
            fields = _read_object(line)
            if isinstance(given := fields.get("id"), str) and _is_text(given):
                name = given
            content = _read_fields(fields)
            if (first := self._lines.setdefault(name, line.number)) != line.number:
                raise RequestError(
                    "duplicate_id", f"id {_short(name)} is that of line {first} too", "id"
                )
            return _job(line, name, content, self._rules)
        except RequestError as error:
            return Refusal(line.number, name, error)

    def skip(self, line: Line) -> None:
        """Take note of the id of a line that somebody else answers."""
        with contextlib.suppress(RequestError):
            fields = _read_object(line)
            content = _read_fields(fields)
            name = str(line.number) if content.id is None else content.id
            self._lines.setdefault(name, line.number)


class Text:
    """Plain text, one prompt a line."""

    name = "text"

    def __init__(self, rules: Rules):
        self._rules = rules

    def parse(self, line: Line) -> Job | Refusal:
        """Return the request of a line, or why it is refused."""
        name = str(line.number)
        try:
            return _job(line, name, PlainLine(prompt=_decode(line)), self._rules)
        except RequestError as error:
            return Refusal(line.number, name, error)

    def skip(self, line: Line) -> None:
        """Nothing to do: an id is a line's own number."""


FORMS = {form.name: form for form in (Plain, Text)}


def guess_format(name: str, first_line: bytes) -> str:
    """Return the format of an input: by its name, else by how its first line begins."""
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return Plain.name
    if name.endswith(".txt"):
        return Text.name
    return Plain.name if first_line.lstrip().startswith(b"{") else Text.name


_LOOKS_LIKE_JSON = re.compile(rf'\s*\{{\s*"({"|".join(FIELDS)})"\s*:'.encode())


def looks_like_json(line: bytes) -> bool:
    """Whether a line begins as an object with one of the fields."""
    return _LOOKS_LIKE_JSON.match(line) is not None


def result_row(job: Job, completion: Completion) -> dict[str, Any]:
    """Return the row of a request that ended, well or badly."""
    if completion.error is not None:
        return error_row(job.line, job.request.id, completion.error)
    row = {
        "id": job.request.id,
        "line": job.line,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.tokens),
            "cached_tokens": completion.cached_tokens,
            "cache_miss": completion.cache_miss,
        },
    }
    if job.logprobs:
        row |= {"tokens": completion.tokens, "logprobs": completion.logprobs}
    return row


def error_row(line: int, name: str, error: RequestError) -> dict[str, Any]:
    """Return the row of a line that failed."""
    message = error.message
    if len(message) > 6 * _SHORT:  # it repeats a value that was not made short before
        message = f"{message[: 3 * _SHORT]} … {message[-3 * _SHORT :]}"
    what = {"code": error.code, "message": message, "param": error.param}
    return {"id": name, "line": line, "error": what}


def encode_row(row: dict[str, Any]) -> bytes:
    """Return a row as one line of strict JSON in UTF-8, with its newline."""
    data = msgspec.json.encode(row)
    # JSON allows these three in a string, but many a reader takes them for the end of a line.
    for character in ("\x85", "\u2028", "\u2029"):
        data = data.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return data + b"\n"


def as_request_error(error: RequestError | CapacityError) -> RequestError:
    """Return an error as a row can carry it: what does not fit is too long."""
    if isinstance(error, RequestError):
        return error
    return RequestError("too_long", str(error).replace("max_len", "--max-len"), "prompt")


def _job(line: Line, name: str, content: PlainLine, rules: Rules) -> Job:
    given = {field: getattr(content, field) for field in SAMPLING_FIELDS}
    given = {field: value for field, value in given.items() if value is not None}
    sampling = dataclasses.replace(rules.sampling, **given)
    request = Request(name, tuple(_prompt(content, rules)), sampling)
    logprobs = rules.logprobs if content.logprobs is None else content.logprobs
    return Job(line.number, request, logprobs)


def _prompt(content: PlainLine, rules: Rules) -> list[int]:
    if content.prompt is not None and content.prompt_ids is not None:
        raise RequestError(
            "unsupported_value", "prompt and prompt_ids are both given; give one of them", "prompt"
        )
    if content.prompt_ids is not None:
        for i, token in enumerate(content.prompt_ids):
            if not 0 <= token < rules.vocab_size:
                raise RequestError(
                    "unsupported_value",
                    f"prompt_ids[{i}] is {_short(token)}; the model's ids run from 0 to "
                    f"{rules.vocab_size - 1}",
                    "prompt_ids",
                )
        return content.prompt_ids
    if content.prompt is None:
        raise RequestError(
            "missing_field", "there is no prompt; give prompt (a string) or prompt_ids", "prompt"
        )
    if rules.encode is None:
        raise RequestError(
            "no_tokenizer",
            "the model has no tokenizer.json to read text with; give prompt_ids",
            "prompt",
        )
    # Before it is tokenized: that takes seconds for megabytes, in which no row would advance.
    if (
        rules.prompt_bytes is not None
        and (size := len(content.prompt.encode())) > rules.prompt_bytes
    ):
        raise RequestError(
            "too_long",
            f"the prompt has {size:,} bytes; one of more than {rules.prompt_bytes:,} has more tokens "
            "than a sequence can have; raise --max-len, or shorten the prompt",
            "prompt",
        )
    return rules.encode(content.prompt)


def _decode(line: Line) -> str:
    if line.cut:
        raise RequestError("too_long", f"the line is longer than {MAX_LINE >> 20} MiB", None)
    try:
        return line.data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            "bad_encoding", f"the line is not UTF-8: {error.reason} at byte {error.start + 1}"
        ) from error


def _read_object(line: Line) -> dict[str, Any]:
    text = _decode(line)
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RequestError(
            "bad_json",
            f"the line is not JSON: {error.msg} at column {error.colno}{_hint_text(text)}",
        ) from error
    except RequestError:
        raise
    except RecursionError as error:
        raise RequestError(
            "bad_json", "the line cannot be read: it is nested too deeply"
        ) from error
    except ValueError as error:  # what is left: Python reads no integer of so many digits
        most = sys.get_int_max_str_digits()
        raise RequestError(
            "bad_json", f"the line cannot be read: a number in it has more than {most:,} digits"
        ) from error
    if not isinstance(content, dict):
        raise RequestError(
            "bad_json",
            f'the line is JSON, but not an object such as {{"prompt": …}}{_hint_text(text)}',
        )
    return content


def _hint_text(line: str) -> str:
    """Return what to do when lines are prompts, for a line that does not try to be an object."""
    if line.lstrip().startswith("{"):
        return ""
    return "; with --input-format text every line is a prompt as it stands"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RequestError(
            "bad_json", f"the key {_short(twice)} stands there twice", _printable(twice)
        )
    return content


def _no_constant(name: str) -> None:
    raise RequestError("bad_json", f"{name} is not JSON; numbers are finite")


def _read_fields(fields: dict[str, Any]) -> PlainLine:
    for name in fields:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(FIELDS)}"
            raise RequestError(
                "unknown_field", f"unknown field {_short(name)}; {hint}", _printable(name)
            )
    try:
        content = msgspec.convert(fields, PlainLine)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    for name in ("id", "prompt", "stop"):
        value = getattr(content, name)
        if not all(
            _is_text(text) for text in (value if isinstance(value, list) else [value or ""])
        ):
            raise RequestError(
                "bad_encoding", f"{name} has a lone surrogate, which is no character", name
            )
    return content


def _wrong_type(message: str) -> RequestError:
    match = re.fullmatch(r"Expected `(.+)`, got `(.+)` - at `\$\.((\w+).*)`", message)
    if match is None:
        return RequestError("wrong_type", message)
    want, got, path, param = match.groups()
    wants = [_NAMES.get(kind, kind) for kind in want.split(" | ") if kind != "null"]
    return RequestError(
        "wrong_type", f"{path} is {_NAMES.get(got, got)}; it must be {' or '.join(wants)}", param
    )


def _is_text(value: str) -> bool:
    """Whether a string has no half of a surrogate pair, and so can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(value: str) -> str | None:
    return value[:_SHORT] if _is_text(value) else None


def _short(value: object) -> str:
    """Return a value as a message shows it: rows do not repeat megabytes of a line."""
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
