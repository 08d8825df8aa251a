"""Tensor parallel: a model cut into shards gives the scores and the states of the whole."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.engine import Engine
from jaxstate.errors import SpecError
from jaxstate.mesh import RankMesh
from jaxstate.models import Mamba2Config, MambaConfig, from_random
from jaxstate.models.shards import divide
from jaxstate.sizing import Sizes
from jaxstate.state import CacheSpec
from pallas_kernels.rows import RowIds, Rows
from tests.engine.conftest import prompt_of, request, run_all
from tests.toy import ToyLM

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

MAMBA2 = Mamba2Config(
    vocab_size=37, hidden_size=12, num_hidden_layers=1, num_heads=8, head_dim=4, state_size=6,
    n_groups=1, use_bias=True,
)  # fmt: skip
MAMBA = MambaConfig(
    vocab_size=37, hidden_size=12, num_hidden_layers=1, intermediate_size=24, time_step_rank=3,
    state_size=5, use_bias=True,
)  # fmt: skip
FALCON = dataclasses.replace(MAMBA, mixer_rms_eps=1e-6)


def rough(config, seed=0):
    """A model in which no weight or bias is 0 or 1, so that one that is left out or counted twice shows."""
    rng = np.random.default_rng(seed)
    model = from_random(config, seed)
    return jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), model)


LENGTHS, TOKENS = (9, 5), 14


def scores_and_states(model, shards):
    """Two prompts read and one token of each decoded: all scores, and the states of two rows."""
    divided = divide(model, shards)
    mesh = RankMesh.create(1, shards, jax.devices()[0], divided.leaf_axes)
    spec = CacheSpec(divided.groups, rows=2, max_len=64)
    ids = np.array([1, 2], np.int32)
    none, offsets = np.zeros((2, 0), np.int32), np.array([0, 9, 14], np.int32)
    plan = {
        "rows": Rows(offsets, 0 * ids, ids, none, none), "next": RowIds(ids, ids),
        "tokens": np.array(prompt_of(TOKENS), np.int32), "drawn": np.array([3, 11], np.int32),
    }  # fmt: skip

    def run(params, state, plan):
        model = jax.tree.unflatten(divided.tree, params)
        positions = jnp.arange(TOKENS, dtype=jnp.int32)
        hidden, cache = model.prefill(
            plan["tokens"], positions, {"mamba": plan["rows"]}, state.cache
        )
        more, cache = model.decode(plan["drawn"], offsets[1:], {"mamba": plan["next"]}, cache)
        return state.replace(cache=cache), model.logits(jnp.concatenate([hidden, more]))

    state = mesh.create_state(spec, poison=True)
    program = mesh.program(run, divided).lower(mesh.place(divided), state, plan)
    compiled = program.compile(compiler_options=QUICK)
    state, scores = compiled(mesh.place(divided), state, plan)
    ssm = np.asarray(state.cache.groups["mamba"]["ssm"])[:, 1:3]
    return np.asarray(scores), ssm, compiled.as_text()


CASES = {
    "one group in two shards": (MAMBA2, 2),
    "two groups in four shards": (dataclasses.replace(MAMBA2, n_groups=2), 4),
    "eight groups in two shards": (dataclasses.replace(MAMBA2, n_groups=8), 2),
    "mamba": (MAMBA, 2),
    "falcon": (FALCON, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_br92_shards_give_the_scores_and_states_of_the_whole(case):
    config, shards = CASES[case]
    model = rough(config)
    scores, states, _ = scores_and_states(model, 1)
    ours, kept, program = scores_and_states(model, shards)
    assert np.abs(scores).max() > 0.1 and np.isfinite(ours).all()
    chex.assert_trees_all_close(ours, scores, atol=1e-5, rtol=0)
    chex.assert_trees_all_close(kept, states, atol=1e-5, rtol=0)
    # One sum over shards at the end of every mixer, and Mamba's step sizes and maps take another; in both steps. XLA
    # may join two.
    sums = 1 if isinstance(config, Mamba2Config) else 2
    assert 0 < len(re.findall(r" all-reduce(?:-start)?\(", program)) <= 2 * sums
    assert not re.search(r"all-gather|all-to-all|reduce-scatter|collective-permute", program)


def test_br92_what_does_not_divide_is_refused_before_anything_is_made():
    odd = dataclasses.replace(MAMBA2, num_heads=15, n_groups=3)
    for config, shards, why in [
        (odd, 5, "tensor_parallel is 5 and n_groups is 3; one must divide the other"),
        (odd, 2, "tensor_parallel is 2, which does not divide the model's num_heads, 15"),
        (MAMBA, 5, "tensor_parallel is 5, which does not divide the model's intermediate_size, 24"),
    ]:
        with pytest.raises(SpecError, match=re.escape(why)):
            Engine(from_random(config), Sizes(rows=2, max_len=64, tensor_parallel=shards))
    with pytest.raises(SpecError, match="ToyLM runs on 1 device a rank"):
        Engine(ToyLM(), Sizes(rows=2, max_len=64, tensor_parallel=2))
    with pytest.raises(SpecError, match="data_parallel is 2, tensor_parallel 8, and of devices"):
        Engine(from_random(MAMBA2), Sizes(rows=2, max_len=64, tensor_parallel=8, data_parallel=2))


def test_a_shard_has_its_share_of_the_state():
    sizes = Sizes(rows=2, max_len=64, checkpoints=0, tensor_parallel=4, data_parallel=2)
    whole = dataclasses.replace(sizes, tensor_parallel=1, data_parallel=1)
    engine, alone = (Engine(from_random(MAMBA2), s) for s in (sizes, whole))
    conv, ssm = (engine.state.cache.groups["mamba"][k] for k in ("conv", "ssm"))
    # Of each token's 32 + 2 * 6 inputs of the convolution a shard has 8 + 2 * 6.
    assert [x.sharding.shard_shape(x.shape) for x in (conv, ssm)] == [
        (1, 3, 3, 20),
        (1, 3, 2, 4, 6),
    ]
    assert alone.state.cache.groups["mamba"]["ssm"].shape == (1, 3, 8, 4, 6)
    assert engine.spec.bytes_per_sequence < alone.spec.bytes_per_sequence / 2


MODEL_ONLY = re.compile(
    r"replica_groups=(\{\{0,1\},\{2,3\}\}|\[2,2\]<=\[4\],|mesh\['data'=2,'model'=2\] \{'model'\})"
)
"""The ways in which XLA writes that ranks do not take part in each other's sums."""


def test_two_by_two_devices_make_the_tokens_of_one():
    """Prompts that are cut, begin alike and follow each other in the rows; in float32, greedy and sampled."""
    model, stem = rough(MAMBA2, 3), prompt_of(70)
    requests = [
        request(f"r{i}", (*(stem if i % 2 else ()), *prompt_of(5 + 31 * i, i)), 4 + i, seed=i, temperature=i % 3 / 2)
        for i in range(9)
    ]  # fmt: skip
    seen = []
    for ranks, shards in ((1, 1), (2, 2)):
        sizes = Sizes(rows=2, max_len=320, chunk_tokens=128, decode_steps=4, checkpoints=6,
                      data_parallel=ranks, tensor_parallel=shards)  # fmt: skip
        engine = Engine(model, sizes)
        engine._programs = {
            k: engine.lower(k).compile(compiler_options=QUICK) for k in ("prefill", "decode")
        }
        seen.append({k: (c.tokens, c.logprobs) for k, c in run_all(engine, requests).items()})
        assert engine.idle
        if shards > 1:
            sums = re.findall(r" all-reduce.*", engine._programs["decode"].as_text())
            sums = [line for line in sums if "replica_groups" in line]
            assert sums and all(MODEL_ONLY.search(line) for line in sums), sums
    one, four = seen
    assert {k: t for k, (t, _) in one.items()} == {k: t for k, (t, _) in four.items()}
    for key, (_, logprobs) in one.items():
        chex.assert_trees_all_close(np.array(four[key][1]), np.array(logprobs), atol=1e-4, rtol=0)


def test_a_store_of_other_shards_is_passed_over_and_other_ranks_do_not_matter(tmp_path):
    """What two shards kept is what two shards start from, on any number of ranks; to one they are another's."""
    model, prompt = rough(dataclasses.replace(MAMBA2, n_groups=2), 3), (*prompt_of(150, 9), 1)
    config = {"rows": 2, "max_len": 192, "chunk_tokens": 128, "decode_steps": 2, "checkpoints": 6}
    programs = {}

    def start(ranks, shards):
        engine = Engine(model, Sizes(**config, data_parallel=ranks, tensor_parallel=shards))
        if (ranks, shards) not in programs:
            programs[ranks, shards] = {
                k: engine.lower(k).compile(compiler_options=QUICK) for k in ("prefill", "decode")
            }
        engine._programs = dict(programs[ranks, shards])
        return engine

    def ask(engine, copies=1):
        made = run_all(engine, [request(f"r{i}", prompt, 5) for i in range(copies)])
        (bits,) = {(c.tokens, c.logprobs) for c in made.values()}
        return bits, [c.cached_tokens for c in made.values()]

    kept = {}
    for ranks, shards in ((1, 1), (1, 2), (2, 2)):
        engine = start(ranks, shards)
        kept[ranks, shards], cached = ask(engine)
        assert cached == [0]
        told = engine.prefixes.save(tmp_path / f"{ranks}x{shards}")
        assert told.states and not told.problems
    assert kept[1, 2] == kept[2, 2]
    for (ranks, shards), store in (((1, 2), "2x2"), ((2, 2), "1x2")):
        engine = start(ranks, shards)
        assert engine.prefixes.load(tmp_path / store).states == told.states
        bits, cached = ask(engine, 2 * ranks)
        assert bits == kept[1, 2] and set(cached) == {128}
    for (ranks, shards), store, why in (
        ((1, 1), "2x2", "tensor_parallel 2 (here 1)"),
        ((2, 2), "1x1", "tensor_parallel 1 (here 2)"),
    ):
        engine = start(ranks, shards)
        told = engine.prefixes.load(tmp_path / store)
        assert told.states == 0 and len(told.problems) == 1 and why in told.problems[0]
        bits, cached = ask(engine)
        assert bits == kept[ranks, shards] and cached == [0]
        # Its own take their place, and the others' are not taken for them.
        assert engine.prefixes.save(tmp_path / store).states
        assert start(ranks, shards).prefixes.load(tmp_path / store).states
