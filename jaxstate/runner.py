"""Runs the engine's steps on values: plans made and checked for each call, programs that donate nothing.

One set of programs serves every number of sequences up to a power of two. A sequence that goes on in blocks that others
read (a fork) starts from there and writes to blocks of its own, as one that starts from a checkpoint does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.errors import RequestError
from jaxstate.models.base import CausalLM
from jaxstate.models.identify import identify
from jaxstate.plan import HostTables, PlanShape, StepPlan, null_plan
from jaxstate.request import Request, SamplingParams
from jaxstate.rules import check_plan
from jaxstate.sampling import request_hash
from jaxstate.sequences import Outputs, Sequences, moved
from jaxstate.state.cache import StateCache
from jaxstate.state.pool import BlockPool
from jaxstate.state.sequence import Sequence, assign
from jaxstate.state.snapshot import Snapshot
from jaxstate.state.spec import CacheSpec
from jaxstate.state.tables import BlockTables
from jaxstate.step import EngineState, Outcome, RowState, decode_step, prefill_step, resume_step
from jaxstate.text import Tokenizer
from pallas_kernels.rows import CHUNK


class _Shape(PlanShape):
    """Plans in which every row may start at once."""

    def width(self, group: str) -> int:
        return self.spec.rows * self.spec.capacity(group)


@dataclasses.dataclass(frozen=True)
class _Programs:
    shape: _Shape
    create: Callable[[], EngineState]
    prefill: Callable[..., tuple[EngineState, Outcome]]
    resume: Callable[..., tuple[EngineState, Outcome]]
    decode: Callable[..., tuple[EngineState, Outcome]]
    move: Callable[..., Any]


class Runner:
    """Reads prompts and decodes values for one model; its sizes are those of an engine's plans but for the rows."""

    def __init__(
        self, model: CausalLM, shape: PlanShape, tokenizer: Tokenizer | None, *, poison: bool
    ):
        self.model, self.shape, self.tokenizer, self.poison = model, shape, tokenizer, poison
        self._params, self._tree = jax.tree.flatten(model)
        self._sizes: dict[int, _Programs] = {}
        self.identity = identify(model)

    def prefill(self, requests: SequenceOf[Request]) -> Sequences:
        """Reads the prompts.

        Raises:
          CapacityError: a prompt is longer than `max_len`.
          RequestError: no prompts, or a token that the model does not know.
        """
        if not requests:
            raise RequestError("empty_prompt", "there are no prompts; give at least one", "prompt")
        programs = self._programs(len(requests))
        shape, spec = programs.shape, programs.shape.spec
        plan, pool = null_plan(shape, prefill=True), BlockPool.create(spec)
        used, sequences = dict.fromkeys(spec.names, 0), []
        for row, request in enumerate(requests):
            self._check_tokens(request.prompt)
            pool, ids = pool.allocate(request.id, spec.need(len(request.prompt), request.id))
            _place(plan, row, ids, dict.fromkeys(spec.names, 0), used)
            blocks = {g: tuple(b.tolist()) for g, b in ids.items()}
            sequences.append(Sequence(request.id, request.prompt, blocks, row))
            _admit(plan, row, request.id, request.sampling, budget=1)
        tables = _tables(spec, [])
        holders = _holders(spec, sequences)
        state, read = programs.create(), [0] * len(sequences)
        while any(n < len(s) for n, s in zip(read, sequences, strict=True)):
            read = _pack(plan, sequences, read, shape.chunk_tokens)
            tables = check_plan(plan, shape, tables, pool, holders)
            state, _ = programs.prefill(self._params, state, plan)
            plan = null_plan(shape, prefill=True)
        return self._value(sequences, spec, pool, state)

    def decode(
        self, seqs: Sequences, sampling: SamplingParams, forced: SequenceOf[SequenceOf[int]] = ()
    ) -> tuple[Sequences, Outputs]:
        """Continues every sequence by `sampling.max_tokens` tokens, or up to an end token, which it does not read.

        Raises:
          CapacityError: a sequence would grow past `max_len`; nothing was dispatched.
          RequestError: stop texts, more forced tokens than steps, or sequences of another model.
        """
        steps = sampling.max_tokens
        for s in seqs.sequences:
            seqs.spec.need(len(s) + steps, s.id)
        known = self._check(seqs, sampling, forced)
        programs, seqs = self._programs(len(seqs)), self._seated(seqs, steps)
        shape, spec = programs.shape, programs.shape.spec
        eos = () if sampling.ignore_eos else tuple(self.model.config.eos_token_ids)
        plan, pool = _resume_plan(shape, seqs, sampling, eos)
        plan.forced[:, :1] = known[:, :1]
        before, holders = _tables(spec, seqs.sequences), _holders(spec, seqs.sequences)
        tables = check_plan(plan, shape, before, pool, holders)
        position = np.zeros(spec.rows, np.int32)
        position[: len(seqs)] = seqs.lengths
        rows = RowState.empty(spec).replace(position=jnp.asarray(position), scores=seqs.row_scores)
        device_tables = BlockTables({g: jnp.asarray(t) for g, t in before.items()})
        state, first = programs.resume(EngineState(device_tables, seqs.cache, rows), plan)
        outcomes = [first]
        for at in range(1, steps + 1, shape.decode_steps):
            plan = null_plan(shape, prefill=False)
            here = known[:, at : at + shape.decode_steps]
            plan.forced[:, : here.shape[1]] = here
            tables = check_plan(plan, shape, tables, pool, holders)
            state, outcome = programs.decode(self._params, state, plan)
            outcomes.append(outcome)
        seen = jax.tree.map(lambda *parts: np.concatenate(parts), *jax.device_get(outcomes))
        made, sequences = [], []
        for row, s in enumerate(seqs.sequences):
            after, output = _observe(seen, row, s, steps)
            blocks = s.blocks
            if len(after) > len(s):
                need = spec.need(len(after))
                blocks = {g: tuple(tables[g][row, :n].tolist()) for g, n in need.items()}
                after = dataclasses.replace(after, forked=False)
            left = {g: sorted(set(b) - set(blocks[g])) for g, b in pool.held[s.id].items()}
            pool, _ = pool.free(s.id, left)
            sequences.append(dataclasses.replace(after, blocks=blocks))
            made.append(output)
        return self._value(sequences, spec, pool, state), self._outputs(made)

    def restore(self, snapshot: Snapshot) -> Sequences:
        """The snapshot's sequences, on the device again.

        Raises:
          SnapshotError: it is of another model, layout or dtype.
          CapacityError: a sequence is longer than `max_len`.
        """
        snapshot.check(self.identity, self.model.groups())
        spec = self._programs(len(snapshot)).shape.spec
        for s in snapshot.sequences:
            spec.need(len(s), s.id)
            self._check_tokens(s.tokens)
        pool, sequences, moves = assign(spec, snapshot.sequences)
        cache = StateCache.create(spec, poison=self.poison)
        for group in spec.groups:
            old, new = moves[group.name]
            state = jax.tree.map(lambda x, old=old: x[:, old - 1], snapshot.state(group))
            cache = cache.write(group.name, new, state)
        scores = np.zeros((spec.rows, snapshot.scores.shape[1]), np.float32)
        scores[: len(sequences)] = snapshot.scores
        return Sequences(sequences, spec, self.identity, pool, cache, jnp.asarray(scores))

    def _value(
        self, sequences: Iterable[Sequence], spec: CacheSpec, pool: BlockPool, state: EngineState
    ) -> Sequences:
        scores = state.rows.scores
        assert scores is not None
        return Sequences(tuple(sequences), spec, self.identity, pool, state.cache, scores)

    def _seated(self, seqs: Sequences, steps: int) -> Sequences:
        """The value with a row per sequence, in order, and room for all that they grow by."""
        programs = self._programs(len(seqs))
        spec = programs.shape.spec
        if seqs.spec.rows == spec.rows and [s.row for s in seqs.sequences] == [*range(len(seqs))]:
            growth = [_growth(spec, s, steps) for s in seqs.sequences]
            if seqs.pool.fits({g: sum(n[g] for n in growth) for g in spec.names}):
                return seqs
        pool, sequences, moves = assign(spec, seqs.sequences)
        padded = {}
        for group, (old, new) in moves.items():
            pad = (0, spec.rows * (spec.capacity(group) + 1) - len(old))
            padded[group] = np.pad(old, pad), np.pad(new, pad)
        rows = np.zeros(spec.rows, np.int32)
        rows[: len(seqs)] = [s.row for s in seqs.sequences]
        cache, scores = programs.move(seqs.cache, seqs.row_scores, padded, rows)
        return Sequences(sequences, spec, self.identity, pool, cache, scores)

    def _programs(self, sequences: int) -> _Programs:
        rows = 1 << (sequences - 1).bit_length()
        if rows not in self._sizes:
            max_len = self.shape.spec.max_len
            # Beside the blocks that a row fills, one that it may start from.
            groups = tuple(
                dataclasses.replace(g, blocks=rows * (g.need(max_len, 1) + 1) + 1)
                for g in self.model.groups()
            )
            spec = CacheSpec(groups, rows=rows, max_len=max_len)
            shape = _Shape(spec, self.shape.chunk_tokens, self.shape.decode_steps)
            common = {"spec": spec, "poison": self.poison}
            early = next(iter(self._params[0].devices())).platform == "cpu"
            run = functools.partial(_run, tree=self._tree)
            self._sizes[rows] = _Programs(
                shape,
                jax.jit(functools.partial(_empty, vocab=self.model.config.vocab_size, **common)),
                jax.jit(functools.partial(run, step=prefill_step, **common)),
                jax.jit(functools.partial(resume_step, poison=self.poison)),
                jax.jit(
                    functools.partial(
                        run, step=decode_step, steps=shape.decode_steps, early_exit=early, **common
                    )
                ),
                jax.jit(functools.partial(moved, **common)),
            )
        return self._sizes[rows]

    def _check(
        self, seqs: Sequences, sampling: SamplingParams, forced: SequenceOf[SequenceOf[int]]
    ) -> np.ndarray:
        """The forced tokens of every row and step, -1 where one is to be drawn."""
        if seqs.identity != self.identity:
            raise RequestError("unsupported_value", "the sequences are another model's", "seqs")
        if sampling.stop:
            raise RequestError(
                "unsupported_value", "a value does not end at stop texts; use stop_ids", "stop"
            )
        if len(forced) > len(seqs) or any(len(known) > sampling.max_tokens for known in forced):
            raise RequestError(
                "unsupported_value",
                f"forced has {[len(known) for known in forced]} tokens for {len(seqs)} sequences and "
                f"{sampling.max_tokens} steps; it must have at most one list a sequence and one token a step",
                "forced",
            )
        dense = np.full((1 << (len(seqs) - 1).bit_length(), sampling.max_tokens), -1, np.int32)
        for row, known in enumerate(forced):
            self._check_tokens(known)
            dense[row, : len(known)] = known
        return dense

    def _check_tokens(self, tokens: SequenceOf[int]) -> None:
        vocab = self.model.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab:
                raise RequestError(
                    "unsupported_value",
                    f"token {token} is outside the vocabulary of {vocab}",
                    "prompt",
                )

    def _outputs(self, made: list[tuple[list[int], list[float], str]]) -> Outputs:
        tokens, logprobs, reasons = zip(*made, strict=True)
        texts = []
        for ids, reason in zip(tokens, reasons, strict=True):
            ids = ids[:-1] if reason == "stop" else ids  # the end token is no text
            texts.append("" if self.tokenizer is None else self.tokenizer.decode(ids))
        return Outputs(
            tuple(map(tuple, tokens)), tuple(map(tuple, logprobs)), tuple(texts), reasons
        )


def _run(params, state, plan, *, step, tree, **options):
    return step(jax.tree.unflatten(tree, params), state=state, plan=plan, **options)


def _empty(*, spec: CacheSpec, poison: bool, vocab: int) -> EngineState:
    state = EngineState.create(spec, poison=poison)
    return state.replace(rows=state.rows.replace(scores=jnp.zeros((spec.rows, vocab), jnp.float32)))


def _resume_plan(
    shape: PlanShape, seqs: Sequences, sampling: SamplingParams, eos: tuple[int, ...]
) -> tuple[StepPlan, BlockPool]:
    """The plan by which every sequence goes on, with blocks for all steps, and the pool while it does."""
    spec, pool, plan = shape.spec, seqs.pool, null_plan(shape, prefill=False)
    used = dict.fromkeys(spec.names, 0)
    for row, s in enumerate(seqs.sequences):
        pool, ids = pool.allocate(s.id, _growth(spec, s, sampling.max_tokens))
        _place(plan, row, ids, {g: len(blocks) for g, blocks in s.kept(spec).items()}, used)
        # One more than is read: the last step's draw is left to the next call, which has the scores.
        _admit(plan, row, s.id, sampling, sampling.max_tokens + 1, eos)
        for group, block in s.source(spec).items():
            plan.admission.source[group][row] = block
            plan.admission.position[row] = len(s)
    for group, mask in plan.freed.items():
        mask[1:] = pool.refs[group][1:] == 0
    return plan, pool


def _growth(spec: CacheSpec, sequence: Sequence, steps: int) -> dict[str, int]:
    kept = sequence.kept(spec)
    return {g: n - len(kept[g]) for g, n in spec.need(len(sequence) + steps, sequence.id).items()}


def _tables(spec: CacheSpec, sequences: Iterable[Sequence]) -> HostTables:
    tables = {g: np.zeros((spec.rows, spec.capacity(g)), np.int32) for g in spec.names}
    for row, sequence in enumerate(sequences):
        for group, blocks in sequence.kept(spec).items():
            tables[group][row, : len(blocks)] = blocks
    return tables


def _holders(spec: CacheSpec, sequences: SequenceOf[Sequence]) -> list[str | None]:
    return [s.id for s in sequences] + [None] * (spec.rows - len(sequences))


def _place(
    plan: StepPlan, row: int, ids: Mapping[str, np.ndarray], first: Mapping[str, int],
    used: dict[str, int],
) -> None:  # fmt: skip
    """Writes fresh blocks to the row, from each group's `first` column on, and has them zeroed."""
    for group, blocks in ids.items():
        at, cells = slice(used[group], used[group] + len(blocks)), plan.cells[group]
        columns = range(first[group], first[group] + len(blocks))
        cells.rows[at], cells.columns[at], cells.ids[at] = row, columns, blocks
        plan.zero[group][at] = blocks
        used[group] += len(blocks)


def _admit(
    plan: StepPlan, row: int, sequence_id: str, asked: SamplingParams, budget: int,
    eos: tuple[int, ...] = (),
) -> None:  # fmt: skip
    admission, sampling = plan.admission, plan.admission.sampling
    admission.rows[row], admission.budget[row] = True, budget
    stops = (*asked.stop_ids, *eos)
    admission.stop_ids[row, : len(stops)] = stops
    sampling.temperature[row], sampling.top_k[row] = asked.temperature, asked.top_k
    sampling.top_p[row], sampling.min_p[row] = asked.top_p, asked.min_p
    sampling.seed[row], sampling.request[row] = asked.seed, request_hash(sequence_id)


def _pack(
    plan: StepPlan, sequences: SequenceOf[Sequence], read: SequenceOf[int], room: int
) -> list[int]:
    """Fills the plan with prompt tokens, cut at multiples of the scan chunk only; returns how far each row has come."""
    prefill, after = plan.prefill, list(read)
    assert prefill is not None
    lengths = np.zeros(len(prefill.starts), np.int64)
    for row, sequence in enumerate(sequences):
        n = len(sequence) - read[row]
        n = n if n <= room else room // CHUNK * CHUNK
        at = int(lengths.sum())
        prefill.tokens[at : at + n] = sequence.tokens[read[row] : read[row] + n]
        lengths[row], room, after[row] = n, room - n, read[row] + n
        prefill.starts[row] = read[row] if n else 0
        prefill.sample[row] = n > 0 and after[row] == len(sequence)
    np.cumsum(lengths, out=prefill.offsets[1:])
    return after


def _observe(
    seen: Outcome, row: int, sequence: Sequence, steps: int
) -> tuple[Sequence, tuple[list[int], list[float], str]]:
    """The sequence with the tokens that it read, and what came out of its row: tokens, logprobs, why it ended."""
    made, bad = np.asarray(seen.made)[:, row], np.asarray(seen.bad)[:, row]
    tokens = np.asarray(seen.token)[made, row].tolist()[:steps]
    logprobs = np.asarray(seen.logprob)[made, row].tolist()[:steps]
    # The first draw is from scores that were there; every later one was from a token that was read.
    read = int((made | bad)[1:].sum())
    reason = "length" if read == steps else "stop" if len(tokens) > read else "error"
    after = dataclasses.replace(sequence, tokens=sequence.tokens + tuple(tokens[:read]))
    return after, (tokens, logprobs, reason)
