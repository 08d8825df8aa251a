"""A small storm of aborted and retried prompts that begin alike, over the toy model; and the fault it is for."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jaxstate import admission, scheduler
from jaxstate.engine import Engine
from jaxstate.errors import JaxstateError
from jaxstate.prefix import Checkpoint, holder_of
from jaxstate.request import Request, SamplingParams
from jaxstate.sizing import Sizes
from pallas_kernels.rows import CHUNK
from tests.mutants.watch import MODEL, QUICK, by_hand
from tests.toy import VOCAB

SIZES = Sizes(rows=3, max_len=320, chunk_tokens=64, decode_steps=2, checkpoints=4)


@functools.cache
def _programs() -> dict[str, Any]:
    """Programs of the code as it is; the fault is the host's and changes none of them."""
    engine = Engine(MODEL, SIZES, poison=True)
    return {k: engine.lower(k).compile(compiler_options=QUICK) for k in ("prefill", "decode")}


def storm() -> dict[str, str]:
    """Three workers read prompts that share 256 tokens; each is aborted on the way, or not, and comes back."""
    engine = Engine(MODEL, SIZES, poison=True)
    engine._programs = _programs()
    rng, symptoms, ended = np.random.default_rng(12), {}, 0
    stem = tuple(rng.integers(0, VOCAB, 256).tolist())
    tails = [tuple(rng.integers(0, VOCAB, 20 + 9 * i).tolist()) for i in range(3)]
    asked = {f"worker {i}": (*stem, *tail) for i, tail in enumerate(tails)}

    def submit(name: str, step: int) -> None:
        # Another salt now and then, so that the storm begins anew.
        sampling, salt = SamplingParams(max_tokens=3), f"round {step // 12}"
        engine.submit(Request(name, asked[name], sampling, cache_salt=salt))

    try:
        for name in asked:
            submit(name, 0)
        for step in range(60):
            for event in engine.step():
                done = event.completion
                if done is None or done.finish_reason == "aborted":
                    continue
                ended += 1
                if done.tokens != by_hand(asked[event.id], 3):
                    symptoms.setdefault("text", f"{event.id} after {step} steps: {done.tokens}")
                submit(event.id, step)
            for running in engine.schedule.running:
                if engine.schedule.counts.reading[running.row] and rng.random() < 0.3:
                    engine.abort(running.request.id)
                    submit(running.request.id, step)
    except JaxstateError as error:
        symptoms["refused"] = str(error)
    else:
        if ended < 6:
            symptoms["lost"] = f"{ended} requests ended"
    return symptoms


def publishes_when_planned(patch: pytest.MonkeyPatch) -> None:
    """All states that a prompt will leave enter the index when its first step is planned, as block caches do.

    Attention's blocks can bear it, since whoever hits one runs after whoever fills it; a state that is not written
    before the writer is aborted is one that nobody ever computed.
    """
    promised: dict[tuple[int, int], dict[str, int]] = {}

    def leave_all(draft, page):
        for span in page.spans:
            leave(draft, page, *span)

    def leave(draft, page, running, read, end_):
        """Reserves and publishes every state still wanted; writes those that this step comes to."""
        slot = 0
        for position in running.wants:
            if (running.order, position) in promised:
                continue
            one = dict.fromkeys(draft.spec.names, 1)
            if not draft.make_room(one):
                continue
            key = running.keys[position // CHUNK - 1]
            holder = f"{holder_of(key)} {running.order}"
            ids = draft.ledger.allocate(holder, one)
            blocks = {group: block[0] for group, block in ids.items()}
            promised[running.order, position] = blocks
            for group, block in blocks.items():
                page.zero[group].append(block)
            if key in draft.index.nodes:
                draft.ledger.release(holder)
                continue
            node = Checkpoint(key, position, blocks, holder, running.request.id, position)
            draft.ledger.seal(holder, ids)
            draft.index = draft.index.insert(node)
        for position in [p for p in running.wants if read < p <= end_]:
            blocks = promised.get((running.order, position))
            if blocks is not None and slot < draft.shape.checkpoints:
                page.checkpoints.append((running.row, slot, position - read, blocks))
                slot += 1

    patch.setattr(scheduler, "_leave_checkpoints", leave_all)
    # Nobody waits for what is taken to be there.
    patch.setattr(admission, "_coming", lambda draft, row: [])
