"""What a notebook imports: a model, its tokenizer and an engine as one thing that turns texts into texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxstate.compilation import use_persistent_cache
from jaxstate.engine import Engine, Report
from jaxstate.errors import CheckpointError
from jaxstate.models import load_model
from jaxstate.models.base import CausalLM
from jaxstate.request import Completion, Event, Request, SamplingParams
from jaxstate.sizing import Sizes
from jaxstate.text import Tokenizer

Prompt = str | Sequence[int]

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
        self.model, self.tokenizer, self.engine = model, tokenizer, engine

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
        model = load_model(folder, dtype=dtype)
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        return cls(
            model,
            tokenizer,
            Engine(model, sizes, tokenizer=tokenizer, poison=poison, report=report),
        )

    def request(self, prompt: Prompt, sampling: SamplingParams, request_id: str) -> Request:
        """The request for a prompt, given as text or as token ids.

        Raises:
          RequestError: the prompt is empty, or is text and the model has no tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise CheckpointError(
                    "the model folder has no tokenizer.json; give prompts as token ids"
                )
            prompt = self.tokenizer.encode(prompt)
        return Request(request_id, tuple(prompt), sampling)

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
        """
        params = SamplingParams(**sampling)
        names = [(i, p, str(i)) for i, p in enumerate(_as_list(prompts))]
        if n > 1:
            names = [(i, p, f"{i}/{k}") for i, p, _ in names for k in range(n)]
        requests = [self.request(prompt, params, name) for _, prompt, name in names]
        running: set[str] = set()
        try:
            for request in requests:
                self.engine.submit(request)
                running.add(request.id)
            for event in self.engine.run():
                if event.completion is not None:
                    running.discard(event.id)
                yield event
        finally:
            for request_id in running:
                self.engine.abort(request_id, quiet=True)

    def close(self) -> None:
        """Frees the model's and the engine's memory; the object cannot be used after."""
        del self.model, self.engine

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LM({self.model!r}, {self.engine!r})"


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], int) else many
