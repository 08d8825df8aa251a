"""Block tables: exact writes, whole rows cleared, and nothing wrapped, clamped or half done."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.errors import CapacityError, OwnershipError, SpecError
from jaxstate.state import BlockTables, CacheSpec, Cells, GroupSpec

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)


def spec_of(max_len=64, rows=4, shards=1) -> CacheSpec:
    groups = (
        GroupSpec("kv", "attention", 1, LEAF, block_size=16),
        GroupSpec("ssm", "recurrent", 1, LEAF, block_size=16),
    )
    return CacheSpec(groups, rows=rows, max_len=max_len, context_shards=shards)


def full_tables(spec: CacheSpec) -> BlockTables:
    """Every cell holds an id of its own."""
    start, ids = 1, {}
    for name in spec.names:
        shape = spec.rows, spec.capacity(name)
        ids[name] = start + jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
        start += shape[0] * shape[1]
    return BlockTables(ids)


def values(tables: BlockTables) -> dict:
    return {group: np.asarray(table).tolist() for group, table in tables.ids.items()}


class TablesTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_inv07_inv09_br19_a_full_row_leaves_its_neighbours_alone(self):
        spec = spec_of(max_len=512, shards=2)
        need = spec.need(257)
        ids = {g: np.arange(100, 100 + n, dtype=np.int32) for g, n in need.items()}
        tables = full_tables(spec)
        after = self.variant(lambda t: t.write(1, ids))(tables)
        for group, n in {"kv": 9, "ssm": 17}.items():
            expect = np.asarray(tables.ids[group]).copy()
            expect[1, :n] = np.arange(100, 100 + n)
            np.testing.assert_array_equal(after.ids[group], expect)
        # Exactly full, too.
        ids = {g: np.arange(1, 1 + spec.capacity(g), dtype=np.int32) for g in spec.names}
        after = self.variant(lambda t: t.write(1, ids))(tables)
        for group in spec.names:
            expect = np.asarray(tables.ids[group]).copy()
            expect[1] = ids[group]
            np.testing.assert_array_equal(after.ids[group], expect)

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv08_inv09_br19_the_id_past_a_row_raises_before_any_write(self):
        """Rows as wide as the sharded formula would make them: 16 ids, and the 17th is refused."""
        spec = spec_of(max_len=256)
        tables, ids = full_tables(spec), {"kv": np.arange(1, 10), "ssm": np.arange(1, 18)}
        before = values(tables)
        with pytest.raises(CapacityError) as caught:
            self.variant(lambda t: t.write(1, ids))(tables)
        error = caught.value
        assert (error.request, error.group, error.need, error.capacity) == ("row 1", "ssm", 17, 16)
        assert error.remedy in str(error) and "17 block ids" in str(error)
        assert values(tables) == before
        ids["ssm"] = np.arange(1, 17)
        after = self.variant(lambda t: t.write(1, ids))(tables)
        assert values(after)["ssm"][2] == before["ssm"][2]

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv08_appending_past_the_row_is_refused_at_the_column(self):
        tables = full_tables(spec_of())
        for start, error in (
            (-1, OwnershipError),
            (3, CapacityError),
            ({"kv": 0, "ssm": 3}, CapacityError),
        ):
            with pytest.raises(error):
                self.variant(lambda t, s=start: t.write(0, {"kv": [7, 8], "ssm": [7, 8]}, s))(
                    tables
                )
        after = self.variant(lambda t: t.write(0, {"kv": [7], "ssm": [8, 9]}, {"kv": 3, "ssm": 2}))(
            tables
        )
        assert values(after)["kv"][0] == [1, 2, 3, 7]
        assert values(after)["ssm"][0] == [17, 18, 8, 9]

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv10_br01_a_cleared_row_is_null_over_its_width_in_every_group(self):
        spec = spec_of()
        tables = full_tables(spec)
        after = self.variant(lambda t, row: t.clear_row(row))(tables, 2)
        for group in spec.names:
            expect = np.asarray(tables.ids[group]).copy()
            expect[2] = 0
            np.testing.assert_array_equal(after.ids[group], expect)
        # A shorter tenant sees zeros past its length.
        again = self.variant(lambda t: t.write(2, {"kv": [5], "ssm": [6, 7]}))(after)
        assert values(again)["kv"][2] == [5, 0, 0, 0]
        assert values(again)["ssm"][2] == [6, 7, 0, 0]

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv10_a_row_cleared_and_written_in_one_update_is_the_new_tenants(self):
        tables = full_tables(spec_of())
        cells = Cells(*(np.array(x, np.int32) for x in ([1, 1, 0], [0, 1, 0], [50, 51, 0])))
        clear = np.array([False, True, False, False])
        after = self.variant(lambda t, c, e: t.update(c, {"ssm": e}))(tables, clear, cells)
        assert values(after)["ssm"][1] == [50, 51, 0, 0]
        assert values(after)["kv"][1] == [0, 0, 0, 0]
        for row in (0, 2, 3):
            assert values(after)["ssm"][row] == values(tables)["ssm"][row]

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv12_inv21_rows_that_are_not_live_look_up_null(self):
        tables = full_tables(spec_of(rows=8))
        live = np.array([True] * 3 + [False] * 5)
        columns = np.array([0, 1, 3, 0, 1, 2, 3, 0], np.int32)
        got = self.variant(lambda t: t.lookup("ssm", columns, live))(tables)
        ssm = np.asarray(tables.ids["ssm"])
        assert got.tolist() == [ssm[0, 0], ssm[1, 1], ssm[2, 3], 0, 0, 0, 0, 0]

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv22_br140_br141_columns_outside_a_row_are_null_and_not_its_ends(self):
        tables = full_tables(spec_of())
        live = np.ones(4, bool)
        for column in (-1, -4, 4, 5, 2**31 - 1, -(2**31)):
            columns = np.full(4, column, np.int32)
            got = self.variant(lambda t, c: t.lookup("kv", c, live))(tables, columns)
            assert got.tolist() == [0, 0, 0, 0], column

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv22_br140_cells_outside_the_table_write_nothing(self):
        tables = full_tables(spec_of())
        for row, column in [(-1, 0), (4, 0), (-4, 1), (0, -1), (0, 4), (2**31 - 1, 0), (1, -4)]:
            cells = Cells(*(np.array([x], np.int32) for x in (row, column, 99)))
            after = self.variant(lambda t, c: t.update(None, {"kv": c}))(tables, cells)
            assert values(after) == values(tables), (row, column)

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv19_entries_of_id_0_are_padding(self):
        tables = full_tables(spec_of())
        cells = Cells(np.zeros(5, np.int32), np.zeros(5, np.int32), np.zeros(5, np.int32))
        after = self.variant(lambda t, c: t.update(None, {"kv": c}))(tables, cells)
        assert values(after) == values(tables)

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv08_a_row_known_only_on_the_device_is_neither_wrapped_nor_clamped(self):
        tables = full_tables(spec_of())
        write = self.variant(lambda t, row: BlockTables.write(t, row, {"kv": [91, 92]}))
        good = write(tables, jnp.int32(3))
        assert values(good)["kv"][3] == [91, 92, 15, 16]
        assert values(good)["kv"][:3] == values(tables)["kv"][:3]
        for row in (-1, 4):
            try:
                after = write(tables, jnp.int32(row))
            except OwnershipError:
                continue  # where the row is known it is refused
            assert values(after) == values(tables)


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        (0, {"kv": [1, 0]}),  # null
        (0, {"kv": [-1]}),
        (0, {"kv": [3, 4, 3]}),  # twice
        (-1, {"kv": [1]}),
        (4, {"kv": [1]}),
        (0, {"kv": [1], "ssm": [2, 2]}),  # the second group at fault
    ],
)
def test_inv22_a_write_that_breaks_ownership_changes_nothing(row, ids):
    tables = full_tables(spec_of())
    before = values(tables)
    with pytest.raises(OwnershipError):
        tables.write(row, ids)
    assert values(tables) == before


def test_rows_and_groups_that_are_not_there_are_refused():
    tables = full_tables(spec_of())
    for row in (-1, 4):
        with pytest.raises(OwnershipError, match=r"row -?\d is outside the tables' 4 rows"):
            tables.clear_row(row)
    with pytest.raises(SpecError, match=r"no group 'conv'; the groups are \['kv', 'ssm'\]"):
        tables.write(0, {"conv": [1]})


def test_operations_leave_the_old_tables_valid():
    tables = BlockTables.empty(spec_of())
    assert not any(np.asarray(table).any() for table in tables.ids.values())
    written = tables.write(0, {"kv": [1], "ssm": [2]})
    cleared = written.clear_row(0)
    assert values(tables) == values(cleared) != values(written)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tables.ids = {}


def test_br16_br149_ids_are_taken_by_value():
    """Large, aligned host arrays are what jax borrows without copying."""
    spec = spec_of(max_len=16 * 4096, rows=2)
    raw = np.zeros(4096 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    ids = raw[start : start + 4096 * 4].view(np.int32)
    ids[:] = np.arange(1, 4097)
    tables = BlockTables.empty(spec).write(0, {"ssm": ids})
    jax.block_until_ready(tables.ids)
    ids[:] = 7
    np.testing.assert_array_equal(tables.ids["ssm"][0], np.arange(1, 4097))


def test_tables_are_a_pytree_of_one_leaf_a_group():
    tables = full_tables(spec_of())
    leaves, tree = jax.tree.flatten(tables)
    assert len(leaves) == 2
    chex.assert_trees_all_equal(jax.tree.unflatten(tree, leaves), tables)
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: 2 * x, t))(tables)
    assert values(doubled)["kv"][0] == [2, 4, 6, 8]


def test_a_repr_names_groups_rows_and_ids():
    tables = BlockTables.empty(spec_of()).write(2, {"kv": [5, 9], "ssm": [7]})
    text = repr(tables)
    assert "kv: 1 of 4 rows used, 4 ids a row" in text
    assert "row 2: 5 9" in text and "row 2: 7" in text


def test_a_repr_never_fails():
    tables = full_tables(spec_of())
    seen = []

    @jax.jit
    def traced(t):
        seen.append(repr(t))
        return jax.tree.map(lambda x: x + 1, t)

    traced(tables)
    jax.eval_shape(lambda t: seen.append(repr(t)), tables)
    jax.vmap(lambda t: seen.append(repr(t)))(tables)
    seen.append(repr(jax.eval_shape(lambda: tables)))
    seen.append(repr(jax.tree.map(lambda x: x.shape, tables)))
    seen.append(repr(jax.tree.map(lambda x: None, tables)))
    seen.append(repr(BlockTables(None)))
    donated = full_tables(spec_of())
    jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(donated)
    assert donated.ids["kv"].is_deleted()
    seen.append(repr(donated))
    assert len(seen) == 8
    assert all(text.startswith("BlockTables(") for text in seen)
    assert all("int32[4, 4]" in seen[i] for i in (0, 1, 3, 7))
