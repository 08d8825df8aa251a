"""The shipped model through the whole engine on a GPU."""

import jax
import numpy as np
import pytest

import jaxstate as js
import pallas_kernels
from benchmarks.steps import pool_copies
from jaxstate.lm import DEMO

pytestmark = pytest.mark.gpu
SIZES = js.Sizes(rows=4, max_len=2048, chunk_tokens=256, decode_steps=8, checkpoints=8)


@pytest.fixture(scope="module")
def lm():
    with js.LM.load(DEMO, sizes=SIZES, poison=True) as lm:
        yield lm


def _requests(vocab: int, count: int) -> list[js.Request]:
    rng = np.random.default_rng(16)
    return [
        js.Request(
            f"request {i}",
            tuple(rng.integers(1, vocab, rng.integers(1, 400)).tolist()),
            js.SamplingParams(
                max_tokens=int(rng.integers(1, 33)),
                temperature=float(i % 3) / 2,
                top_k=20 * (i % 4 == 1),
                seed=i % 5,
                ignore_eos=bool(i % 2),
            ),
        )
        for i in range(count)
    ]


def test_16_requests_through_4_rows_are_bit_equal_to_each_alone(lm):
    requests = _requests(lm.model.config.vocab_size, 16)
    together = {c.id: c for c in lm.engine.completions(requests)}
    assert set(together) == {r.id for r in requests}
    assert all(c.finish_reason in ("stop", "length") for c in together.values())
    for request in requests:
        (alone,) = lm.engine.completions([request])
        assert alone.tokens == together[request.id].tokens, request
        assert alone.logprobs == together[request.id].logprobs, request
    assert lm.engine.idle and lm.engine.stats.late_compilations == 0


def test_the_kernels_and_xla_give_the_same_tokens():
    def generate():
        with js.LM.load(DEMO, dtype="float32", sizes=SIZES, poison=True) as lm:
            return [c.tokens for c in lm.generate(["Once upon a time", "The ship"], max_tokens=48)]

    ours = generate()
    kernels = {choice.name for choice in pallas_kernels.dispatch.chosen().values()}
    with pallas_kernels.prefer("xla"):
        assert generate() == ours
    if pallas_kernels.mosaic.support.device_reason() is None:
        assert "mosaic" in kernels


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_filtered"])
def test_br144_the_state_is_donated_and_no_pool_is_copied(lm, kind):
    program, state = lm.engine.lower(kind).compile(), lm.engine.state
    (group,) = lm.engine.spec.groups
    blocks = lm.engine.spec.blocks(group.name)
    assert f"[{group.layers},{blocks}," in program.as_text()
    assert pool_copies(program.as_text(), group.layers, blocks) == 0
    pools = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert program.memory_analysis().alias_size_in_bytes >= pools


def test_the_pool_ends_as_new(lm):
    lm.generate("It was", max_tokens=9)
    pool = lm.engine.schedule.pool
    pool.check()
    assert not np.asarray(lm.engine.state.rows.active).any()
    assert not any(np.asarray(ids).any() for ids in lm.engine.state.tables.ids.values())
