"""An engine that needs no device: it says every prompt backwards, one token a step."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import jaxstate.serve.model
from jaxstate.errors import CapacityError, RequestError
from jaxstate.request import Completion, Event, Request
from jaxstate.serve.cli import main

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small checkpoint with random weights, and a tokenizer with a token for each ASCII character."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "mamba2" / name, folder)
    vocab = {chr(0x20 + i): i for i in range(95)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def environment():
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"PYTHONPATH": path}


class Backwards:
    """Serves `rows` requests at a time; a token is a byte, and byte 0 in a prompt is its ruin."""

    def __init__(self, rows: int = 2, max_len: int = 40):
        self.rows, self.max_len = rows, max_len
        self.waiting: list[Request] = []
        self.running: dict[str, tuple[Request, int]] = {}
        self.compiled = self.most = self.steps = 0
        self.prefixes = SimpleNamespace(unsettled=False)
        self.before_step = lambda: None

    def compile(self) -> None:
        self.compiled += 1

    def submit(self, request: Request) -> None:
        if len(request.prompt) >= self.max_len:
            raise CapacityError(
                request=request.id, group="g", need=len(request.prompt) + 1, capacity=self.max_len,
                unit="tokens in a row", remedy="raise max_len",
            )  # fmt: skip
        assert request.id not in self.running
        self.waiting.append(request)
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def step(self) -> list[Event]:
        self.before_step()
        self.steps += 1
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting.pop(0)
            self.running[request.id] = (request, 0)
        return [self._advance(request, made) for request, made in list(self.running.values())]

    def _advance(self, request: Request, made: int) -> Event:
        said = request.prompt[::-1]
        limit = min(len(said), request.sampling.max_tokens)
        tokens, made = said[made : made + 1], made + 1
        self.running[request.id] = (request, made)
        text = bytes(tokens).decode(errors="replace")
        error = RequestError("non_finite", "scores are not finite") if 0 in tokens else None
        if made < limit and error is None:
            return Event(request.id, tokens, text)
        del self.running[request.id]
        done = Completion(
            id=request.id, prompt_tokens=len(said), tokens=said[:made], logprobs=(-1.0,) * made,
            text=bytes(said[:made]).decode(errors="replace"), error=error,
            finish_reason="error" if error else "length" if made < len(said) else "stop",
            first_token_s=0.5,
        )  # fmt: skip
        return Event(request.id, tokens, text, done)


class FakeModel:
    """What `jaxstate.serve.model.load` returns, around that engine."""

    def __init__(self, **options):
        self.engine = Backwards(**options)
        self.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
        self.vocab_size, self.load_s, self.rows = 256, 0.25, self.engine.rows
        self.prompt_bytes, self.fingerprint = None, "1"

    def describe(self) -> list[tuple[str, str]]:
        return [("group", "one"), ("rows", str(self.rows))]

    def stats(self) -> dict:
        blocks = {"g": {"peak": self.engine.rows, "pool": self.engine.rows}}
        names = ("rows", "max_len", "chunk_tokens", "decode_steps", "tensor_parallel")
        about = {"device": "none", "jax": "0", "sizes": dict.fromkeys(names, 2)}
        return {"blocks": blocks, "engine": {"compile_s": 0.125}, **about}

    def identity(self) -> dict[str, str]:
        return {"model": "Backwards", "fingerprint": self.fingerprint, "dtype": "none"}


@pytest.fixture
def backwards():
    return Backwards


@pytest.fixture
def fake_model():
    return FakeModel


@pytest.fixture
def rows_of():
    """Rows in a file or a text, each checked to be strict JSON."""

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    def rows_of(data) -> list[dict]:
        text = data if isinstance(data, str) else data.read_bytes().decode()
        assert text == "" or text.endswith("\n")
        return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]

    return rows_of


@pytest.fixture
def model(fake_model, monkeypatch):
    """The model that the command line gets, and with what it asked for it."""
    model = fake_model()
    model.asked = []

    def load(name, *, report, **options):
        model.asked.append((name, options))
        report("compiling decode, 2 rows")
        return model

    monkeypatch.setattr(jaxstate.serve.model, "load", load)
    return model


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"id": f"r{i}", "prompt": "abc"[: 1 + i % 3]}) for i in range(9))
    )
    return path


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.jsonl"


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])
