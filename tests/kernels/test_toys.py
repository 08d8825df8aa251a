"""Scenarios of reported faults, with values worked by hand; each names its report."""

import numpy as np
import pytest

from pallas_kernels import dispatch
from tests.kernels.toys import BLOCKS, LAYER, SUMS, block, call, empty_pool

every = pytest.mark.parametrize("implementation", dispatch.PORTABLE)
every_sum = pytest.mark.parametrize("op", SUMS)
every_op = pytest.mark.parametrize("op", (*SUMS, "causal_conv"))

FIVE, FIVE_SUMS = [1, 2, 3, 4, 5], [1, 2.5, 4.25, 6.125, 8.0625]
TENS, TENS_SUMS = [10, 20, 30], [10, 25, 42.5]


@every
@every_sum
def test_br123_state_does_not_cross_packed_rows(op, implementation):
    y, _, pool = call(op, implementation, empty_pool(op), [(FIVE, 0, 3), (TENS, 0, 7)])
    assert y == [FIVE_SUMS, TENS_SUMS]
    assert block(pool, 3) == [8.0625] and block(pool, 7) == [42.5]


@every
def test_br123_convolution_does_not_cross_packed_rows(implementation):
    rows = [([1, 2, 3, 4, 5, 6], 0, 3), (TENS, 0, 7)]
    y, _, pool = call("causal_conv", implementation, empty_pool("causal_conv"), rows)
    assert y == [[4, 11, 20, 30, 40, 50], [40, 110, 200]]
    assert block(pool, 3) == [4, 5, 6] and block(pool, 7) == [10, 20, 30]


@every
@every_sum
def test_br05_a_reused_block_does_not_leak_its_former_owner(op, implementation):
    _, _, pool = call(op, implementation, empty_pool(op), [(FIVE, 0, 3)])
    y, _, pool = call(op, implementation, pool, [(TENS, 0, 3)])
    assert y == [TENS_SUMS] and block(pool, 3) == [42.5]


@every
@every_sum
def test_br07_a_prefix_hit_continues_from_the_checkpoint(op, implementation):
    _, _, pool = call(op, implementation, empty_pool(op), [(FIVE, 0, 3, {3: 6})])
    y, _, pool = call(op, implementation, pool, [([9], 6, 4)])
    assert y == [[11.125]]
    assert block(pool, 6) == [4.25] and block(pool, 3) == [8.0625]


@every
@every_op
def test_br10_a_fork_copies_the_state_whatever_the_row(op, implementation):
    _, _, pool = call(op, implementation, empty_pool(op), [(FIVE, 0, 3)])
    parent = block(pool, 3)
    forks = [([6], 3, 9), ([7, 8], 3, 4), ([9], 3, 5)]
    solo = [call(op, implementation, pool, [fork]) for fork in forks]
    for order in ([2, 0, 1], [1, 2, 0]):
        y, _, after = call(op, implementation, pool, [forks[i] for i in order])
        assert y == [solo[i][0][0] for i in order]
        for i, (_, _, write) in enumerate(forks):
            assert block(after, write) == block(solo[i][2], write)
        assert block(after, 3) == parent


@every
@every_sum
@pytest.mark.parametrize("pad", [0.0, 7.0, np.nan])
def test_br36_padding_does_not_decay_the_state(op, implementation, pad):
    y, _, pool = call(op, implementation, empty_pool(op), [([1, 2, 3], 0, 3)], after=[pad] * 3)
    assert y == [[1, 2.5, 4.25]] and block(pool, 3) == [4.25]


@every
@pytest.mark.parametrize("pad", [0.0, 7.0, np.nan])
def test_br36_padding_does_not_enter_the_window(implementation, pad):
    pool = empty_pool("causal_conv")
    _, _, pool = call("causal_conv", implementation, pool, [([1, 2, 3], 0, 3)], after=[pad] * 3)
    assert block(pool, 3) == [1, 2, 3]


@every
@pytest.mark.parametrize("op", SUMS)
def test_br69_placeholders_after_a_prompts_last_token_do_not_reach_the_state(op, implementation):
    """The tail is one token; what stands behind it in the packed call, zeros or another row, is not its."""
    _, _, pool = call(op, implementation, empty_pool(op), [([1, 2], 0, 3)])
    y, _, pool = call(op, implementation, pool, [([3], 3, 3), ([0, 0, 0], 0, 4)], after=[0.0] * 3)
    assert y[0] == [4.25] and block(pool, 3) == [4.25]


@every
def test_br37_tokens_before_the_first_row_are_padding(implementation):
    for op, values, state in [
        ("ssd", [1, 2.5, 4.25], [4.25]),
        ("selective_scan", [1, 2.5, 4.25], [4.25]),
        ("causal_conv", [4, 11, 20], [1, 2, 3]),
    ]:
        y, all_y, pool = call(
            op, implementation, empty_pool(op), [([1, 2, 3], 0, 3)], before=[9, 9]
        )
        assert y == [values] and block(pool, 3) == state
        assert all_y[:2].tolist() == [0, 0]


@every
def test_br39_a_short_row_beside_a_long_one_is_right_in_every_chunk(implementation):
    long = [float(i) for i in range(13)]
    y, _, pool = call("ssd", implementation, empty_pool("ssd"), [(FIVE, 0, 3), (long[:8], 0, 4)])
    assert y[0] == FIVE_SUMS
    y, _, pool = call("ssd", implementation, pool, [([], 3, 3), (long[8:], 4, 4)])
    assert block(pool, 3) == [8.0625]
    alone, _, _ = call("ssd", implementation, empty_pool("ssd"), [(long, 0, 4)])
    assert y[1] == alone[0][8:]


@every
@pytest.mark.parametrize("tail", [1, 2, 3, 4])
def test_br49_a_row_shorter_than_the_window_leaves_the_shared_block_alone(implementation, tail):
    pool = empty_pool("causal_conv")
    pool[LAYER, 8, :, 0] = [1, 2, 3]
    inputs = [4, 5, 6, 7][:tail]
    y, _, pool = call("causal_conv", implementation, pool, [(inputs, 8, 2)])
    assert y == [[30, 40, 50, 60][:tail]]
    assert block(pool, 2) == [1, 2, 3, 4, 5, 6, 7][tail : tail + 3]
    assert block(pool, 8) == [1, 2, 3]
    y, _, _ = call("causal_conv", implementation, pool, [([9], 8, 5)])
    assert y == [[50]]


@every
@every_sum
@pytest.mark.parametrize("size", [8, 10, 16, 24, 40])
def test_br64_forty_ones_sum_to_two_whatever_the_split(op, implementation, size):
    pool, source = empty_pool(op), 0
    for start in range(0, 40, size):
        write = 1 + start // size
        count = min(size, 40 - start)
        _, _, pool = call(op, implementation, pool, [([1.0] * count, source, write)])
        source = write
    assert block(pool, source) == [2.0]


@every
@every_sum
def test_br66_br68_the_state_after_every_accepted_prefix_can_be_kept(op, implementation):
    points = {1: 4, 2: 6, 3: 5, 4: 11}
    _, _, pool = call(op, implementation, empty_pool(op), [([1, 2, 3, 4], 0, 3, points)])
    assert [block(pool, points[p]) for p in (1, 2, 3, 4)] == [[1], [2.5], [4.25], [6.125]]
    for accepted, expected in enumerate([9.0, 9.5, 10.25, 11.125, 12.0625]):
        y, _, _ = call(op, implementation, pool, [([9], points.get(accepted, 0), 2)])
        assert y == [[expected]]


@every
def test_br68_windows_can_be_kept_after_every_token(implementation):
    points = {1: 4, 2: 6, 3: 5, 4: 11}
    pool = empty_pool("causal_conv")
    pool[LAYER, 8, :, 0] = [7, 8, 9]
    _, _, pool = call("causal_conv", implementation, pool, [([1, 2, 3, 4], 8, 3, points)])
    windows = [block(pool, points[p]) for p in (1, 2, 3, 4)]
    assert windows == [[8, 9, 1], [9, 1, 2], [1, 2, 3], [2, 3, 4]]


@every
@every_sum
def test_br70_several_tokens_continue_a_warm_state(op, implementation):
    _, _, pool = call(op, implementation, empty_pool(op), [([1, 2, 3], 0, 3)])
    y, _, pool = call(op, implementation, pool, [([4, 5], 3, 3)])
    assert y == [[6.125, 8.0625]] and block(pool, 3) == [8.0625]


@every
def test_br70_several_tokens_continue_a_warm_window(implementation):
    _, _, pool = call("causal_conv", implementation, empty_pool("causal_conv"), [([1, 2, 3], 0, 3)])
    y, _, pool = call("causal_conv", implementation, pool, [([4, 5], 3, 3)])
    assert y == [[30, 40]] and block(pool, 3) == [3, 4, 5]


@every
@every_sum
@pytest.mark.parametrize("start", range(9))
def test_br122_a_state_decays_from_its_rows_start_not_the_chunks(op, implementation, start):
    pool = empty_pool(op)
    pool[LAYER, 5] = 8.0625
    rows = [([3.0] * start, 0, 2), ([1, 2, 3, 4, 5, 6, 7], 5, 6)]
    y, _, pool = call(op, implementation, pool, rows)
    assert y[1][:2] == [5.03125, 4.515625]
    assert block(pool, 5) == [8.0625]


@every
@every_op
def test_br01_br85_null_rows_leave_every_byte_and_answer_zero(op, implementation):
    pool = empty_pool(op, fill=7.0)
    pool[LAYER, 7] = np.nan
    rows = [([1.0], 0, 0), ([2.0, np.nan], 7, 0, {1: 5}), ([], 7, 0)]
    _, y, after = call(op, implementation, pool, rows)
    assert after.tobytes() == pool.tobytes()
    assert y.tolist() == [0.0] * len(y)


@every
@every_op
def test_br03_a_row_without_tokens_does_nothing_whatever_its_ids(op, implementation):
    pool = empty_pool(op, fill=7.0)
    alone = call(op, implementation, pool, [(FIVE, 0, 5)])
    stale = call(op, implementation, pool, [(FIVE, 0, 5), ([], 2, 4, {1: 6}), ([], 5, 9)])
    assert stale[0][0] == alone[0][0]
    assert stale[2].tobytes() == alone[2].tobytes()


@every
@every_op
@pytest.mark.parametrize("stray", [-1, -BLOCKS, BLOCKS, BLOCKS + 1, 2**31 - 1, -(2**31)])
def test_br29_br140_a_stray_write_id_never_lands_on_a_block(op, implementation, stray):
    pool = empty_pool(op, fill=7.0)
    last = BLOCKS - 1
    alone = call(op, implementation, pool, [(FIVE, 0, last)])
    rows = [(TENS, 0, stray, {1: stray, 3: stray}), (FIVE, 0, last)]
    both = call(op, implementation, pool, rows)
    assert both[0][1] == alone[0][0]
    assert both[2].tobytes() == alone[2].tobytes()


@every
@every_op
@pytest.mark.parametrize("stray", [-1, -BLOCKS, BLOCKS, 2**31 - 1])
def test_br29_br141_a_stray_read_id_reads_no_block_and_is_loud(op, implementation, stray):
    pool = empty_pool(op, fill=7.0)
    y, _, after = call(op, implementation, pool, [(FIVE, stray, 3), (FIVE, 0, 4)])
    assert np.isnan(y[0][0]) and np.isnan(block(after, 3)).any() == (op != "causal_conv")
    alone = call(op, implementation, pool, [(FIVE, 0, 4)])
    assert y[1] == alone[0][0] and block(after, 4) == block(alone[2], 4)


@every
@every_op
def test_br31_block_zero_is_neither_read_nor_written_in_a_hundred_steps(op, implementation):
    pool = empty_pool(op)
    expected, source = 0.0, 0
    for _ in range(100):
        y, _, pool = call(op, implementation, pool, [([1.0], source, 3), ([5.0], 0, 0)])
        source = 3
        expected = 0.5 * expected + 1
    assert y[0] == [10.0 if op == "causal_conv" else expected]
    assert np.isnan(pool[LAYER, 0]).all()


@every
@every_op
def test_br34_padding_answers_exactly_zero(op, implementation):
    _, y, _ = call(op, implementation, empty_pool(op), [(FIVE, 0, 3)], before=[4.0], after=[3.0])
    assert y[0] == 0 and y[6:].tolist() == [0.0] * len(y[6:])


@every
@every_op
def test_br36_checkpoints_past_a_rows_end_are_not_written(op, implementation):
    pool = empty_pool(op, fill=7.0)
    rows = [([1, 2, 3], 0, 3, {0: 4, -1: 5, 4: 6, 900: 8})]
    _, _, after = call(op, implementation, pool, rows)
    after[LAYER, 3] = 7.0
    assert after.tobytes() == pool.tobytes()
