"""Block tables against numpy arrays, over any sequence of writes, clears and updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxstate.errors import CapacityError, OwnershipError
from jaxstate.state import BlockTables, CacheSpec, Cells, GroupSpec
from tests.properties.profile import examples

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)
SPEC = CacheSpec(
    groups=(
        GroupSpec("whole", "recurrent", 1, LEAF),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=4),
        GroupSpec("kv", "attention", 1, LEAF, block_size=4),
    ),
    rows=3, max_len=16, context_shards=2,
)  # fmt: skip
WIDTH = {"whole": 1, "paged": 4, "kv": 2}
INT32 = np.iinfo(np.int32)

row = st.integers(-2, 4)
wrong = st.one_of(st.integers(-2, 0), st.sampled_from([INT32.max + 1, 2**32, 2**32 + 1]))
block = st.one_of(st.integers(1, 20), st.integers(1, 20), wrong)
good_ids = st.lists(st.integers(1, 20), max_size=4, unique=True)
ids = st.one_of(
    good_ids, good_ids, st.lists(block, max_size=5), st.lists(wrong, min_size=1, max_size=1)
).map(lambda x: np.array(x, np.int64))
some = st.dictionaries(st.sampled_from(list(WIDTH)), ids, min_size=1, max_size=2)
start = st.sampled_from([0, 0, 0, 1, 2, 3, -1])
writes = st.tuples(st.just("write"), row, some, start)
clears = st.tuples(st.just("clear"), row)


def _expected(arrays, op):
    """The arrays after the operation, or the error that it has to be."""
    if op[0] == "clear":
        if not 0 <= op[1] < 3:
            return OwnershipError
        return {g: np.where(np.arange(3)[:, None] == op[1], 0, a) for g, a in arrays.items()}
    _, row, ids, start = op
    after = {g: a.copy() for g, a in arrays.items()}
    errors = set()
    for group, given_ids in ids.items():
        if start < 0:
            errors.add(OwnershipError)
        elif start + len(given_ids) > WIDTH[group]:
            errors.add(CapacityError)
        values = given_ids.tolist()
        if len(set(values)) < len(values) or any(not 0 < b <= INT32.max for b in values):
            errors.add(OwnershipError)
        if not errors and 0 <= row < 3:
            after[group][row, start : start + len(values)] = values
    if not 0 <= row < 3:
        errors.add(OwnershipError)
    return tuple(errors) if errors else after


@examples(80)
@given(st.lists(st.one_of(writes, writes, clears), max_size=8))
def test_writes_and_clears_are_those_of_numpy_over_all_groups_or_none(ops):
    assert {g: SPEC.capacity(g) for g in SPEC.names} == WIDTH
    tables = BlockTables.empty(SPEC)
    arrays = {g: np.zeros((3, w), np.int32) for g, w in WIDTH.items()}
    for op in ops:
        want = _expected(arrays, op)
        before = tables
        act = (
            (lambda t=before, o=op: t.clear_row(o[1]))
            if op[0] == "clear"
            else (lambda t=before, o=op: t.write(o[1], o[2], o[3]))
        )
        if isinstance(want, dict):
            tables = act()
        else:
            with pytest.raises(want):
                act()
        for group in SPEC.names:
            np.testing.assert_array_equal(before.ids[group], arrays[group])
        arrays = want if isinstance(want, dict) else arrays
    for group in SPEC.names:
        np.testing.assert_array_equal(tables.ids[group], arrays[group])


_traced_write = jax.jit(lambda tables, row, ids: tables.write(row, {"paged": ids}, 1))


@examples(60)
@given(
    st.integers(0, 2**16),
    st.one_of(row, st.integers(INT32.min, INT32.max)),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
)
def test_a_row_known_on_the_device_alone_is_never_wrapped_or_clamped(seed, row, ids):
    table = np.random.default_rng(seed).integers(1, 99, (3, 4)).astype(np.int32)
    tables = BlockTables({"paged": jnp.asarray(table)})
    got = _traced_write(tables, jnp.int32(row), jnp.array(ids, jnp.int32))
    if 0 <= row < 3:
        table[row, 1:] = ids
    np.testing.assert_array_equal(got.ids["paged"], table)


def test_ids_too_many_for_the_row_are_refused_when_traced():
    tables = BlockTables.empty(SPEC)
    for width in (4, 5):
        with pytest.raises(CapacityError):
            _traced_write(tables, jnp.int32(0), jnp.arange(1, 1 + width, dtype=jnp.int32))


_update = jax.jit(lambda tables, clear, cells: tables.update(clear, {"paged": cells}))
three = st.lists(st.integers(-2, 5), min_size=3, max_size=3).map(lambda x: np.array(x, np.int32))


@examples(60)
@given(
    st.integers(0, 2**16), st.lists(st.booleans(), min_size=3, max_size=3), three, three,
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
)  # fmt: skip
def test_an_update_clears_whole_rows_of_every_group_and_then_writes(
    seed, clear, rows, columns, ids
):
    rng = np.random.default_rng(seed)
    arrays = {g: rng.integers(1, 99, (3, w)).astype(np.int32) for g, w in WIDTH.items()}
    cells = Cells(rows, columns, np.array(ids, np.int32))
    got = _update(BlockTables(jax.tree.map(jnp.asarray, arrays)), np.array(clear), cells)
    for group, array in arrays.items():
        array[np.array(clear)] = 0
        allowed = {(r, c): {int(v)} for (r, c), v in np.ndenumerate(array)}
        if group == "paged":
            written: dict[tuple[int, int], set[int]] = {}
            for r, c, block in zip(rows.tolist(), columns.tolist(), ids, strict=True):
                if block and (r, c) in allowed:
                    written.setdefault((r, c), set()).add(block)
            allowed |= written
        for at, value in np.ndenumerate(np.asarray(got.ids[group])):
            assert int(value) in allowed[at]
