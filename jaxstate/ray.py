"""Generating for a Ray dataset: what each worker of `ray.data.Dataset.map_batches` runs.

An answer depends on the row alone (its prompt, id and sampling parameters), never on the batch or the worker that it
came to. So a batch that Ray runs again after a worker died gives what the first run would have given.

Example:
  >>> dataset.map_batches(
  ...     Worker, fn_constructor_kwargs={"model": "demo", "id": "id"}, batch_size=256, num_gpus=1,
  ...     compute=ray.data.ActorPoolStrategy(size=8), max_restarts=4, max_task_retries=4,
  ... )
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxstate.errors import CapacityError, JaxstateError, RequestError
from jaxstate.request import Completion, Request, SamplingParams

_MISSING = [name for name in ("ray", "pyarrow") if importlib.util.find_spec(name) is None]
if _MISSING:
    raise ModuleNotFoundError(
        f"jaxstate.ray needs {' and '.join(_MISSING)}, not installed here: pip install 'jaxstate[ray]'"
    )

Batch = Any
"""A batch as Ray gives it: columns of numpy by name, or a pyarrow table."""

ADDED = ("text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "error_code", "error")
"""The columns that a worker adds."""

_WHOLE = ("max_tokens", "top_k", "seed")


class Worker:
    """Generates for batches with an engine of its own, on the devices that Ray gives it.

    The rows of a batch are generated together, with as many in flight as the engine has rows, so a batch of several
    times as many keeps the engine full. Rows come back in order with their columns, and with these added:

    - `text`, `tokens`: what was generated;
    - `finish_reason`: `stop`, `length`, or `error` for a row that failed;
    - `prompt_tokens`, and `cached_tokens` of them that were not computed, because another row began alike;
    - `error_code`, `error`: null, or why the row failed, as a word for programs and as a sentence.

    A row that cannot be served fails alone and at once. One that fails for a reason that may pass (scores that are not
    finite, a fault of the device) is tried `retries` times more. After a fault of the device the model is loaded anew;
    if it still cannot make a token the batch fails with that fault, for the device is broken and not the rows.

    Args:
      model: a folder that every worker can read, or `demo`.
      prompt: the column with the prompts as texts.
      tokens: the column with the prompts as lists of token ids, in place of `prompt`.
      id: a column of texts or whole numbers by which a row draws its tokens at a temperature above 0; the same id, seed
        and prompt draw the same. Without it, and where it is null, rows of the same prompt and seed draw the same.
      sampling: parameters of all rows, by the names of `SamplingParams`.
      row_sampling: names of parameters that have a column, or the column of each by its name; null leaves `sampling`'s.
      prefix: stands before the names of the columns that are added.
      retries: how often a row is tried again.
      **options: of `LM.load`: `sizes`, `dtype`.

    Raises:
      RequestError: a parameter that is not known or cannot be.
      CheckpointError, SpecError: as `LM.load`; or the model has no tokenizer and prompts are texts.
    """

    def __init__(
        self, model: str = "demo", *, prompt: str = "prompt", tokens: str | None = None,
        id: str | None = None, sampling: Mapping[str, Any] | None = None,
        row_sampling: Mapping[str, str] | Sequence[str] = (), prefix: str = "", retries: int = 2, **options: Any,
    ):  # fmt: skip
        # Ray imports this where the dataset is made too; JAX is needed, and takes its devices, here alone.
        from jaxstate.lm import LM, check_names, sampling_params

        if not isinstance(row_sampling, Mapping):
            names = (row_sampling,) if isinstance(row_sampling, str) else row_sampling
            row_sampling = dict(zip(names, names, strict=True))
        self._by_row = dict(row_sampling)
        check_names(self._by_row)
        self._sampling = dict(sampling or {})
        sampling_params(self._sampling)
        if retries < 0:
            raise RequestError(
                "unsupported_value", f"retries is {retries}; it must be 0 or more", "retries"
            )
        self._prompt, self._tokens, self._id = prompt, tokens, id
        self._prefix, self._retries = prefix, retries
        self._load = lambda: LM.load(model, **options)
        self.lm = self._load()
        if tokens is None:
            self.lm.request("a", SamplingParams(), "")  # without a tokenizer every row would fail
        self.lm.engine.compile()

    def __call__(self, batch: Batch) -> Batch:
        """The batch with a row's answer, or why there is none, in every row.

        Raises:
          RequestError: a column that is not there, that has no value of its kind, or that would be written over.
        """
        rows = self._requests(batch)
        answers = self._answers(dict.fromkeys(row for row in rows if isinstance(row, Request)))
        return _with_columns(
            batch, self._prefix, [answers[row] if isinstance(row, Request) else row for row in rows]
        )

    def _requests(self, batch: Batch) -> list[Request | RequestError]:
        there = _names(batch)
        taken = [self._prefix + name for name in ADDED if self._prefix + name in there]
        if taken:
            raise RequestError(
                "unsupported_value",
                f"the batch has columns of the names that are added: {', '.join(taken)}; give another prefix than "
                f"{self._prefix!r}, such as prefix='generated_'",
                "prefix",
            )
        if self._tokens is None:
            prompts = _column(batch, "prompt", self._prompt, str, "texts")
        else:
            prompts = _column(batch, "tokens", self._tokens, list, "lists of token ids")
        ids: list[Any] = [None] * len(prompts)
        if self._id is not None:
            ids = _column(batch, "id", self._id, (str, int, float), "texts or whole numbers")
        params = {
            name: _column(batch, f"row_sampling {name!r}", column)
            for name, column in self._by_row.items()
        }
        made: list[Request | RequestError] = []
        for i, prompt in enumerate(prompts):
            try:
                made.append(self._request(prompt, ids[i], {k: v[i] for k, v in params.items()}))
            except RequestError as error:
                made.append(error)
        return made

    def _request(self, prompt: Any, name: Any, given: Mapping[str, Any]) -> Request:
        if not isinstance(prompt, str if self._tokens is None else list):
            raise RequestError("wrong_type", f"the prompt is {_short(prompt)}", "prompt")
        name = _whole(name)
        if not isinstance(name, str | int | None) or isinstance(name, bool):
            raise RequestError(
                "wrong_type", f"the id is {_short(name)}; it must be a text or a whole number", "id"
            )
        given = {k: _whole(v) if k in _WHOLE else v for k, v in given.items() if v is not None}
        params = SamplingParams(**{**self._sampling, **given})
        request = self.lm.request(prompt, params, "" if name is None else str(name))
        if name is not None:
            return request
        # All that may differ between two rows without an id.
        content = f"{request.prompt} {params}".encode("utf-8", "surrogatepass")
        return Request(hashlib.blake2b(content, digest_size=16).hexdigest(), request.prompt, params)

    def _answers(self, requests: Iterable[Request]) -> dict[Request, Completion | RequestError]:
        answers: dict[Request, Completion | RequestError] = {}
        tries = dict.fromkeys(requests, 0)
        while tries:
            # An engine has one request of an id at a time.
            together: dict[str, Request] = {}
            for request in tries:
                together.setdefault(request.id, request)
            for request, answer in self._run(together.values()).items():
                passing = _failure(answer) is not None and not isinstance(answer, _Refused)
                if passing and tries[request] < self._retries:
                    tries[request] += 1
                else:
                    answers[request] = answer
                    del tries[request]
        return answers

    def _run(self, requests: Iterable[Request]) -> dict[Request, Completion | RequestError]:
        """What came of each of the requests, run together once."""
        from jax.errors import JaxRuntimeError

        engine, answers = self.lm.engine, {}
        running: dict[str, Request] = {}
        try:
            for request in requests:
                try:
                    engine.submit(request)
                    running[request.id] = request
                except RequestError as error:
                    answers[request] = _Refused(error.code, error.message, error.param)
                except CapacityError as error:
                    answers[request] = _Refused("too_long", str(error), "prompt")
            while running or not engine.idle:
                for event in engine.step():
                    if event.completion is not None:
                        answers[running.pop(event.id)] = event.completion
        except JaxRuntimeError as error:
            fault = str(error).partition("\n")[0]
            lost = RequestError("device_failed", f"the device failed while the row ran: {fault}")
            answers.update(dict.fromkeys(running.values(), lost))
            running.clear()
            self._renew()
        finally:
            for name in running:  # of a batch that fails; the next must not meet them
                engine.abort(name, quiet=True)
        return answers

    def _renew(self) -> None:
        """Loads the model anew and makes a token with it; raises what the device says if it cannot."""
        self.lm.close()
        self.lm = self._load()
        self.lm.generate([[0]], max_tokens=1)


class _Refused(RequestError):
    """What would be refused again."""


def _failure(answer: Completion | RequestError) -> RequestError | None:
    return answer if isinstance(answer, RequestError) else answer.error


def _names(batch: Batch) -> list[str]:
    if isinstance(batch, Mapping):
        return list(batch)
    if hasattr(batch, "column_names"):
        return list(batch.column_names)
    raise JaxstateError(
        f"a batch is a {type(batch).__name__}; leave out batch_format, or set it to 'numpy' or 'pyarrow'"
    )


def _column(batch: Batch, what: str, name: str, kind: Any = object, wanted: str = "") -> list[Any]:
    """A column as Python values, arrays as lists; RequestError unless it is there and has some of the kind."""
    names = _names(batch)
    there = f"the batch has the columns {', '.join(map(repr, names))}"
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RequestError(
            "missing_field", f"there is no column {name!r} for {what}; {there}{hint}", name
        )
    if isinstance(batch, Mapping):
        values = [_plain(value) for value in batch[name]]
    else:
        values = batch.column(name).to_pylist()
    # A column of numpy has nan where one of Arrow has null.
    values = [None if _is_null(value) else value for value in values]
    full = [value for value in values if value is not None]
    if full and not any(isinstance(value, kind) for value in full):
        raise RequestError(
            "wrong_type",
            f"the column {name!r} for {what} holds values such as {_short(full[0])}, not {wanted}; {there}",
            name,
        )
    return values


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _whole(value: Any) -> Any:
    # Whole numbers of numpy are floats where their column has a null.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:79]}…"


def _with_columns(batch: Batch, prefix: str, answers: Sequence[Completion | RequestError]) -> Batch:
    import pyarrow

    # Types that do not depend on what came, so that all batches of a dataset have the same.
    types = dict(zip(ADDED, (
        pyarrow.string(), pyarrow.list_(pyarrow.int32()), pyarrow.string(), pyarrow.int32(), pyarrow.int32(),
        pyarrow.string(), pyarrow.string(),
    ), strict=True))  # fmt: skip
    cells = list(zip(*map(_cells, answers), strict=True)) or [()] * len(ADDED)
    added = {
        prefix + name: pyarrow.array(values, types[name])
        for name, values in zip(ADDED, cells, strict=True)
    }
    if isinstance(batch, Mapping):
        return {**batch, **added}
    for name, values in added.items():
        batch = batch.append_column(name, values)
    return batch


def _cells(answer: Completion | RequestError) -> tuple:
    error = _failure(answer)
    why = (None, None) if error is None else (error.code, error.message)
    if isinstance(answer, RequestError):
        return ("", [], "error", 0, 0, *why)
    return (
        answer.text,
        answer.tokens,
        answer.finish_reason,
        answer.prompt_tokens,
        answer.cached_tokens,
        *why,
    )
