"""What the host knows of a request while it runs: its tokens so far, its text, and when it has to end."""

from __future__ import annotations

import dataclasses
import time

from jaxstate.errors import RequestError
from jaxstate.request import Completion, Event, Request
from jaxstate.text import TextStream, Tokenizer


@dataclasses.dataclass
class Progress:
    """One request from submission to completion; the engine feeds it tokens as steps are observed."""

    request: Request
    budget: int
    stop_ids: frozenset[int]
    stream: TextStream | None
    submitted: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    told: int = 0  # tokens that events have reported
    cached: int = 0  # prompt tokens taken from a checkpoint
    miss: str | None = None  # why there was none
    first_token_s: float = 0.0
    preempted: bool = False

    @classmethod
    def start(
        cls, request: Request, budget: int, eos: tuple[int, ...], tokenizer: Tokenizer | None
    ) -> Progress:
        stops = frozenset(request.sampling.stop_ids) | (
            frozenset() if request.sampling.ignore_eos else frozenset(eos)
        )
        stream = TextStream(tokenizer, request.sampling.stop) if tokenizer is not None else None
        return cls(request, budget, stops, stream, time.perf_counter())

    def push(self, tokens: list[int], logprobs: list[float], at: int | None = None) -> Event:
        """Takes the tokens of one observed step; the event has a completion if they end the request.

        `at` is the place of the first of them; those before the next one due are made again after a preemption.
        """
        again = 0 if at is None else len(self.tokens) - at
        tokens, logprobs = tokens[again:], logprobs[again:]
        if tokens and not self.tokens:
            self.first_token_s = time.perf_counter() - self.submitted
        end = next((i for i, token in enumerate(tokens) if token in self.stop_ids), None)
        count = len(tokens) if end is None else end + 1
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        # The end token itself is counted but is not text.
        piece = self._push_text(tokens[: count if end is None else end])
        if end is not None or (self.stream is not None and self.stream.stopped):
            return self.finish("stop", piece=piece)
        if len(self.tokens) >= self.budget:
            return self.finish("length", piece=piece)
        return Event(self.request.id, self._news(), piece)

    def finish(self, reason: str, *, error: RequestError | None = None, piece: str = "") -> Event:
        """The last event: what was held back, and the completion; `piece` is text released but not yet told."""
        if self.stream is not None and not self.stream.stopped:
            rest = self.stream.finish()
            self.text += rest
            piece += rest
        if self.stream is not None and self.stream.stopped:
            kept = self.stream.kept_tokens
            del self.tokens[kept:], self.logprobs[kept:]
            reason = "stop" if reason == "length" else reason
        completion = Completion(
            id=self.request.id, prompt_tokens=len(self.request.prompt), tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs), text=self.text, finish_reason=reason, error=error,
            cached_tokens=self.cached, cache_miss=self.miss,
            first_token_s=self.first_token_s, total_s=time.perf_counter() - self.submitted,
        )  # fmt: skip
        return Event(self.request.id, self._news(last=True), piece, completion)

    def break_off(self, before: Event | None) -> Event:
        """The last event of a request whose scores are not finite, with the news of the same step, if there was any."""
        position = len(self.request.prompt) + len(self.tokens)
        error = RequestError(
            "non_finite",
            f"the model's scores for position {position} are not finite; the request was ended there",
        )
        last = self.finish("error", error=error)
        if before is None:
            return last
        tokens, text = before.tokens + last.tokens, before.text + last.text
        return dataclasses.replace(last, tokens=tokens, text=text)

    def _news(self, *, last: bool = False) -> tuple[int, ...]:
        """Tokens not told yet, but for those that a stop text may yet take back."""
        upto = len(self.tokens) if last or self.stream is None else self.stream.settled_tokens
        news = tuple(self.tokens[self.told : upto])
        self.told += len(news)
        return news

    def _push_text(self, tokens: list[int]) -> str:
        if self.stream is None or not tokens:
            return ""
        piece = self.stream.push(tokens)
        self.text += piece
        return piece
