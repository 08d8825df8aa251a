"""Lines into requests, completions into rows."""

import json
import math

import pytest

from jaxstate.errors import CapacityError, RequestError
from jaxstate.request import Completion, SamplingParams
from jaxstate.serve import protocol
from jaxstate.serve.lines import Line
from jaxstate.serve.protocol import Job, Plain, Refusal, Rules, Text, encode_row, guess_format

RULES = Rules(
    sampling=SamplingParams(max_tokens=7, temperature=0.5, stop=("END",)),
    logprobs=False,
    encode=lambda text: list(text.encode()),
    vocab_size=300,
)


def parse(text: str | bytes, form=Plain, number=3, rules=RULES) -> Job | Refusal:
    data = text if isinstance(text, bytes) else text.encode()
    return form(rules).parse(Line(number, data))


def test_a_line_with_everything():
    job = parse(
        '{"id":"r","prompt_ids":[0,299],"max_tokens":3,"temperature":1,"top_k":2,"top_p":0.5,'
        '"min_p":0.25,"seed":9,"stop":["a","b"],"ignore_eos":true,"logprobs":true}'
    )
    assert isinstance(job, Job)
    assert (job.line, job.logprobs) == (3, True)
    assert (job.request.id, job.request.prompt) == ("r", (0, 299))
    assert job.request.sampling == SamplingParams(
        max_tokens=3, temperature=1.0, top_k=2, top_p=0.5, min_p=0.25, seed=9, stop=("a", "b"),
        ignore_eos=True,
    )  # fmt: skip


def test_what_a_line_leaves_out_is_the_run_s_own():
    for text in ('{"prompt":"hé"}', '{"prompt":"hé","id":null,"max_tokens":null,"stop":null}'):
        job = parse(text)
        assert isinstance(job, Job)
        assert (job.request.id, job.request.prompt) == ("3", tuple("hé".encode()))
        assert job.request.sampling == RULES.sampling
        assert not job.logprobs


def test_one_stop_text_needs_no_list():
    job = parse('{"prompt":"a","stop":"x"}')
    assert isinstance(job, Job)
    assert job.request.sampling.stop == ("x",)


REFUSED = [
    ("nonsense", "bad_json", None, "not JSON.*column 1; with --input-format text every line"),
    ('{"prompt": "a"', "bad_json", None, r"column \d+$"),
    ('["a"]', "bad_json", None, "not an object"),
    ('"a"', "bad_json", None, "not an object.*--input-format text"),
    ("1984", "bad_json", None, "not an object.*--input-format text"),
    ("{} {}", "bad_json", None, "column 4"),
    ('{"prompt":"a","prompt":"b"}', "bad_json", "prompt", "'prompt' stands there twice"),
    ('{"prompt":"a","temperature":NaN}', "bad_json", None, "NaN is not JSON"),
    ('{"prompt":"a","temperature":-Infinity}', "bad_json", None, "-Infinity is not JSON"),
    ('{"prompt":"a","temperature":1e999}', "unsupported_value", "temperature", "inf"),
    ('{"prompt":"a","seed":' + "1" * 5000 + "}", "bad_json", None, r"more than 4,300 digits$"),
    ("[" * 100_000, "bad_json", None, r"cannot be read: it is nested too deeply$"),
    ('{"prompt":"a","temprature":1}', "unknown_field", "temprature", "mean 'temperature'"),
    ('{"prompt":"a","messages":[]}', "unknown_field", "messages", "the fields are id, prompt"),
    ('{"prompt":"a","\\ud83d":1}', "unknown_field", None, r"'\\ud83d'"),
    ("{}", "missing_field", "prompt", "no prompt"),
    ('{"prompt":null}', "missing_field", "prompt", "no prompt"),
    ('{"prompt":"a","prompt_ids":[1]}', "unsupported_value", "prompt", "both"),
    ('{"prompt":""}', "empty_prompt", "prompt", "no tokens"),
    ('{"prompt_ids":[]}', "empty_prompt", "prompt", "no tokens"),
    ('{"prompt_ids":[1,null]}', "wrong_type", "prompt_ids", r"prompt_ids\[1\] is null.*integer"),
    ('{"prompt_ids":[1,true]}', "wrong_type", "prompt_ids", r"prompt_ids\[1\]"),
    ('{"prompt_ids":[5,-1]}', "unsupported_value", "prompt_ids", r"\[1\] is -1.*0 to 299"),
    ('{"prompt_ids":[300]}', "unsupported_value", "prompt_ids", r"\[0\] is 300.*0 to 299"),
    ('{"prompt":5}', "wrong_type", "prompt", "prompt is an integer; it must be a string"),
    ('{"prompt":["a"]}', "wrong_type", "prompt", "prompt is a list; it must be a string"),
    ('{"prompt":"a","id":1}', "wrong_type", "id", "id is an integer; it must be a string"),
    ('{"prompt":"a","max_tokens":1.5}', "wrong_type", "max_tokens", "number.*must be an integer"),
    ('{"prompt":"a","max_tokens":true}', "wrong_type", "max_tokens", "must be an integer"),
    ('{"prompt":"a","max_tokens":0}', "unsupported_value", "max_tokens", "max_tokens is 0"),
    ('{"prompt":"a","temperature":"1"}', "wrong_type", "temperature", "must be a number"),
    ('{"prompt":"a","temperature":-1}', "unsupported_value", "temperature", "-1"),
    ('{"prompt":"a","top_p":0}', "unsupported_value", "top_p", "above 0"),
    ('{"prompt":"a","seed":1' + "0" * 30 + "}", "unsupported_value", "seed", r"2\*\*32"),
    ('{"prompt":"a","stop":["x",""]}', "unsupported_value", "stop", "empty"),
    ('{"prompt":"a","stop":[1]}', "wrong_type", "stop", r"stop\[0\]"),
    ('{"prompt":"a","stop":["\\ud83d"]}', "bad_encoding", "stop", "lone surrogate"),
    ('{"prompt":"a\\ud83d"}', "bad_encoding", "prompt", "lone surrogate"),
    ('{"prompt":"a","id":"\\udc00"}', "bad_encoding", "id", "lone surrogate"),
    (b'{"prompt":"\xff"}', "bad_encoding", None, "not UTF-8.*byte 12"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "param", "message"), REFUSED)
def test_a_line_that_cannot_be_served_says_why(text, code, param, message):
    refused = parse(text)
    assert isinstance(refused, Refusal)
    assert (refused.error.code, refused.error.param) == (code, param)
    assert (refused.line, refused.id) == (3, "3")
    row = protocol.error_row(refused.line, refused.id, refused.error)
    with pytest.raises(RequestError, match=message):
        raise refused.error
    assert json.loads(encode_row(row))["error"]["message"] == refused.error.message


def test_a_whole_surrogate_pair_is_a_character():
    job = parse('{"prompt":"\\ud83d\\ude00"}')
    assert isinstance(job, Job)
    assert bytes(job.request.prompt).decode() == "\N{GRINNING FACE}"


def test_an_error_row_has_the_id_that_the_line_gave():
    refused = parse('{"id":"mine","prompt":"a","temprature":1}')
    assert isinstance(refused, Refusal)
    assert refused.id == "mine"


def test_the_second_line_with_an_id_is_refused_and_names_the_first():
    form = Plain(RULES)
    found = [
        form.parse(Line(number, text.encode()))
        for number, text in enumerate(
            [
                '{"id":"a","prompt":"x"}',
                '{"prompt":"x"}',
                '{"id":"a","prompt":"y"}',
                '{"id":"2","prompt":"z"}',
                '{"id":"6","prompt":"z"}',
                '{"prompt":"z"}',
                '{"id":"b","prompt":"z","oops":1}',
                '{"id":"b","prompt":"z"}',
            ],
            start=1,
        )
    ]
    codes = [job.error.code if isinstance(job, Refusal) else "ok" for job in found]
    assert codes == [
        "ok", "ok", "duplicate_id", "duplicate_id", "ok", "duplicate_id", "unknown_field", "ok",
    ]  # fmt: skip
    assert "line 1 too" in found[2].error.message
    assert "line 2 too" in found[3].error.message
    assert "line 5 too" in found[5].error.message


def test_a_line_of_text_is_a_prompt_as_it_stands():
    job = parse('  {"prompt": "x"} ', Text)
    assert isinstance(job, Job)
    assert bytes(job.request.prompt) == b'  {"prompt": "x"} '
    assert (job.request.id, job.request.sampling) == ("3", RULES.sampling)
    refused = parse(b"a\xff", Text)
    assert isinstance(refused, Refusal)
    assert refused.error.code == "bad_encoding"


def test_a_line_cut_short_is_refused():
    for form in (Plain, Text):
        refused = form(RULES).parse(Line(1, b'{"prompt":"a"}', cut=True))
        assert isinstance(refused, Refusal)
        assert refused.error.code == "too_long"


def test_text_needs_a_tokenizer_and_ids_do_not():
    rules = Rules(SamplingParams(), True, None, 300)
    refused, job = parse('{"prompt":"a"}', rules=rules), parse('{"prompt_ids":[1]}', rules=rules)
    assert isinstance(refused, Refusal)
    assert refused.error.code == "no_tokenizer"
    assert isinstance(job, Job)
    assert job.logprobs


@pytest.mark.parametrize(
    ("name", "first", "form"),
    [
        ("a.jsonl", b"hello", "jsonl"),
        ("a.ndjson", b"hello", "jsonl"),
        ("a.txt", b'{"prompt":"a"}', "text"),
        ("-", b' {"prompt":"a"}', "jsonl"),
        ("-", b"{broken", "jsonl"),
        ("-", b"Once upon", "text"),
        ("prompts", b"[1]", "text"),
    ],
)
def test_the_format_is_that_of_the_name_else_of_the_first_line(name, first, form):
    assert guess_format(name, first) == form


def completion(**changes) -> Completion:
    values = {
        "id": "r", "prompt_tokens": 4, "tokens": (5, 6), "logprobs": (-0.5, -math.inf),
        "text": "hi", "finish_reason": "stop", "cached_tokens": 3,
    }  # fmt: skip
    return Completion(**(values | changes))


def job(**changes) -> Job:
    parsed = parse('{"id":"r","prompt":"abcd"}')
    assert isinstance(parsed, Job)
    return Job(parsed.line, parsed.request, **changes)


def strict(data: bytes):
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data, parse_constant=refuse)


def test_a_row_of_a_request_that_ended():
    data = encode_row(protocol.result_row(job(), completion()))
    assert data.endswith(b"}\n")
    assert strict(data) == {
        "id": "r",
        "line": 3,
        "text": "hi",
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "cached_tokens": 3,
            "cache_miss": None,
        },
    }


def test_a_log_probability_that_is_not_finite_is_null():
    row = strict(encode_row(protocol.result_row(job(logprobs=True), completion())))
    assert (row["tokens"], row["logprobs"]) == ([5, 6], [-0.5, None])


def test_a_request_that_failed_is_an_error_row():
    failed = completion(error=RequestError("non_finite", "scores are not finite", None))
    assert strict(encode_row(protocol.result_row(job(), failed))) == {
        "id": "r",
        "line": 3,
        "error": {"code": "non_finite", "message": "scores are not finite", "param": None},
    }


def test_a_row_is_one_line_to_every_reader():
    text = "a\u2028b\u2029c\x85d\ne\rf\x0bg\x1ch\x00é\N{GRINNING FACE}"
    data = encode_row(protocol.result_row(job(), completion(text=text)))
    assert len(data.decode().splitlines()) == 1
    assert strict(data)["text"] == text


def test_what_does_not_fit_is_too_long():
    error = protocol.as_request_error(
        CapacityError(
            request="r", group="g", need=9, capacity=8, unit="tokens", remedy="raise max_len from 8"
        )
    )
    assert (error.code, error.param) == ("too_long", "prompt")
    assert error.message.endswith("needs 9 tokens, has room for 8; raise --max-len from 8")
    same = RequestError("empty_prompt", "no")
    assert protocol.as_request_error(same) is same


@pytest.mark.parametrize(
    "text",
    [
        '{"%s": 1}' % ("k" * 2_000_000),
        '{"prompt": "a", "id": 1, "id": 2, "%s": 1}' % ("k" * 2_000_000),
        '{"%s": 1, ' % ("k" * 2_000_000) + '"%s": 2}' % ("k" * 2_000_000),
        '{"prompt": "a", "stop": ["%s", ""]}' % ("s" * 2_000_000),
        '{"prompt_ids": [%s]}' % ("9" * 4000),
        '{"prompt": "a", "seed": %s}' % ("9" * 4000),
    ],
)  # fmt: skip
def test_an_error_row_does_not_repeat_megabytes_of_the_line(text):
    refusal = protocol.Plain(RULES).parse(Line(1, text.encode()))
    assert isinstance(refusal, protocol.Refusal)
    row = protocol.error_row(refusal.line, refusal.id, refusal.error)
    assert len(protocol.encode_row(row)) < 1000
