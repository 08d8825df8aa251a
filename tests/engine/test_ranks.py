"""Data parallel: several ranks in one step give what one gives, and leave each other alone."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate import scheduler
from jaxstate.engine import Engine
from jaxstate.errors import SpecError
from jaxstate.models import Mamba2Config, from_random
from jaxstate.sizing import Sizes
from pallas_kernels import selective_scan
from pallas_kernels.rows import Rows
from tests.engine.conftest import company, prompt_of, request, run_all
from tests.toy import ToyConfig, ToyLM, continue_by_hand

SIZES = Sizes(rows=2, max_len=256, chunk_tokens=128, decode_steps=4, checkpoints=8)
MAMBA2 = Mamba2Config(
    vocab_size=61, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8
)
RANKS = (1, 4, 8)


@pytest.fixture(scope="module")
def toys():
    """Engines over the toy model, by ranks."""
    made = {}

    def make(ranks: int) -> Engine:
        if ranks not in made:
            sizes = dataclasses.replace(SIZES, data_parallel=ranks)
            made[ranks] = Engine(ToyLM(ToyConfig()), sizes)
            made[ranks].compile()
        return made[ranks]

    return make


def by_hand(r):
    return tuple(continue_by_hand(r.prompt, r.sampling.max_tokens))


def share(engine, rank: int):
    """One rank's tables, blocks and rows, as numpy arrays."""
    n = engine.mesh.ranks
    state = jax.device_get(engine.state)
    part = lambda axis: lambda x: np.split(np.asarray(x), n, axis)[rank]  # noqa: E731
    rows = jax.tree.map(part(0), (state.tables.ids, state.rows))
    return (*rows, jax.tree.map(part(1), state.cache.groups))


def bits(tree) -> list[bytes]:
    return [x.tobytes() for x in jax.tree.leaves(tree)]


def assert_all_clean(engine):
    for schedule in engine.ranks.schedules:
        schedule.pool.check()
        for group in engine.spec.names:
            kept = len(schedule.index)
            assert schedule.pool.free_count(group) + kept == engine.spec.blocks(group) - 1
            assert not schedule.tables[group].any()
            assert not np.asarray(engine.state.tables.ids[group]).any()
    assert engine.idle and not np.asarray(engine.state.rows.active).any()
    assert engine.stats.late_compilations == 0


# The same answer whatever the number of ranks.


@pytest.mark.parametrize("ranks", RANKS)
def test_every_request_gives_what_it_gives_by_hand(toys, ranks):
    engine, requests = toys(ranks), company(40, seed=3)
    done = run_all(engine, requests)
    assert {k: c.tokens for k, c in done.items()} == {r.id: by_hand(r) for r in requests}
    assert_all_clean(engine)


def test_tokens_and_logprobs_are_bit_equal_on_one_rank_and_on_eight():
    """Mamba-2, greedy and sampled, prompts that are cut and prompts that begin alike."""
    model = from_random(MAMBA2, seed=4)
    stem = prompt_of(130)
    requests = [
        request(
            f"r{i}", (*(stem if i % 3 == 0 else ()), *prompt_of(1 + 17 * i % 120, i)), 3 + 5 * i % 17,
            temperature=i % 2 / 1.5, seed=i,
        ) for i in range(20)
    ]  # fmt: skip
    seen = {}
    for ranks in (1, 8):
        engine = Engine(model, dataclasses.replace(SIZES, data_parallel=ranks))
        done = run_all(engine, requests)
        seen[ranks] = {k: (c.tokens, c.logprobs) for k, c in done.items()}
        assert_all_clean(engine)
    assert seen[8] == seen[1]


def test_what_ranks_keep_is_one_store_for_any_number_of_them(toys, tmp_path):
    """Two prefixes read on two ranks; four ranks, and one, start from both."""
    two, stems = toys(2), [prompt_of(130, 7), prompt_of(130, 8)]
    drop_prefixes(two)
    run_all(two, [request(f"a{i}", (*stem, 1), 3) for i, stem in enumerate(stems)])
    kept = set().union(*(s.index.nodes for s in two.ranks.schedules))
    assert two.prefixes.save(tmp_path).states == len(kept) > len(two.schedule.index)
    for ranks in (4, 1):
        engine = toys(ranks)
        drop_prefixes(engine)
        assert engine.prefixes.load(tmp_path).states == len(kept)
        requests = [request(f"b{i}", (*stems[i % 2], 2 + i), 9) for i in range(2 * ranks)]
        done = run_all(engine, requests)
        assert {k: c.tokens for k, c in done.items()} == {r.id: by_hand(r) for r in requests}
        assert {c.cached_tokens for c in done.values()} == {128}
        assert_all_clean(engine)


def drop_prefixes(engine):
    for rank, schedule in enumerate(engine.ranks.schedules):
        engine.ranks = engine.ranks.put(rank, scheduler.forget_prefixes(schedule))
    list(engine.run())


# What the step is.


COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective|send\(|recv\(")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_br86_nothing_passes_between_ranks_in_a_step(toys, kind):
    text = toys(4).lower(kind).compile().as_text()
    assert "num_partitions=4" in text
    assert COLLECTIVE.findall(text) == []


def test_the_search_for_collectives_finds_one(toys):
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=toys(4).mesh.mesh,
        in_specs=jax.P("data"), out_specs=jax.P(),
    )  # fmt: skip
    assert COLLECTIVE.search(jax.jit(summed).lower(jnp.zeros(8)).compile().as_text())


def test_br91_ids_are_each_ranks_own(toys):
    """Every rank hands out the same low ids, and its blocks hold its own requests' states."""
    engine = toys(4)
    requests = [request(f"r{i}", prompt_of(6 + i, i), 30) for i in range(4)]
    for r in requests:
        engine.submit(r)
    engine.step()
    held = [
        dict(s.pool.held)[r.id]["whole"]
        for s, r in zip(engine.ranks.schedules, requests, strict=True)
    ]
    assert all(0 < block < engine.spec.blocks("whole") for ids in held for block in ids)
    states = {bits(share(engine, rank)[2]["whole"])[0] for rank in range(4)}
    assert len(states) == 4
    done = {e.id: e.completion.tokens for e in engine.run() if e.completion}
    assert done == {r.id: by_hand(r) for r in requests}


def test_br89_sizes_are_a_ranks_own_and_ranks_without_devices_are_refused():
    engine = Engine(ToyLM(), dataclasses.replace(SIZES, rows=3, data_parallel=4))
    assert (engine.spec.rows, engine.rows) == (3, 12)
    assert engine.state.tables.ids["whole"].shape == (12, 1)
    with pytest.raises(SpecError, match=r"data_parallel is 9, and of devices \(cpu\) there is 8"):
        Engine(ToyLM(), dataclasses.replace(SIZES, data_parallel=9))
    with pytest.raises(SpecError, match="data_parallel is 0"):
        Sizes(data_parallel=0)


def test_weights_are_not_copied_where_they_are_already(toys):
    model = ToyLM()
    (before, *_), (after, *_) = jax.tree.leaves(model), Engine(model, SIZES)._params
    assert before.unsafe_buffer_pointer() == after.unsafe_buffer_pointer()


def test_a_selective_scan_runs_under_pmap_and_under_shard_map_alike():
    """Two devices, each with its own rows and pool; the values of one device by itself."""
    rng = np.random.default_rng(0)
    D, N, T, n = 8, 4, 12, 2
    normal = lambda *shape: rng.normal(size=(n, *shape)).astype(np.float32)  # noqa: E731
    given = (normal(T, D), normal(T, D), -np.exp(normal(D, N)), normal(T, N), normal(T, N), normal(D),
             normal(T, D), normal(D), normal(1, 4, N, D))  # fmt: skip
    none = np.zeros((n, 2, 0), np.int32)
    rows = Rows(np.array([[0, 5, 12], [0, 0, 7]], np.int32), np.array([[0, 3], [1, 2]], np.int32),
                np.array([[1, 2], [1, 3]], np.int32), none, none)  # fmt: skip

    def scan(*args):
        *xs, states, rows = args
        return selective_scan(*xs, states, 0, rows)

    def local(*args):
        out = scan(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("data",))
    spec = jax.P("data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    one = [jax.jit(scan)(*jax.tree.map(lambda x, i=i: x[i], (*given, rows))) for i in range(n)]
    want = jax.tree.map(lambda *x: np.stack(x), *one)
    assert bits(want) == bits(jax.pmap(scan)(*given, rows))
    assert bits(want) == bits(jax.jit(sharded)(*given, rows))
