"""Sequences as values: what a notebook forks, rewinds, drops, keeps and restores.

A value holds the whole of its sequences: their tokens, the blocks of each, the cache with their state, the account of
who holds which block, the scores of what comes next. Nothing ever changes it: to go back, use the older value again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.errors import RequestError
from jaxstate.state.cache import StateCache
from jaxstate.state.identity import Identity
from jaxstate.state.pool import BlockPool
from jaxstate.state.sequence import Sequence, assign
from jaxstate.state.snapshot import Snapshot
from jaxstate.state.spec import CacheSpec, format_bytes
from jaxstate.state.tables import BlockTables
from jaxstate.typing import Array, Float32


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """One or several sequences after some tokens; made by `LM.prefill`, continued by `LM.decode`.

    Selecting, forking and dropping touch no state: the result names blocks of the same cache. Forks share every block
    of their parent, each of them starts from the parent's state and writes its own.

    Attributes:
      sequences: tokens and blocks of each.
      pool: whose each block is.
      cache: the blocks' state, on the device.

    Example:
      >>> seqs = lm.prefill(["Once upon a time", "The sea"])
      >>> branches, out = lm.decode(seqs[0].fork(4), 16, temperature=1.0, seed=1)
      >>> best = branches[int(out.sum_logprob.argmax())]
    """

    sequences: tuple[Sequence, ...]
    spec: CacheSpec
    identity: Identity
    pool: BlockPool
    cache: StateCache
    row_scores: Float32[Array, "rows vocab"]

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def ids(self) -> tuple[str, ...]:
        """What keys each one's draws: its number, and after a fork `number/child`, as in `LM.generate`."""
        return tuple(s.id for s in self.sequences)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that each one's state has read."""
        return tuple(s.tokens for s in self.sequences)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each one's state has read."""
        return tuple(len(s) for s in self.sequences)

    @property
    def scores(self) -> Float32[np.ndarray, "sequences vocab"]:
        """The model's scores (logits) of each one's next token."""
        return np.asarray(self.row_scores)[[s.row for s in self.sequences]]

    @property
    def tables(self) -> BlockTables:
        """The blocks that hold each sequence, row by row."""
        tables = BlockTables.empty(self.spec)
        if len(self) > self.spec.rows:  # forks that have not gone on yet have no rows of their own
            tables = BlockTables.empty(dataclasses.replace(self.spec, rows=len(self)))
        for row, sequence in enumerate(self.sequences):
            tables = tables.write(row, sequence.blocks)
        return tables

    @property
    def nbytes(self) -> int:
        """Bytes on the device that live as long as this value or another with the same cache does."""
        return self.row_scores.nbytes + sum(x.nbytes for x in jax.tree.leaves(self.cache))

    def __getitem__(self, index: int | slice | SequenceOf[int]) -> Sequences:
        """The sequences at an index, a slice, or a list of indices that are all different."""
        if isinstance(index, slice):
            chosen = list(range(len(self)))[index]
        else:
            chosen = [int(i) for i in np.atleast_1d(np.asarray(index, np.int64))]
        for i in chosen:
            if not -len(self) <= i < len(self):
                raise IndexError(f"there is no sequence {i}; there are {len(self)}")
        chosen = [i % len(self) for i in chosen]
        if not chosen or len(set(chosen)) < len(chosen):
            raise RequestError(
                "unsupported_value",
                f"sequences {chosen} were asked for; it must be at least one, and each once (`fork` makes more)",
                "index",
            )
        pool = self.pool
        for i in set(range(len(self))) - set(chosen):
            pool, _ = pool.release(self.sequences[i].id)
        return dataclasses.replace(
            self, sequences=tuple(self.sequences[i] for i in chosen), pool=pool
        )

    def __iter__(self) -> Iterator[Sequences]:
        return (self[i] for i in range(len(self)))

    def drop(self, index: int) -> Sequences:
        """The others; RequestError when there are none."""
        left = self[index]  # raises when there is no such sequence
        return self[[i for i, s in enumerate(self.sequences) if s.id not in left.ids]]

    def fork(self, n: int) -> Sequences:
        """Each sequence `n` times, ids `id/0`, `id/1`, …, so that their draws differ; nothing is copied."""
        if not isinstance(n, int) or n < 1:
            raise RequestError("unsupported_value", f"n is {n!r}; it must be an int >= 1", "n")
        pool, children = self.pool, []
        for parent in self.sequences:
            pool = pool.seal(parent.id, parent.blocks)
            for k in range(n):
                child = dataclasses.replace(parent, id=f"{parent.id}/{k}", forked=True)
                pool = pool.share(child.id, child.blocks)
                children.append(child)
            pool, _ = pool.release(parent.id)
        return dataclasses.replace(self, sequences=tuple(children), pool=pool)

    def snapshot(self) -> Snapshot:
        """The sequences outside the device, each block that they share once."""
        rows = dataclasses.replace(self.spec, rows=len(self))
        groups = tuple(
            dataclasses.replace(g, blocks=len(self) * (self.spec.capacity(g.name) + 1) + 1)
            for g in self.spec.groups
        )
        _, sequences, moves = assign(dataclasses.replace(rows, groups=groups), self.sequences)
        # Blocks are handed out in order, lowest first, so these lie in the order of their new ids.
        order = {g: old[np.argsort(new)] for g, (old, new) in moves.items()}
        state = jax.device_get({g: self.cache.read(g, ids) for g, ids in order.items()})
        return Snapshot.create(self.identity, self.spec.groups, sequences, state, self.scores)

    def __repr__(self) -> str:
        held = sum(
            len({b for s in self.sequences for b in s.blocks[g.name]}) * g.bytes_per_block
            for g in self.spec.groups
        )
        lines = [
            f"Sequences({len(self)} of {self.identity.model}, {format_bytes(held)} of state "
            f"in a cache of {format_bytes(self.nbytes)}"
        ]
        for s in self.sequences[:16]:
            blocks = ", ".join(
                f"{g} {list(b[:8])}{'…' * (len(b) > 8)}" for g, b in s.blocks.items()
            )
            fork = ", starts from there" if s.forked else ""
            lines.append(f"  {s.id}: {len(s)} tokens, blocks {blocks}{fork}")
        more = [f"  … {len(self) - 16} more"] if len(self) > 16 else []
        return "\n".join([*lines, *more]) + "\n)"


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What one `LM.decode` made, sequence by sequence.

    `finish_reasons` are those of `Completion`: `length` when all steps were made; `stop` when the last token is an end
    token, which the sequence has not read; `error` when the scores of the next token are not finite.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    text: tuple[str, ...]
    finish_reasons: tuple[str, ...]

    @property
    def sum_logprob(self) -> np.ndarray:
        """The log-probability of each sequence's new tokens together."""
        return np.array([sum(logprobs) for logprobs in self.logprobs])

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        lines = [
            f"  {len(tokens)} tokens, {reason}, logprob {total:.2f}: {text or list(tokens)!r}"
            for tokens, text, reason, total in zip(
                self.tokens, self.text, self.finish_reasons, self.sum_logprob, strict=True
            )
        ]
        return "Outputs(\n" + "\n".join(lines) + "\n)"


def moved(
    cache: StateCache, scores: Array, moves: dict[str, tuple[Array, Array]], rows: Array, *,
    spec: CacheSpec, poison: bool,
) -> tuple[StateCache, Array]:  # fmt: skip
    """A fresh cache with the blocks' state at its new place, and the scores of these rows; id 0 is padding."""
    new = StateCache.create(spec, poison=poison)
    for group, (old, ids) in moves.items():
        new = new.write(group, ids, cache.read(group, old))
    return new, jnp.take(scores, rows, axis=0, mode="clip")
