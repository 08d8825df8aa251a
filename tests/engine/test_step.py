"""The compiled step with plans made by hand: which blocks change, to what, and that no other bit does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate import scheduler, step
from jaxstate.plan import PlanShape, null_plan
from jaxstate.state import BlockTables, CacheSpec, StateCache
from jaxstate.step import EngineState, RowState
from tests.engine.conftest import prompt_of, request
from tests.state.layouts import changed_blocks, noise, raw
from tests.toy import ToyLM, continue_by_hand, scores_by_hand, state_by_hand

NONE = {"whole": set(), "paged": set()}


class Bench:
    """A device state made by hand, and the engine's programs to run plans on copies of it."""

    def __init__(self, engine):
        self.engine, self.spec, self.shape = engine, engine.spec, engine.shape
        like = jax.eval_shape(lambda: StateCache.create(engine.spec))
        self.cache = jax.tree.map(np.array, noise(like, seed=4))
        self.tables = {g: np.zeros((4, self.spec.capacity(g)), np.int32) for g in self.spec.names}
        self.rows = jax.tree.map(np.array, RowState.empty(self.spec))

    def own(self, row, whole, paged):
        """Gives the row these blocks."""
        self.tables["whole"][row, 0] = whole
        self.tables["paged"][row, : len(paged)] = paged

    def hold(self, row, text):
        """Puts the state after `text` where the row's blocks say."""
        blocks = self.tables["whole"][row, 0], self.tables["paged"][row, (len(text) - 1) // 4]
        for group, block in zip(("whole", "paged"), blocks, strict=True):
            for leaf, value in zip(
                jax.tree.leaves(self.cache.groups[group]),
                jax.tree.leaves(state_by_hand(text)),
                strict=True,
            ):
                leaf[:, block] = value

    def decoding(self, row, text, left, **sampling):
        """The row has read all of `text` but its last token, which comes next."""
        self.hold(row, text[:-1])
        rows = self.rows
        rows.active[row], rows.left[row] = True, left
        rows.token[row], rows.position[row] = text[-1], len(text) - 1

    def plan(self, prefill=False):
        return null_plan(self.shape, prefill=prefill)

    def state(self) -> EngineState:
        tables = BlockTables({g: jnp.array(t) for g, t in self.tables.items()})
        return EngineState(
            tables, jax.tree.map(jnp.array, self.cache), jax.tree.map(jnp.array, self.rows)
        )

    def run(self, plan, state=None):
        """The state and the outcome after the plan."""
        kind = "decode" if plan.prefill is None else "prefill"
        state = self.state() if state is None else state
        return self.engine._programs[kind](
            self.engine._params, state, self.engine.packed(kind, [plan])
        )

    def changed(self, after):
        return changed_blocks(self.state().cache, after.cache)


def prefill_tokens(plan, texts, starts=None):
    """Packs a text for each row of `texts`, from the given positions on."""
    p = plan.prefill
    lengths = [len(texts.get(row, ())) for row in range(4)]
    p.offsets[1:] = np.cumsum(lengths)
    for row, text in texts.items():
        p.tokens[p.offsets[row] : p.offsets[row + 1]] = text
        p.starts[row] = (starts or {}).get(row, 0)


def assert_block(cache, group, block, text):
    """The block holds the state after `text`, in every layer and leaf."""
    got = jax.tree.leaves(cache.groups[group])
    for leaf, value in zip(got, jax.tree.leaves(state_by_hand(text)), strict=True):
        for layer in np.asarray(leaf)[:, block]:
            np.testing.assert_array_equal(layer, value)


def assert_same_bits(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def bench(compiled):
    return Bench(compiled)


TEXT = prompt_of(7, seed=1)


def stale(bench, *rows):
    """Leaves ids in rows that nobody is in: what a finished request may forget."""
    for row in rows:
        bench.own(row, row + 4, range(40 + 10 * row, 44 + 10 * row))
        bench.rows.token[row], bench.rows.position[row] = 3, 9
        bench.rows.left[row] = 100


def test_inv21_br01_one_real_row_in_a_padded_batch_changes_one_block(bench):
    bench.own(0, 3, [10, 11])
    bench.decoding(0, TEXT, left=1)
    stale(bench, 1, 2, 3)
    after, outcome = bench.run(bench.plan())
    assert bench.changed(after) == {"whole": {3}, "paged": {11}}  # position 6 is in column 1
    for group, block in (("whole", 3), ("paged", 11)):
        assert_block(after.cache, group, block, TEXT)
    assert outcome.made.sum() == 1 and outcome.token[0, 0] == continue_by_hand(TEXT, 1)[0]
    assert after.rows.active.tolist() == [False] * 4


def test_inv21_inv39_br01_br85_a_dummy_row_in_a_padded_batch_changes_none(bench):
    """Every row holds stale ids; nobody is active; one prompt token is sent to row 0 all the same."""
    stale(bench, 0, 1, 2, 3)
    after, outcome = bench.run(bench.plan())
    assert bench.changed(after) == NONE and not outcome.made.any()
    assert_same_bits(after.rows, bench.state().rows)
    # The same through the prefill program: rows without blocks, lengths [1, 0, 0, 0].
    for group in bench.tables:
        bench.tables[group][0] = 0
    plan = bench.plan(prefill=True)
    prefill_tokens(plan, {0: (5,)})
    after, outcome = bench.run(plan)
    assert bench.changed(after) == NONE and not outcome.made.any() and not outcome.bad.any()


def test_inv21_one_prompt_token_in_a_padded_batch_changes_one_block(bench):
    bench.own(0, 3, [10, 11])
    bench.hold(0, TEXT[:6])
    stale(bench, 1, 2, 3)
    plan = bench.plan(prefill=True)
    prefill_tokens(plan, {0: TEXT[6:]}, {0: 6})
    after, _ = bench.run(plan)
    assert bench.changed(after) == {"whole": {3}, "paged": {11}}
    assert_block(after.cache, "paged", 11, TEXT)


def test_inv10_br01_a_finished_row_is_cleared_by_the_plan_without_a_further_call(bench):
    """Rows 0 and 1; row 1 ends, its block is poisoned, and row 0 goes on beside it."""
    bench.own(0, 3, [10, 11, 12])
    bench.decoding(0, TEXT, left=8)
    bench.own(1, 7, [20, 21])
    bench.decoding(1, TEXT, left=8)
    plan = bench.plan()
    plan.clear[1] = True
    plan.freed["whole"][7] = plan.freed["paged"][20] = plan.freed["paged"][21] = True
    after, outcome = bench.run(plan)
    for group in bench.spec.names:
        table = np.asarray(after.tables.ids[group])
        assert not table[1].any()
        np.testing.assert_array_equal(table[0], bench.tables[group][0])
    assert outcome.token[:, 0].tolist() == continue_by_hand(TEXT, 4)
    assert not outcome.made[:, 1].any() and not outcome.bad.any()
    changed = bench.changed(after)
    assert changed == {"whole": {3, 7}, "paged": {11, 12, 20, 21}}
    assert np.isnan(np.asarray(after.cache.groups["whole"][0])[:, 7]).all()


def test_inv20_inv23_br64_decoding_writes_the_blocks_it_passes_and_no_other(bench):
    bench.own(3, 8, [50, 51, 52])  # the last row is the live one
    bench.decoding(3, TEXT, left=9)
    stale(bench, 0, 1, 2)
    after, outcome = bench.run(bench.plan())
    new = continue_by_hand(TEXT, 4)
    assert outcome.token[:, 3].tolist() == new
    # Read: positions 6 to 9, so columns 1 and 2; the last token made is not read yet.
    assert bench.changed(after) == {"whole": {8}, "paged": {51, 52}}
    text = (*TEXT, *new)
    assert_block(after.cache, "whole", 8, text[:10])
    assert_block(after.cache, "paged", 51, text[:8])
    assert_block(after.cache, "paged", 52, text[:10])
    assert after.rows.position[3] == 10 and after.rows.left[3] == 5 and after.rows.active[3]


def test_br66_a_row_that_stops_within_a_step_writes_no_further(bench):
    new = continue_by_hand(TEXT, 4)
    stop_at = next(i for i in (1, 2) if new[i] not in new[:i])
    bench.own(0, 3, [10, 11, 12])
    bench.decoding(0, TEXT, left=9)
    bench.rows.stop_ids[0, 5] = new[stop_at]
    bench.own(1, 4, [20, 21, 22])
    bench.decoding(1, TEXT, left=2)
    after, outcome = bench.run(bench.plan())
    assert outcome.made[:, 0].tolist() == [i <= stop_at for i in range(4)]
    assert outcome.made[:, 1].tolist() == [True, True, False, False]
    assert after.rows.active.tolist() == [False] * 4
    assert after.rows.position.tolist() == [7 + stop_at, 8, 0, 0]
    text = (*TEXT, *new)
    assert_block(after.cache, "whole", 3, text[: 7 + stop_at])
    assert_block(after.cache, "whole", 4, text[:8])


@pytest.fixture
def mixed(bench):
    """A prompt step: row 0 starts, row 1 continues from 6 tokens, row 2 is null, row 3 starts over two boundaries."""
    texts = {0: prompt_of(3, 2), 1: prompt_of(11, 3), 3: prompt_of(9, 4)}
    bench.own(1, 2, [60, 61, 62])
    bench.hold(1, texts[1][:6])
    plan = bench.plan(prefill=True)
    new = {0: (1, [70]), 3: (5, [80, 81, 82, 83])}
    for group in bench.spec.names:
        cells, at = plan.cells[group], 0
        for row, ids in new.items():
            for column, block in enumerate([ids[0]] if group == "whole" else ids[1]):
                cells.rows[at], cells.columns[at], cells.ids[at] = row, column, block
                plan.zero[group][at] = block
                at += 1
    for row in new:
        plan.admission.rows[row], plan.admission.budget[row] = True, 5
    plan.admission.sampling.temperature[0] = 0.5
    prefill_tokens(plan, {0: texts[0], 1: texts[1][6:], 3: texts[3]}, {1: 6})
    plan.prefill.sample[:] = [True, False, False, True]
    return bench, plan, texts


def test_inv20_inv25_a_prompt_step_writes_just_its_rows_blocks(mixed):
    bench, plan, texts = mixed
    after, outcome = bench.run(plan)
    assert bench.changed(after) == {"whole": {1, 2, 5}, "paged": {70, 61, 62, 80, 81, 82, 83}}
    for row, blocks in {0: [70], 1: [None, 61, 62], 3: [80, 81, 82]}.items():
        for column, block in enumerate(blocks):
            if block is not None:
                assert_block(after.cache, "paged", block, texts[row][: 4 * column + 4])
    for block, row in {1: 0, 2: 1, 5: 3}.items():
        assert_block(after.cache, "whole", block, texts[row])
    assert not any(raw(x)[:, 83].any() for x in jax.tree.leaves(after.cache.groups["paged"]))
    assert outcome.made.tolist() == [[True, False, False, True]]
    assert outcome.token[0, 3] == continue_by_hand(texts[3], 1)[0]
    scores = scores_by_hand(texts[3])
    expect = scores.max() - np.log(np.exp(scores).sum())
    np.testing.assert_allclose(outcome.logprob[0, 3], expect, rtol=1e-6)
    assert after.rows.active.tolist() == [True, False, False, True]
    assert after.rows.left.tolist() == [4, 0, 0, 4]
    assert after.rows.position.tolist() == [3, 11, 0, 9]


def test_inv13_inv18_inv19_inv25_br13_nothing_depends_on_memory_that_nobody_may_read(mixed):
    """All blocks but those of row 1 hold noise, NaN or zeros, null too: the same bits come out."""
    bench, plan, _ = mixed
    mine = {"whole": [2], "paged": [60, 61, 62]}
    written = {"whole": [1, 2, 5], "paged": [70, 61, 62, 80, 81, 82]}
    results = []
    for fill in (None, np.nan, 0):
        for group, keep in mine.items():
            for leaf in jax.tree.leaves(bench.cache.groups[group]):
                others = np.setdiff1d(np.arange(leaf.shape[1]), keep)
                if fill is not None:
                    least = np.iinfo(np.int32).min if np.isnan(fill) else 0
                    leaf[:, others] = fill if leaf.dtype.kind in "fV" else least
        after, outcome = bench.run(plan)
        for group, leaves in after.cache.groups.items():
            for x, old in zip(
                jax.tree.leaves(leaves), jax.tree.leaves(bench.cache.groups[group]), strict=True
            ):
                np.testing.assert_array_equal(raw(x)[:, 0], raw(old)[:, 0])  # null's bytes
        kept = {
            g: jax.tree.map(lambda x, i=ids: np.asarray(x)[:, i], after.cache.groups[g])
            for g, ids in written.items()
        }
        results.append((kept, outcome, after.rows, after.tables))
    for other in results[1:]:
        assert_same_bits(results[0], other)
    assert np.isfinite(np.asarray(results[0][1].logprob)).all()


def test_br03_br04_what_null_rows_and_padding_hold_changes_no_bit(mixed):
    bench, plan, _ = mixed
    clean, outcome = bench.run(plan)
    end = plan.prefill.offsets[-1]
    plan.prefill.tokens[end:] = 12
    plan.prefill.starts[2] = 200
    plan.admission.budget[2] = 9
    plan.admission.sampling.temperature[2] = 0.9
    stale(bench, 2)
    for group in bench.tables:
        bench.tables[group][2] = 0
    noisy, outcome_2 = bench.run(plan)
    assert_same_bits((clean.cache, clean.tables, outcome), (noisy.cache, noisy.tables, outcome_2))
    assert_same_bits(clean.rows.active, noisy.rows.active)


def test_inv30_inv39_br85_a_hundred_idle_steps_change_no_bit(bench):
    stale(bench, 0, 1, 2, 3)
    first = state = bench.state()
    first = jax.tree.map(np.array, first)
    for i in range(100):
        state, outcome = bench.run(bench.plan(prefill=i % 2 == 1), state)
        assert not outcome.made.any() and not outcome.bad.any()
    assert_same_bits(jax.tree.map(np.asarray, state), first)


def test_br125_rows_that_break_are_marked_and_the_others_are_not(bench):
    bench.own(0, 3, [10, 11, 12])
    bench.decoding(0, TEXT, left=9)
    bench.own(1, 4, [20, 21, 22])
    bench.decoding(1, TEXT, left=9)
    bench.cache.groups["whole"][0][:, 4] = np.nan
    after, outcome = bench.run(bench.plan())
    assert outcome.bad[:, 0].tolist() == [False] * 4
    assert outcome.bad[:, 1].tolist() == [True, False, False, False]
    assert not outcome.made[:, 1].any() and not outcome.logprob[:, 1].any()
    assert outcome.token[:, 0].tolist() == continue_by_hand(TEXT, 4)
    assert after.rows.active.tolist() == [True, False, False, False]


# The preparation alone, with copies, which this engine's plans have no use for yet.

SMALL = CacheSpec(ToyLM().groups(), rows=4, max_len=16)
COPIES = PlanShape(SMALL, chunk_tokens=64, copies=2)


def small_state():
    cache = noise(jax.eval_shape(lambda: StateCache.create(SMALL)), seed=2)
    return EngineState(BlockTables.empty(SMALL), cache, RowState.empty(SMALL))


class PrepareTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_inv15_br15_the_order_is_poison_zero_copy(self):
        plan, state = null_plan(COPIES, prefill=False), small_state()
        plan.freed["paged"][[5, 6, 7]] = True
        plan.zero["paged"][:2] = [6, 7]
        plan.copies["paged"][0][0], plan.copies["paged"][1][0] = 9, 7
        after = self.variant(lambda s, p: step.prepare(s, p, poison=True))(state, plan)
        assert changed_blocks(state.cache, after.cache) == {"whole": set(), "paged": {5, 6, 7}}
        for old, new in zip(
            jax.tree.leaves(state.cache.groups["paged"]),
            jax.tree.leaves(after.cache.groups["paged"]),
            strict=True,
        ):
            np.testing.assert_array_equal(raw(new)[:, 7], raw(old)[:, 9])  # zeroed, then copied to
            assert not raw(new)[:, 6].any()  # freed, and handed out again by the same plan
        assert np.isnan(np.asarray(after.cache.groups["paged"][0])[:, 5]).all()

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv10_rows_are_cleared_before_cells_are_written(self):
        plan, state = null_plan(COPIES, prefill=False), small_state()
        tables = state.tables.write(1, {"whole": [2], "paged": [3, 4, 5]})
        tables = tables.write(2, {"whole": [3], "paged": [6]})
        plan.clear[1] = True
        cells = plan.cells["paged"]
        cells.rows[0], cells.columns[0], cells.ids[0] = 1, 0, 9
        rows = state.rows.replace(active=jnp.array([True] * 4), left=jnp.arange(4) + 10)
        plan.admission.rows[2], plan.admission.budget[2] = True, 77
        plan.admission.sampling.seed[:] = 5
        state = state.replace(tables=tables, rows=rows)
        after = self.variant(lambda s, p: step.prepare(s, p, poison=False))(state, plan)
        assert after.tables.ids["paged"].tolist() == [[0] * 4, [9, 0, 0, 0], [6, 0, 0, 0], [0] * 4]
        assert after.tables.ids["whole"].tolist() == [[0], [0], [3], [0]]
        # Rows not marked keep their settings.
        assert after.rows.active.tolist() == [True, False, False, True]
        assert after.rows.left.tolist() == [10, 11, 77, 13]
        assert after.rows.sampling.seed.tolist() == [0, 0, 5, 0]


def test_br88_br129_br130_every_plan_has_one_shape_and_is_traced_once():
    """Mixed work through the scheduler: two structures of plan, prompt and decode, and one trace for each."""
    shape = PlanShape(SMALL, chunk_tokens=64)
    prepare = jax.jit(chex.assert_max_traces(lambda s, p: step.prepare(s, p, poison=False), n=2))
    schedule = scheduler.Schedule.create(shape)
    for i in range(30):
        schedule = scheduler.submit(schedule, request(f"r{i}", prompt_of(1 + i % 15), 1 + i % 4))
    state, kinds = small_state(), set()
    while (planned := scheduler.plan_next(schedule, decode_steps=2)) is not None:
        schedule, plan = planned[0], planned[1].plan
        null = null_plan(shape, prefill=plan.prefill is not None)
        chex.assert_trees_all_equal_shapes_and_dtypes(plan, null)
        state = prepare(state, plan)
        kinds.add(planned[1].kind)
        for group, table in schedule.tables.items():
            np.testing.assert_array_equal(state.tables.ids[group], table)
    assert kinds == {"prefill", "decode"} and schedule.idle
