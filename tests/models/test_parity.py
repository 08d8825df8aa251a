"""Logits, states and greedy tokens against golden numbers of another implementation, in float32."""

import chex
import numpy as np
import pytest

from .driver import VARIANTS, block, decode, golden, model_of, new_cache, prefill

ATOL = 1e-4

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def expected_states(variant):
    """The golden states in the layout of the cache: K-1 conv columns, and Mamba-1's state as [N, D]."""
    numbers = golden(variant)
    conv = numbers["conv"][:, :, 1:].transpose(0, 2, 1)
    ssm = numbers["ssm"]
    return {"conv": conv, "ssm": ssm if ssm.ndim == 4 else ssm.transpose(0, 2, 1)}


def assert_close(actual, wanted):
    chex.assert_trees_all_equal_shapes(actual, wanted)
    chex.assert_trees_all_close(actual, wanted, atol=ATOL, rtol=0)


def test_whole_prompts_packed_with_null_rows_and_padding(variant):
    model, numbers = model_of(variant), golden(variant)
    prompts = [numbers[f"prompt_{i}"] for i in range(4)]
    assert [len(p) for p in prompts] == [150, 2, 45, 1]
    null, empty = (0, 0, [11, 12, 13]), (0, 7, [])
    rows = [
        (0, 1, prompts[0]),
        null,
        (0, 2, prompts[1]),
        (0, 3, prompts[2]),
        empty,
        (0, 4, prompts[3]),
    ]
    logits, cache = prefill(model, new_cache(model), rows, lead=2)
    for i, row in enumerate((0, 2, 3, 5)):
        assert_close(logits[row], numbers[f"logits_{i}"])
    assert np.isfinite(logits[1]).all()
    for untouched in (0, 5, 6, 7, 8, 9):
        for leaf in block(cache, untouched).values():
            assert np.isnan(leaf).all()


@pytest.mark.parametrize(
    "cuts", [(64, 128), (1, 2, 3, 66), (2, 4, 5, 149), (21, 43, 100), (63, 65, 129)], ids=str
)
def test_every_split_of_a_prompt_gives_the_same(variant, cuts):
    model, numbers = model_of(variant), golden(variant)
    prompt, cache, read, seen = numbers["prompt_0"], new_cache(model), 0, []
    for n, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(prompt)), strict=True)):
        # Alternating blocks: what a call reads is not what it writes.
        write = 1 + n % 2
        (_, logits), cache = prefill(
            model, cache, [(0, 5, numbers["prompt_2"][: n + 1]), (read, write, prompt[start:end])]
        )
        seen.append(logits)
        read = write
    assert_close(np.concatenate(seen), numbers["logits_0"])
    _, whole = prefill(model, new_cache(model), [(0, 1, prompt)])
    assert_close(block(cache, read), block(whole, 1))


def test_token_by_token_from_nothing(variant):
    model, numbers = model_of(variant), golden(variant)
    prompt, other, cache = numbers["prompt_2"], numbers["prompt_0"], new_cache(model)
    ours, theirs = [], []
    for t, (a, b) in enumerate(zip(prompt, other, strict=False)):
        rows = [(0, 0, 9), (3 if t else 0, 3, a), (0, 0, 9), (8 if t else 0, 8, b)]
        logits, cache = decode(model, cache, rows)
        assert np.isfinite(logits).all()
        ours.append(logits[1])
        theirs.append(logits[3])
        if t == 20:
            assert_close(block(cache, 8), expected_states(variant))
    assert_close(np.stack(ours), numbers["logits_2"])
    assert_close(np.stack(theirs), numbers["logits_0"][: len(prompt)])


def test_states_after_prefill(variant):
    model, numbers = model_of(variant), golden(variant)
    rows = [(0, 6, numbers["prompt_1"]), (0, 2, numbers["prompt_0"][:21])]
    _, cache = prefill(model, new_cache(model), rows)
    assert_close(block(cache, 2), expected_states(variant))


def test_states_at_a_checkpoint_inside_a_prompt(variant):
    model, numbers = model_of(variant), golden(variant)
    rows = [(0, 6, numbers["prompt_1"]), (0, 2, numbers["prompt_0"])]
    _, cache = prefill(model, new_cache(model), rows, checkpoint=(1, 21, 9))
    assert_close(block(cache, 9), expected_states(variant))
    # Going on from the checkpoint is going on with the prompt.
    (logits,), after = prefill(model, cache, [(9, 4, numbers["prompt_0"][21:])])
    assert_close(logits, numbers["logits_0"][21:])
    chex.assert_trees_all_equal(block(after, 9), block(cache, 9))


def test_a_prompt_shorter_than_the_window_then_one_token(variant):
    model, numbers = model_of(variant), golden(variant)
    prompt, cache = numbers["prompt_0"], new_cache(model)
    (logits,), cache = prefill(model, cache, [(0, 1, prompt[:1])])
    assert_close(logits, numbers["logits_0"][:1])
    for t in range(1, 6):
        logits, cache = decode(model, cache, [(1, 1, prompt[t])])
        assert_close(logits, numbers["logits_0"][t : t + 1])


def test_greedy_tokens(variant):
    model, numbers = model_of(variant), golden(variant)
    wanted = [numbers["greedy_0"], numbers["greedy_1"]]
    rows = [(0, 1 + k, numbers[f"greedy_{k}_prompt"]) for k in range(2)]
    logits, cache = prefill(model, new_cache(model), rows)
    made = [[row[-1].argmax()] for row in logits]
    for _ in range(23):
        logits, cache = decode(model, cache, [(1 + k, 1 + k, made[k][-1]) for k in range(2)])
        for k in range(2):
            made[k].append(logits[k].argmax())
    chex.assert_trees_all_equal([np.array(m, np.int32) for m in made], wanted)


@pytest.mark.parametrize(("lead", "company"), [(0, 3), (5, 17), (1, 45)])
def test_a_split_at_the_chunk_changes_no_bit_whatever_the_company(variant, lead, company):
    model, numbers = model_of(variant), golden(variant)
    prompt, other = numbers["prompt_0"], numbers["prompt_2"][:company]
    (wanted,), whole = prefill(model, new_cache(model), [(0, 1, prompt)])
    cache, read, seen = new_cache(model), 0, []
    for start, end in ((0, 64), (64, 128), (128, 150)):
        (_, logits), cache = prefill(
            model, cache, [(0, 5, other), (read, 2, prompt[start:end])], lead=lead
        )
        seen.append(logits)
        read = 2
    chex.assert_trees_all_equal(np.concatenate(seen), wanted)
    chex.assert_trees_all_equal(block(cache, 2), block(whole, 1))


def test_a_decode_step_changes_no_bit_whatever_the_row_and_company(variant):
    model, numbers = model_of(variant), golden(variant)
    _, cache = prefill(
        model, new_cache(model), [(0, 3, numbers["prompt_2"]), (0, 4, numbers["prompt_0"])]
    )
    alone, after = decode(model, cache, [(3, 3, 50)])
    packed, after_packed = decode(model, cache, [(4, 4, 8), (0, 0, 9), (0, 6, 60), (3, 5, 50)])
    chex.assert_trees_all_equal(packed[3], alone[0])
    chex.assert_trees_all_equal(block(after_packed, 5), block(after, 3))
