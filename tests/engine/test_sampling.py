"""Sampling against plain numpy, and draws against the exact distribution."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.sampling import Sampling, keep, request_hash, sample

VOCAB = 13
RUN = jax.jit(sample)


def sampling_of(rows, **fields) -> Sampling:
    values = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "request": 0, **fields,
    }  # fmt: skip
    kinds = {"top_k": np.int32, "seed": np.uint32, "request": np.uint32}
    return Sampling(
        **{
            k: jnp.asarray(np.broadcast_to(np.asarray(v, kinds.get(k, np.float32)), rows))
            for k, v in values.items()
        }
    )


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution that is drawn from, token by token in float64."""
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[: top_k or len(p)]
    share = sum(p[i] for i in kept)
    nucleus, total = [], 0.0
    for i in kept:
        if total >= top_p * share:
            break
        nucleus.append(i)
        total += p[i]
    kept = [i for i in nucleus if p[i] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


CASES = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.6},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tokens_left_are_those_of_plain_numpy(case):
    logits = np.random.default_rng(7).normal(size=(200, VOCAB)).astype(np.float32) * 2
    fields = sampling_of(200, **case)
    scaled = logits / np.float32(case.get("temperature", 1.0))
    got = np.asarray(jax.jit(keep)(scaled, fields))
    expect = np.array([probabilities(row, **case) > 0 for row in logits])
    np.testing.assert_array_equal(got, expect)


def test_ties_at_a_border_all_stay():
    scaled = jnp.array([[3.0, 2.0, 2.0, 2.0, 0.0]])
    assert keep(scaled, sampling_of(1, top_k=2)).tolist() == [[True, True, True, True, False]]
    assert keep(scaled, sampling_of(1, top_k=1)).tolist() == [[True] + [False] * 4]
    even = jnp.zeros((1, 4))
    assert keep(even, sampling_of(1, top_p=0.3)).tolist() == [[True] * 4]
    assert keep(even, sampling_of(1, min_p=0.99)).tolist() == [[True] * 4]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_exact_distribution(case):
    """20,000 draws with one seed each; chi-square below its 1e-4 quantile, and nothing drawn that was dropped."""
    rows = 20_000
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 1.5
    fields = sampling_of(rows, seed=np.arange(rows), **case)
    position = jnp.full(rows, 9, jnp.int32)
    token, logprob, finite = RUN(jnp.broadcast_to(logits, (rows, VOCAB)), fields, position)
    assert finite.all()
    expect = probabilities(logits, **case) * rows
    got = np.bincount(token, minlength=VOCAB)
    assert not got[expect == 0].any()
    live = expect > 0
    chi2 = ((got - expect)[live] ** 2 / expect[live]).sum()
    assert (
        chi2
        < [0, 15.2, 18.5, 21.2, 23.6, 25.8, 27.9, 29.9, 31.9, 33.8, 35.6, 37.4, 39.2][
            live.sum() - 1
        ]
        + 1e-9
    )
    # Log-probabilities are those of the unmodified distribution, whatever the filters.
    full = np.log(probabilities(logits))
    np.testing.assert_allclose(logprob, full[np.asarray(token)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vary", ["seed", "request", "position"])
def test_draws_are_independent_over_seeds_requests_and_positions(vary):
    """Pairs of neighbours over each of the three keys are uniform over all 16 pairs."""
    rows = 16_000
    fields = {"seed": 5, "request": 6}
    if vary != "position":
        fields[vary] = np.arange(rows)
    position = jnp.arange(rows, dtype=jnp.int32) if vary == "position" else jnp.full(rows, 3)
    token = np.asarray(RUN(jnp.zeros((rows, 4)), sampling_of(rows, **fields), position)[0])
    pairs = np.bincount(4 * token[:-1] + token[1:], minlength=16)
    assert ((pairs - rows / 16) ** 2 / (rows / 16)).sum() < 44.3  # 15 degrees of freedom, 1e-4


def test_the_three_keys_do_not_stand_in_for_each_other():
    triples = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (2, 3, 1), (3, 1, 2)]
    seed, request, position = (np.array(x) for x in zip(*triples, strict=True))
    fields = sampling_of(6, seed=seed, request=request)
    tokens = RUN(jnp.zeros((6, 4096)), fields, jnp.asarray(position, jnp.int32))[0]
    assert len(set(tokens.tolist())) == 6


def test_br79_br82_rows_draw_alone_and_permute_with_their_seeds():
    """Mixed greedy, filtered and plain rows: each row's token is that of the row by itself, in any order."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(8, VOCAB)).astype(np.float32)
    fields = {
        "temperature": np.array([1, 0, 1.3, 0.5, 1, 0, 2, 1]),
        "seed": np.arange(8) % 3,
        "request": np.arange(100, 108),
        "top_k": np.array([0, 3, 0, 4, 0, 0, 2, 0]),
        "top_p": np.array([1, 1, 0.5, 1, 1, 0.2, 1, 1]),
        "min_p": np.array([0, 0, 0, 0, 0.1, 0, 0, 0]),
    }
    position = np.arange(8, dtype=np.int32) + 3
    whole = RUN(logits, sampling_of(8, **fields), position)
    order = rng.permutation(8)
    shuffled = {k: v[order] for k, v in fields.items()}
    moved = RUN(logits[order], sampling_of(8, **shuffled), position[order])
    for a, b in zip(whole, moved, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], b)
    for i in range(8):
        alone = sampling_of(8, **{k: np.full(8, v[i]) for k, v in fields.items()})
        one = RUN(np.tile(logits[i], (8, 1)), alone, np.full(8, position[i]))
        for a, b in zip(whole, one, strict=True):
            assert (np.asarray(b) == np.asarray(a)[i]).all()


def test_br82_equal_scores_and_four_seeds():
    fields = {"seed": np.arange(4), "request": 9}
    logits, position = jnp.zeros((4, 1000)), jnp.full(4, 2, jnp.int32)
    tokens = RUN(logits, sampling_of(4, **fields), position)[0]
    assert len(set(tokens.tolist())) == 4
    back = RUN(logits, sampling_of(4, seed=np.arange(4)[::-1], request=9), position)[0]
    assert back.tolist() == tokens.tolist()[::-1]


def test_br82_the_generator_does_not_depend_on_the_process_default():
    fields, logits = sampling_of(4, seed=np.arange(4)), jnp.zeros((4, 1000))
    expect = RUN(logits, fields, jnp.arange(4))[0]
    with jax.default_prng_impl("rbg"):
        got = jax.jit(sample)(logits, fields, jnp.arange(4))[0]
    assert got.tolist() == expect.tolist()


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    logits = np.random.default_rng(0).normal(size=(50, VOCAB)).astype(np.float32)
    logits[7, [2, 5]] = 9
    token, logprob, finite = RUN(logits, sampling_of(50, temperature=0, top_k=3), jnp.zeros(50, jnp.int32))  # fmt: skip
    np.testing.assert_array_equal(token, logits.argmax(1))
    assert token[7] == 2 and finite.all()
    expect = [np.log(probabilities(row))[row.argmax()] for row in logits]
    np.testing.assert_allclose(logprob, expect, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_br125_scores_that_are_not_finite_are_marked_in_their_row_alone(bad, temperature):
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32)
    fields, position = sampling_of(3, temperature=temperature, seed=4), jnp.arange(3)
    expect = RUN(logits, fields, position)
    spoilt = logits.copy()
    spoilt[1, 6] = bad
    token, logprob, finite = RUN(spoilt, fields, position)
    assert finite.tolist() == [True, False, True] and token[1] == 0
    for i in (0, 2):
        assert (token[i], logprob[i]) == (expect[0][i], expect[1][i])
    spoilt[1] = bad
    assert RUN(spoilt, fields, position)[2].tolist() == [True, False, True]


def test_a_requests_hash_is_the_same_in_every_process():
    assert request_hash("") == 1188227382  # BLAKE2s of no bytes, 4 bytes of it, little end first
    assert request_hash("req-1") != request_hash("req-2")
    assert 0 <= request_hash("\ud83d") < 2**32  # half a surrogate pair is still an id


@pytest.mark.parametrize("filters", [False, True])
def test_the_tokens_are_the_same_with_and_without_branches(filters):
    logits = 3 * jax.random.normal(jax.random.key(4), (6, 50))
    temperature = jnp.array([0.0, 0.5, 1.0, 0.0, 2.0, 1.0])
    fields = {"temperature": temperature, "seed": jnp.arange(6, dtype=jnp.uint32)}
    if filters:
        fields |= {
            "top_k": jnp.array([5, 3, 0, 0, 7, 0]),
            "top_p": jnp.array([1.0, 0.5, 1, 1, 0.9, 1]),
        }
    sampling, position = sampling_of(6, **fields), jnp.arange(6)
    forced = jnp.array([-1, -1, 7, -1, -1, -1])
    draw = jax.jit(sample, static_argnames="filters")
    asked = draw(logits, sampling, position, forced)
    told = draw(logits, sampling, position, forced, filters=filters)
    chex.assert_trees_all_equal(asked, told)
    text = draw.lower(logits, sampling, position, forced, filters=filters).as_text()
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
