"""Models that devices share are read share by share: no device, and no host, holds more than it must meanwhile."""

from __future__ import annotations

import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstate as js
from jaxstate.mesh import RankMesh
from jaxstate.models import Mamba2Config, from_random, load_model, save_model
from jaxstate.models.checkpoint import Checkpoint
from jaxstate.models.identify import identify
from jaxstate.models.shards import divide
from jaxstate.models.tensors import Tensor, Unread, ones, read_whole
from tests.models.driver import FIXTURES

SIZES = {"rows": 2, "max_len": 128, "chunk_tokens": 64, "decode_steps": 2, "checkpoints": 0}

DTYPES = [np.dtype(kind) for kind in (jnp.float32, jnp.bfloat16, jnp.float16)]


def bits(tree) -> list[tuple]:
    return [(x.shape, x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def placed(model, ranks, shards):
    divided = divide(model, shards)
    mesh = RankMesh.create(ranks, shards, jax.devices()[0], divided.leaf_axes)
    return mesh.place(divided)


def shares(arrays) -> list[dict]:
    return [{s.device.id: bits(s.data) for s in x.addressable_shards} for x in arrays]


@pytest.mark.parametrize(
    ("variant", "dtype"), [("mamba2_groups", "bfloat16"), ("mamba_untied_bias", "float32")]
)
def test_what_is_read_by_shares_has_the_bits_of_the_whole(variant, dtype):
    whole = load_model(FIXTURES / variant, dtype)
    unread = load_model(FIXTURES / variant, dtype, read=False)
    assert all(isinstance(x, Unread) for x in jax.tree.leaves(unread))
    assert [(x.shape, x.dtype, x.nbytes) for x in jax.tree.leaves(unread)] == [
        (x.shape, x.dtype, x.nbytes) for x in jax.tree.leaves(whole)
    ]
    assert bits(read_whole(unread)) == bits(whole)
    assert identify(unread) == identify(whole)
    for ranks, shards in ((2, 2), (1, 1)):  # one that nobody shares can be unread too
        assert shares(placed(unread, ranks, shards)) == shares(placed(whole, ranks, shards))


@pytest.mark.parametrize("kind", [{}, {"factor": True}, {"float32": True}, {"conv": True}])
def test_a_tensor_read_on_the_host_has_the_bits_that_the_device_gives_it(kind):
    """Whatever dtype the file has and the model wants, denormal and infinite values too."""
    shape = (5, 1, 4) if "conv" in kind else (5, 4)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values.flat[:5] = 1e-40, -1e-39, np.inf, 3.3895314e38, 6e-8
    tensor = Tensor("x", shape, ones, **kind)
    for filed in DTYPES:
        with np.errstate(over="ignore"):
            there = values.astype(filed)
        for dtype in DTYPES:
            unread = tensor.unread(filed, dtype, there.__getitem__)
            whole = tensor.kept(jnp.asarray(there), dtype)
            assert (unread.shape, unread.dtype) == (whole.shape, whole.dtype)
            assert bits(unread) == bits(whole)
            part = slice(1, 3), slice(2, 4)
            assert unread[part].tobytes() == np.asarray(whole)[part].tobytes()


def test_random_weights_are_the_same_by_shares():
    config = Mamba2Config(37, hidden_size=12, num_hidden_layers=1, num_heads=4, head_dim=6, state_size=6)  # fmt: skip
    both = [from_random(config, 7, jnp.bfloat16, read=read) for read in (True, False)]
    assert shares(placed(both[0], 1, 4)) == shares(placed(both[1], 1, 4))


def on_devices() -> collections.Counter:
    """Bytes of all buffers by device."""
    seen = {}  # the parts of an array are arrays too
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            at = shard.device.id, shard.data.unsafe_buffer_pointer()
            seen[at] = max(seen.get(at, 0), shard.data.nbytes)
    held = collections.Counter()
    for (device, _), n in seen.items():
        held[device] += n
    return held


@pytest.fixture
def big(tmp_path):
    """A model most of which its mixers are."""
    config = Mamba2Config(
        64, hidden_size=128, num_hidden_layers=2, num_heads=8, head_dim=32, state_size=16
    )
    save_model(from_random(config, 2), tmp_path / "big")
    return tmp_path / "big"


@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (1, 4), (2, 4)])
def test_no_device_and_no_host_holds_more_than_its_share_while_a_model_is_read(
    big, monkeypatch, ranks, shards
):
    sizes = [(x.shape[0], x.nbytes) for x in jax.tree.leaves(load_model(big, read=False))]
    whole, largest = sum(n for _, n in sizes), max(n for _, n in sizes)
    gc.collect()
    before, most, read = on_devices(), collections.Counter(), 0
    read_part = Checkpoint.read_part
    on_host, kept = 0, []

    def watched(self, name, index):
        nonlocal read, on_host
        part = read_part(self, name, index)
        read += part.nbytes
        kept.append(weakref.ref(part))
        on_host = max(on_host, sum(p.nbytes for p in (ref() for ref in kept) if p is not None))
        for device, held in (on_devices() - before).items():
            most[device] = max(most[device], held)
        return part

    monkeypatch.setattr(Checkpoint, "read_part", watched)
    lm = js.LM.load(big, sizes=js.Sizes(**SIZES, data_parallel=ranks, tensor_parallel=shards))
    share = {d.id: sum(s.data.nbytes for x in lm.engine._params for s in x.addressable_shards if s.device == d)
             for d in lm.engine.mesh.devices}  # fmt: skip
    now = on_devices() - before
    assert set(share) == set(range(ranks * shards)) and len(set(share.values())) == 1
    assert now == share
    assert all(most[d] <= n for d, n in share.items()), (most, share)
    # The embedding and the norms are on all; of the rest each has one part.
    common = sum(n for first, n in sizes if first in (64, 128))
    assert share[0] < (whole - common) / shards * 1.2 + common < whole
    # What several devices have is read once for all of them, whatever the ranks.
    assert read < 1.2 * whole
    assert 0 < on_host <= largest


def test_a_model_that_devices_share_can_still_be_a_value(big):
    """`prefill` takes the whole to the first device, and its value is one of the same model."""
    lm = js.LM.load(big, sizes=js.Sizes(**SIZES, tensor_parallel=2))
    seqs = lm.prefill([[3, 4, 5]])
    assert seqs.identity == identify(load_model(big))
    assert np.isfinite(np.asarray(seqs.scores)).all()
