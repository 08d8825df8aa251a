"""What a caller asks for and what comes back: requests, sampling parameters, events, completions.

All are frozen values. A parameter is checked when it is made, so that a bad one fails at the caller's line and never
inside a batch that others share.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxstate.errors import RequestError

MAX_STOP_IDS = 8
"""Most token ids that may end a request, and most end tokens that a model may have; both are compared on the device."""


def _check(ok: bool, param: str, value: object, want: str) -> None:
    if not ok:
        raise RequestError("unsupported_value", f"{param} is {value!r}; it must be {want}", param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _plain(value: Any) -> Any:
    """Values of numpy and JAX as Python's own; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen; the defaults are greedy.

    Args:
      max_tokens: most tokens to generate, at least 1.
      temperature: 0 (or below a millionth) takes the likeliest token; above, samples from the softened distribution.
      top_k: keep only the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches this share (Holtzman et al. 2019).
      min_p: drop tokens less likely than this share of the likeliest (Nguyen et al. 2024).
      seed: draws depend on (seed, request id, position) alone, never on the batch.
      stop: texts that end the request; the match and what follows it are not part of the text.
      stop_ids: token ids that end the request, beside the model's own end tokens.
      ignore_eos: go on past the model's own end tokens.

    Raises:
      RequestError: code `unsupported_value`, naming the parameter, its value and what it may be.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        _check(
            _is_int(self.max_tokens) and 1 <= self.max_tokens < 2**31,
            "max_tokens",
            self.max_tokens,
            "an int from 1 to 2**31 - 1",
        )
        _check(
            _is_number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "0 to 100",
        )
        _check(
            _is_int(self.top_k) and 0 <= self.top_k < 2**31,
            "top_k",
            self.top_k,
            "an int from 0 (which is off) to 2**31 - 1",
        )
        _check(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "above 0 and at most 1",
        )
        _check(
            _is_number(self.min_p) and 0 <= self.min_p < 1,
            "min_p",
            self.min_p,
            "at least 0 and below 1",
        )
        _check(
            _is_int(self.seed) and 0 <= self.seed < 2**32,
            "seed",
            self.seed,
            "an int from 0 to 2**32 - 1",
        )
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _check(
            isinstance(stop, tuple | list) and all(isinstance(s, str) and s for s in stop),
            "stop", stop, "a text or a list of texts, none of them empty",
        )  # fmt: skip
        _check(
            isinstance(self.stop_ids, tuple | list) and all(_is_int(i) and 0 <= i < 2**31 for i in self.stop_ids),
            "stop_ids", self.stop_ids, "a list of token ids",
        )  # fmt: skip
        _check(
            len(self.stop_ids) <= MAX_STOP_IDS,
            "stop_ids",
            self.stop_ids,
            f"at most {MAX_STOP_IDS} ids long",
        )
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))

    @property
    def filters(self) -> bool:
        """Whether some tokens are kept from being drawn, by top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, as token ids, and how to go on from it.

    Requests share the states of common prefixes only with requests of the same `cache_salt`.

    Raises:
      RequestError: code `empty_prompt` or `unsupported_value`.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    cache_salt: str = ""

    def __post_init__(self):
        _check(isinstance(self.id, str), "id", self.id, "a text")
        _check(isinstance(self.cache_salt, str), "cache_salt", self.cache_salt, "a text")
        _check(
            isinstance(self.sampling, SamplingParams), "sampling", self.sampling, "SamplingParams"
        )
        prompt = _plain(self.prompt)
        _check(
            isinstance(prompt, list | tuple) or hasattr(prompt, "__iter__"),
            "prompt", prompt, "a list of token ids",
        )  # fmt: skip
        prompt = tuple(prompt)
        if not prompt:
            raise RequestError(
                "empty_prompt", "the prompt has no tokens; give it at least one", "prompt"
            )
        # One pass for all that are as they should be; the first that is not is named.
        plain = all(type(token) is int for token in prompt)
        suspect = () if plain and min(prompt) >= 0 and max(prompt) < 2**31 else prompt
        for token in suspect:
            _check(
                _is_int(token) and 0 <= token < 2**31,
                "prompt",
                token,
                "a list of token ids, none negative",
            )
        object.__setattr__(self, "prompt", prompt)

    def __repr__(self) -> str:
        head = ", ".join(map(str, self.prompt[:6])) + (", …" if len(self.prompt) > 6 else "")
        return f"Request({self.id!r}, {len(self.prompt)} tokens [{head}], {self.sampling})"


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one request came to.

    `finish_reason` is `stop` (an end token or a stop text), `length` (max_tokens or the engine's max length), `aborted`
    or `error` (then `error` says why; the tokens are those made before it). `logprobs` are the log-probabilities of
    `tokens` under the model's unmodified distribution. `cached_tokens` prompt tokens were not computed because another
    request had left its state after them; if there are none, `cache_miss` says why (see `jaxstate.explain`). Times are
    seconds since the request was submitted.
    """

    id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    error: RequestError | None = None
    cached_tokens: int = 0
    cache_miss: str | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request: tokens made since the last event, and the text that they release.

    Text that may yet turn out to be the start of a stop text, or that ends inside a character, is held back until it
    is decided. The last event of a request carries its `completion`.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None = None


CACHE_MISSES = {
    "off": "prefix reuse is off (the engine was given no checkpoints)",
    "too_short": "the prompt has at most 64 tokens; states are kept every 64, and one token is always computed",
    "unknown": "no earlier prompt began like this one",
    "not_kept": "earlier prompts began like this one, but no state within what they share was kept, or it was let go",
}
"""What the reasons in `Completion.cache_miss` mean."""


def explain(completion: Completion) -> str:
    """Says where the prompt's state came from: how much was reused and, if nothing was, why."""
    prompt, cached = completion.prompt_tokens, completion.cached_tokens
    if cached:
        return (
            f"{cached} of {prompt} prompt tokens were reused from a state that an earlier request left; "
            f"{prompt - cached} were computed"
        )
    why = CACHE_MISSES.get(completion.cache_miss or "", "the request ended before it was read")
    return f"all {prompt} prompt tokens were computed: {why}"
