"""Texts that are read for the state after them, without anybody waiting for a token: pins and answers.

A pin is a prefix that is to be kept whatever happens; it is read like a prompt, in its turn. An answer is what a
request came to: whoever goes on from it starts from the state after its last whole 64 tokens. Decoding has left a state
too, but reading rounds differently, and a text must not depend on which of the two it started from. So the answer is
read again, in room that nothing else fills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxstate.errors import CapacityError, RequestError
from jaxstate.prefix import Key, block_keys, holder_of
from jaxstate.request import Request, SamplingParams
from jaxstate.schedule import Schedule, Waiting, budget_of
from pallas_kernels.rows import CHUNK


def pin(schedule: Schedule, tokens: Sequence[int], salt: str) -> Schedule:
    """The schedule in which the prefix is kept for ever, and read if nobody has.

    Raises:
      CapacityError: with it the pins would leave no room for a request of `max_len`, or it is longer than that.
      RequestError: it has fewer than 64 tokens, so that there is no state to keep.
    """
    key, reader = _pinned(tokens, salt), _reader(tokens, salt, "pin")
    if key in schedule.pins:
        return schedule
    spec = schedule.spec
    budget_of(reader.request, spec)
    for group in spec.names:
        # A request may start from a state that is not pinned.
        need = len(schedule.pins) + 1 + spec.capacity(group) + 1
        if need > spec.blocks(group) - 1:
            raise CapacityError(
                request="pin", group=group, need=need, capacity=spec.blocks(group) - 1,
                unit="blocks, for all pins, a request and what it starts from",
                remedy="unpin a prefix, or raise checkpoints",
            )  # fmt: skip
    schedule = dataclasses.replace(schedule, pins={**schedule.pins, key: reader})
    if key in schedule.index.nodes:
        return dataclasses.replace(schedule, index=schedule.index.pin(key))
    return dataclasses.replace(schedule, waiting=(*schedule.waiting, reader))


def unpin(schedule: Schedule, tokens: Sequence[int], salt: str) -> Schedule:
    """The schedule in which the prefix may be let go again.

    Raises:
      RequestError: it is not pinned.
    """
    key = _pinned(tokens, salt)
    if key not in schedule.pins:
        raise RequestError("unsupported_value", "the prefix is not pinned", "tokens")
    reader, index = schedule.pins[key], schedule.index
    pins = {k: p for k, p in schedule.pins.items() if k != key}
    waiting = tuple(w for w in schedule.waiting if w is not reader)
    index = index.pin(key, False) if key in index.nodes else index
    return dataclasses.replace(schedule, pins=pins, waiting=waiting, index=index)


def keep_answer(schedule: Schedule, request: Request, tokens: Sequence[int]) -> Schedule:
    """The schedule that reads the request's prompt and these tokens when it has room, if that gives a new state.

    The answers of longest ago are forgotten when there are more than rows.
    """
    prompt, spec = request.prompt, schedule.spec
    whole = (len(prompt) + len(tokens)) // CHUNK
    if not schedule.shape.checkpoints or whole <= (len(prompt) - 1) // CHUNK:
        return schedule
    if whole * CHUNK >= spec.max_len:
        return schedule  # nobody could go on from there
    reader = _reader((*prompt, *tokens), request.cache_salt, "answer")
    key = reader.keys[-1]
    if key in schedule.index.nodes or any(a.keys[-1] == key for a in schedule.answers):
        return schedule
    return dataclasses.replace(schedule, answers=(*schedule.answers, reader)[-spec.rows :])


def _pinned(tokens: Sequence[int], salt: str) -> Key:
    if len(tokens) < CHUNK:
        raise RequestError(
            "unsupported_value",
            f"a prefix of {len(tokens)} tokens cannot be pinned; states are kept every {CHUNK}",
            "tokens",
        )
    return block_keys(tokens, salt)[-1]


def _reader(tokens: Sequence[int], salt: str, reads: str) -> Waiting:
    text = tuple(tokens[: len(tokens) // CHUNK * CHUNK])
    keys = block_keys(text, salt)
    # It generates one token, which nobody hears of: what it is there for is the check of its scores.
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    request = Request(f"{holder_of(keys[-1])} {reads}", text, once, salt)
    return Waiting(request, np.array(text, np.int32), keys, reads=reads)
