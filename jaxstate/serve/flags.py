"""The flags of the command line and the help that teaches them."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
from typing import Any

from jaxstate.request import SamplingParams
from jaxstate.serve import protocol

PROG = "python -m jaxstate.serve"
STORE_BYTES = "8GiB"
AUTO = "auto"
SIZES = ("rows", "max_len", "chunk_tokens", "decode_steps", "checkpoints", "data_parallel",
         "tensor_parallel")  # fmt: skip

DESCRIPTION = """\
Generate text for every line of a file. One line in, one row out, as soon as it is done;
blank lines give none.

  python -m jaxstate.serve MODEL [options]         generate (also: ... batch MODEL)
  python -m jaxstate.serve info MODEL [options]    show state layout and memory, generate nothing
"""

EXAMPLES = """\
examples:
  python -m jaxstate.serve demo -i examples/prompts.jsonl -o results.jsonl
  python -m jaxstate.serve ./my-mamba -i prompts.jsonl --temperature 0.8 --seed 1 > results.jsonl
  echo "Once upon a time" | python -m jaxstate.serve demo --max-tokens 32
  python -m jaxstate.serve info demo --rows 64

several processes, of one machine or many, as one job: start the same command once for each, with its number
  python -m jaxstate.serve demo -i prompts.jsonl -o results.jsonl \\
    --coordinator node0:1234 --processes 4 --process-id 0        (and 1, 2, 3)
  srun python -m jaxstate.serve demo -i prompts.jsonl -o results.jsonl --processes auto
  All see the same files. Each takes lines as it has room and keeps its rows in a file in
  results.jsonl.parts; when all are done, process 0 makes them the output, in the order of lines.
  When one is gone the others stop and say which. Start the job again, with the same or another
  number of processes (1 is one), and it goes on where it was: no line is lost or answered twice.

an input is all JSON lines or all plain text, a prompt a line: its name decides (.jsonl, .txt), else
its first line, else --input-format. A line of JSON:
  {"prompt": "Once upon a time"}
  {"id": "r-17", "prompt_ids": [5, 17, 3], "max_tokens": 64, "temperature": 0.7, "stop": ["\\n"]}
  fields: id, prompt or prompt_ids, max_tokens, temperature, top_k, top_p, min_p, seed, stop,
  ignore_eos, logprobs. What a line leaves out is taken from the flags. A line without an id gets
  its line number as one; ids are strings and no two lines may share one.

a row of output is JSON, in the order in which lines finish:
  {"id": "r-17", "line": 2, "text": "…", "finish_reason": "stop" or "length",
   "usage": {"prompt_tokens": 3, "completion_tokens": 41, "cached_tokens": 0,
             "cache_miss": "too_short"}}
  {"id": "18", "line": 18, "error": {"code": "too_long", "message": "…", "param": "prompt"}}
  error codes: bad_json, bad_encoding, unknown_field, wrong_type, unsupported_value, missing_field,
  empty_prompt, too_long, duplicate_id, no_tokenizer, non_finite.

exit codes: 0 every line has its text; 1 some rows are errors; 2 wrong command line, model or file;
  3 another process of the job is gone or stopped; 4 could not go on (disk full, device lost);
  130, 143 interrupted; 141 nobody reads the output.
  Rows written before an interruption are whole.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that says which option was probably meant by one that it does not know."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            given = [word.split("=")[0] for word in unknown if word.startswith("-")]
            near = [match for flag in given for match in difflib.get_close_matches(flag, known, 1)]
            hint = f"; did you mean {' and '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options


def version() -> str:
    """The version that is installed; `unknown` for a source tree that is not."""
    try:
        return importlib.metadata.version("jaxstate")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def batch_parser() -> argparse.ArgumentParser:
    """Return the flags of `batch`."""
    parser = _Parser(
        prog=PROG,
        usage=f"{PROG} [batch] MODEL [-i FILE] [-o FILE] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    parser.add_argument("--version", action="version", version=f"jaxstate {version()}",
        help="show the version and exit")  # fmt: skip
    add = parser.add_argument_group("input and output").add_argument
    add(
        "-i",
        "--input",
        default="-",
        metavar="FILE",
        help="lines to read; - is standard input (default)",
    )
    add("--input-format", choices=("auto", *protocol.FORMS), default="auto",
        help="auto looks at the file's name, then at its first line")  # fmt: skip
    add(
        "-o",
        "--output",
        default="-",
        metavar="FILE",
        help="rows to write; - is standard output (default)",
    )
    add("--overwrite", action="store_true", help="replace an output file that has something in it")
    add(
        "--logprobs",
        action="store_true",
        help="add the token ids and their log-probabilities to rows",
    )
    add("--progress", choices=("auto", "plain", "none"), default="auto",
        help="on standard error: a live line on a terminal, else a plain one every few seconds")  # fmt: skip
    add("--stats", metavar="FILE", help="write the summary as JSON")
    add = parser.add_argument_group("several processes, one job").add_argument
    add("--processes", type=_processes, metavar="N",
        help="how many there are; auto asks the launcher (Slurm, Open MPI, … as jax.distributed does)")  # fmt: skip
    add("--process-id", type=_count, metavar="I", help="which of them this is, from 0")
    add("--coordinator", type=_address, metavar="HOST:PORT",
        help="where the others find process 0, at a port of its host that is free")  # fmt: skip
    add("--join-timeout", type=_seconds, default=300.0, metavar="S",
        help="seconds to wait until all are there (300)")  # fmt: skip
    add("--heartbeat-timeout", type=_seconds, default=20.0, metavar="S",
        help="seconds after which a process that is not heard of is gone (20)")  # fmt: skip
    add = parser.add_argument_group("prompts that begin alike").add_argument
    add("--prefix-store", type=_folder, metavar="DIR",
        help="read states that earlier runs kept from this folder, and write this run's when it ends")  # fmt: skip
    add("--prefix-store-bytes", type=size_in_bytes, metavar="N",
        help=f"what the folder may take, in bytes or as 500MiB or 2TiB ({STORE_BYTES}); when it"
        " takes more, the least valuable states in it are removed")  # fmt: skip
    add = parser.add_argument_group("sampling, where a line does not say").add_argument
    default = SamplingParams()
    add(
        "--max-tokens",
        type=_integer,
        metavar="N",
        help=f"tokens to generate at most ({default.max_tokens})",
    )
    add("--temperature", type=_number, metavar="T", help="0 takes the likeliest token (0)")
    add(
        "--top-k",
        type=_integer,
        metavar="K",
        help="keep only the K likeliest tokens; 0 keeps all (0)",
    )
    add(
        "--top-p",
        type=_number,
        metavar="P",
        help="keep the likeliest tokens up to this probability (1)",
    )
    add(
        "--min-p",
        type=_number,
        metavar="P",
        help="drop tokens below this share of the likeliest (0)",
    )
    add(
        "--seed", type=_integer, metavar="N", help="draws depend on seed, id and position alone (0)"
    )
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on past the model's end token")
    return parser


def info_parser() -> argparse.ArgumentParser:
    """Return the flags of `info`."""
    parser = _Parser(
        prog=f"{PROG} info",
        description="Show a model's state layout, bytes per sequence and the rows that fit.",
        allow_abbrev=False,
    )
    _add_model(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder with config.json, safetensors and tokenizer.json, "
        "or demo for the small model that comes with jaxstate",
    )  # fmt: skip
    add = parser.add_argument_group(
        "static sizes, chosen for the device where not given"
    ).add_argument
    add("--rows", type=_size, metavar="N",
        help="sequences in flight on each device that is used (what memory has room for, at most 256;"
        " CPU: 8)")  # fmt: skip
    add("--max-len", type=_length, metavar="N",
        help="longest sequence, prompt and generated tokens (131072)")  # fmt: skip
    add(
        "--chunk-tokens",
        type=_size,
        metavar="N",
        help="prompt tokens that one step reads (2048; CPU: 256)",
    )
    add(
        "--decode-steps",
        type=_size,
        metavar="N",
        help="tokens that each row generates in one dispatch (16; CPU: 8)",
    )
    add("--checkpoints", type=_count, metavar="N",
        help="states kept for prompts that begin alike (what memory has room for, at most 1024; CPU: 256 MiB);"
        " 0 turns prefix reuse off")  # fmt: skip
    add("--data-parallel", type=_size, metavar="N",
        help="devices to spread the prompts over; each has the model and rows of its own (1)")  # fmt: skip
    add("--tensor-parallel", type=_size, metavar="N",
        help="devices that share the heads and channels of one model, for each of the former (1)")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16", "float16"),
        help="of weights and activations (that of the files; CPU: float32); recurrent state is float32"
        " always")  # fmt: skip


def _processes(text: str) -> int | str:
    return text if text == AUTO else _whole(text, 1, ", and it is no auto either")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not HOST:PORT such as node0:1234")
    return text


def _seconds(text: str) -> float:
    value = _number(text)
    if not 1 <= value <= 10**6:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not between 1 and a million seconds")
    return value


def _count(text: str) -> int:
    return _whole(text, 0)


def _size(text: str) -> int:
    return _whole(text, 1)


def _length(text: str) -> int:
    return _whole(text, 2, ", a token of prompt and a generated one")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from error


def size_in_bytes(text: str) -> int:
    number, unit = text, 1
    for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1):
        if text.endswith(name):
            number, unit = text.removesuffix(name), 1024**power
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size such as 500000 or 500MiB")
    return int(number) * unit


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the folder's name is empty")
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from error


def _whole(text: str, least: int, why: str = "") -> int:
    value = _integer(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}{why}")
    return value
