"""What a notebook imports: a model, its tokenizer and an engine as one thing that turns texts into texts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxstate.compilation import use_persistent_cache
from jaxstate.engine import Engine, Report
from jaxstate.errors import CheckpointError, JaxstateError, RequestError
from jaxstate.models import load_model
from jaxstate.models.base import CausalLM
from jaxstate.models.tensors import read_whole
from jaxstate.prefix_store import Stored
from jaxstate.request import Completion, Event, Request, SamplingParams
from jaxstate.runner import Runner
from jaxstate.sequences import Outputs, Sequences
from jaxstate.sizing import Sizes
from jaxstate.state import Snapshot
from jaxstate.text import Tokenizer

Prompt = str | Sequence[int] | np.ndarray

DEMO = Path(__file__).parent / "demo_model"


def model_folder(name: str | os.PathLike) -> Path:
    """The folder that a model's name stands for: `demo` is the model that comes with jaxstate.

    Raises:
      CheckpointError: there is no such folder.
    """
    folder = DEMO if name == "demo" else Path(name)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {str(name)!r}; give a folder with config.json, or 'demo'"
        )
    return folder


class LM:
    """A language model ready to generate.

    Example:
      >>> with LM.load("demo") as lm:
      ...     print(lm.generate("Once upon a time", max_tokens=32)[0].text)
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer | None, engine: Engine):
        self.tokenizer, self._streaming = tokenizer, False
        self._open: tuple[CausalLM, Engine] | None = model, engine

    @classmethod
    def load(
        cls, name: str | os.PathLike = "demo", *, dtype: Any = None, sizes: Sizes | None = None,
        poison: bool | None = None, report: Report | None = None,
    ) -> LM:  # fmt: skip
        """Loads a model folder (`demo` for the model that comes with jaxstate) and its tokenizer, if it has one.

        Raises:
          CheckpointError: the folder is missing or is not a model that jaxstate can load.
          SpecError: sizes that cannot be, or that do not fit the device.
        """
        use_persistent_cache()
        folder = model_folder(name)
        # What several devices share may be more than one of them has room for.
        shared = sizes is not None and (sizes.tensor_parallel or 1) > 1
        model = load_model(folder, dtype=dtype, read=not shared)
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        return cls(
            model,
            tokenizer,
            Engine(model, sizes, tokenizer=tokenizer, poison=poison, report=report),
        )

    def request(self, prompt: Prompt, sampling: SamplingParams, request_id: str) -> Request:
        """The request for a prompt, given as text or as token ids.

        Raises:
          CheckpointError: the prompt is text and the model has no tokenizer.
          RequestError: the prompt is empty, or is neither text nor token ids.
        """
        return Request(request_id, self._tokens(prompt), sampling)

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise CheckpointError(
                    "the model folder has no tokenizer.json; give prompts as token ids"
                )
            prompt = self.tokenizer.encode(prompt)
        try:
            ids: Any = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            ids = None
        if ids is None or ids.ndim != 1:
            raise RequestError(
                "wrong_type",
                f"a prompt is a text or a list of token ids, not {prompt!r:.80}",
                "prompt",
            )
        return tuple(ids.tolist())

    def generate(
        self, prompts: Prompt | Iterable[Prompt], *, n: int = 1, **sampling: Any
    ) -> list[Completion]:
        """Continues every prompt `n` times, in order; the keywords are those of `SamplingParams`."""
        events = self.stream(prompts, n=n, **sampling)
        done = {e.id: e.completion for e in events if e.completion is not None}
        return [done[key] for key in sorted(done, key=lambda key: [int(k) for k in key.split("/")])]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], *, n: int = 1, **sampling: Any
    ) -> Iterator[Event]:
        """As `generate`, yielding events as tokens are made; if it is left early, what still runs is aborted.

        Ids count the prompts from 0 (`"3"`, or `"3/1"` for one of several continuations), so that draws repeat. Several
        continuations of a prompt read it once and share its state.

        Raises:
          RequestError: a parameter that is not known or cannot be, an empty prompt, or another stream of this LM that
            has not ended.
          CapacityError: a prompt that leaves no room for a token; none of the prompts is run then.
        """
        params, many = sampling_params(sampling), _as_list(prompts)
        names = [
            (p, str(i) if n == 1 else f"{i}/{k}") for i, p in enumerate(many) for k in range(n)
        ]
        requests = [self.request(prompt, params, name) for prompt, name in names]
        if self._streaming:
            raise RequestError(
                "busy", "another stream of this LM has not ended; read it to its end or close() it"
            )
        engine, running, self._streaming = self.engine, set(), True
        try:
            for request in requests:
                engine.submit(request)
                running.add(request.id)
            while running or not engine.idle:
                for event in engine.step():
                    mine = event.id in running
                    if event.completion is not None:
                        running.discard(event.id)
                    if mine:
                        yield event
        finally:
            self._streaming = False
            for request_id in running:
                engine.abort(request_id, quiet=True)

    @property
    def model(self) -> CausalLM:
        """The model; JaxstateError once the LM is closed."""
        return self._parts()[0]

    @property
    def engine(self) -> Engine:
        """The engine that generates; JaxstateError once the LM is closed."""
        return self._parts()[1]

    def _parts(self) -> tuple[CausalLM, Engine]:
        if self._open is None:
            raise JaxstateError("this LM is closed; load it again")
        return self._open

    def prefill(self, prompts: Prompt | Iterable[Prompt]) -> Sequences:
        """Reads the prompts into a value that `decode` goes on from; ids count from 0, as in `stream`.

        Raises:
          CapacityError: a prompt is longer than `max_len`.
          RequestError: an empty prompt, or a token that the model does not know.
        """
        return self._runner.prefill(
            [self.request(p, SamplingParams(), str(i)) for i, p in enumerate(_as_list(prompts))]
        )

    def decode(
        self, seqs: Sequences, steps: int, *, forced: Sequence[Sequence[int]] = (), **sampling: Any
    ) -> tuple[Sequences, Outputs]:
        """The sequences after up to `steps` more tokens each, and these tokens; `seqs` stays as it is.

        A sequence that comes to an end token does not read it, so that going on from there gives it again. The keywords
        are those of `SamplingParams` but for `max_tokens` and `stop`; `forced` tokens are taken instead of drawn ones.

        Raises:
          CapacityError: a sequence would grow past `max_len`; nothing was dispatched.
          RequestError: a keyword or `steps` that cannot be, or sequences of another model.
        """
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1:
            raise RequestError(
                "unsupported_value", f"steps is {steps!r}; it must be an int >= 1", "steps"
            )
        if "max_tokens" in sampling:
            raise RequestError("unknown_field", "decode takes steps, not max_tokens", "max_tokens")
        params = sampling_params({**sampling, "max_tokens": steps})
        return self._runner.decode(seqs, params, forced)

    def restore(self, snapshot: Snapshot) -> Sequences:
        """The snapshot's sequences on the device, as they were.

        Raises:
          SnapshotError: it is of another model, layout or dtype.
          CapacityError: a sequence is longer than `max_len`.
        """
        return self._runner.restore(snapshot)

    def save_prefixes(self, folder: str | os.PathLike, *, most_bytes: int | None = None) -> Stored:
        """Writes the states kept for prompts that begin alike to a folder, for `load_prefixes` of a later run.

        There is a file for each, the most valuable first, as far as `most_bytes` has room for them.

        Raises:
          SnapshotError: the folder has states of another model or layout, or cannot be written.
          SpecError: prefix reuse is off.
        """
        return self.engine.prefixes.save(folder, most_bytes=most_bytes)

    def load_prefixes(self, folder: str | os.PathLike) -> Stored:
        """Reads back what `save_prefixes` left, as far as there is room; texts stay what they are without it.

        What was computed with other sizes or versions, or is not whole, is passed over and named in the result.

        Raises:
          SnapshotError: the folder is not there, or has states of another model or layout.
          SpecError: prefix reuse is off.
        """
        return self.engine.prefixes.load(folder)

    def pin(self, prompt: Prompt, *, salt: str = "") -> int:
        """Keeps the state after this beginning of prompts until `unpin`; returns how many of its tokens are kept.

        That are as many as there are whole 64s, so that texts with the same ones are one pin, and one `unpin` ends it.
        The end of a text may be cut into other tokens when more text follows.

        Raises:
          CapacityError: with it the pins would leave no room for one request, or it is longer than `max_len`.
          RequestError: it has fewer than 64 tokens, or one that the model does not know.
          SpecError: prefix reuse is off.
        """
        kept = self.engine.prefixes.pin(self._tokens(prompt), salt)
        self.settle()
        return kept

    def unpin(self, prompt: Prompt, *, salt: str = "") -> None:
        """Lets the state after this beginning of prompts go like any other; RequestError when it is not pinned."""
        self.engine.prefixes.unpin(self._tokens(prompt), salt)

    def settle(self) -> None:
        """Reads what was generated, so that a prompt that goes on from it starts after it; worth it between turns."""
        self.engine.prefixes.settle()

    @functools.cached_property
    def _runner(self) -> Runner:
        engine = self.engine
        return Runner(read_whole(self.model), engine.shape, self.tokenizer, poison=engine.poison)

    def close(self) -> None:
        """Frees the model's and the engine's memory; the LM cannot be used after."""
        self._open = None
        self.__dict__.pop("_runner", None)

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "LM(closed)" if self._open is None else f"LM({self.model!r}, {self.engine!r})"


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(getattr(prompts, "shape", ())) == 1:
        return [np.asarray(prompts)]  # one prompt of token ids, as an array
    if not isinstance(prompts, Iterable):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], int | np.integer) else many


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The parameters of these names and values; RequestError names one that is not known or cannot be."""
    check_names(given)
    return SamplingParams(**given)


def check_names(given: Iterable[str]) -> None:
    """Raises RequestError unless all of these are names of sampling parameters."""
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise RequestError("unknown_field", f"there is no parameter {name!r}; {hint}", name)
