"""Capacities, needs and sizes: worked out in one place, per group, and refused with the numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxstate.errors import CapacityError, JaxstateError, SpecError
from jaxstate.state import CacheSpec, GroupSpec
from jaxstate.state.spec import format_bytes

LEAF = jax.ShapeDtypeStruct((4,), jnp.float32)


def two_groups(max_len=512, shards=2, rows=4, block=16, **kw):
    attention = GroupSpec("kv", "attention", 2, LEAF, block_size=block)
    state = GroupSpec("ssm", "recurrent", 2, LEAF, block_size=block, **kw)
    return CacheSpec((attention, state), rows=rows, max_len=max_len, context_shards=shards)


def test_inv09_br19_each_group_has_its_own_width_under_context_shards():
    spec = two_groups()
    assert (spec.capacity("kv"), spec.capacity("ssm")) == (16, 32)
    assert spec.need(257) == {"kv": 9, "ssm": 17}
    for group, need in spec.need(257).items():
        spec.check_row(group, need, "a")
    assert spec.need(512) == {"kv": 16, "ssm": 32}


def test_inv09_without_context_shards_both_kinds_have_the_same_width():
    spec = two_groups(shards=1)
    assert (spec.capacity("kv"), spec.capacity("ssm")) == (32, 32)


def test_inv09_one_block_a_sequence_is_one_id_whatever_the_shards():
    group = GroupSpec("m", "recurrent", 2, LEAF)
    for shards in (1, 2, 8):
        spec = CacheSpec((group,), rows=3, max_len=100_000, context_shards=shards)
        assert (spec.capacity("m"), spec.need(1), spec.need(100_000)) == (1, {"m": 1}, {"m": 1})
        assert spec.blocks("m") == 4


def test_inv09_a_token_past_max_len_is_refused_whole():
    spec = two_groups(max_len=64)
    assert spec.need(64) == {"kv": 2, "ssm": 4}
    with pytest.raises(CapacityError) as caught:
        spec.need(65, "req-7")
    error = caught.value
    assert (error.request, error.need, error.capacity, error.unit) == (
        "req-7", 65, 64, "tokens in a row",
    )  # fmt: skip
    assert error.group in ("kv", "ssm")
    assert "raise max_len from 64 to at least 65" in error.remedy


def test_inv08_an_error_names_request_group_need_capacity_and_remedy():
    spec = two_groups(max_len=256)
    assert spec.capacity("ssm") == 16
    with pytest.raises(CapacityError) as caught:
        spec.check_row("ssm", 17, "req-3")
    error, text = caught.value, str(caught.value)
    assert isinstance(error, JaxstateError)
    assert (error.request, error.group, error.need, error.capacity) == ("req-3", "ssm", 17, 16)
    for part in ("'req-3'", "'ssm'", "17 block ids", "room for 16", error.remedy):
        assert part in text
    # 17 blocks of 16 tokens: following the advice makes it fit.
    assert "to at least 272" in error.remedy
    two_groups(max_len=272).check_row("ssm", 17, "req-3")
    spec.check_row("ssm", 16, "req-3")


def test_br20_the_columns_of_a_group_follow_its_own_block_size():
    groups = (
        GroupSpec("kv", "attention", 1, LEAF, block_size=4),
        GroupSpec("ssm", "recurrent", 1, LEAF, block_size=16),
    )
    spec = CacheSpec(groups, rows=1, max_len=64)
    # 33 tokens: the last stands in column (33 - 1) // 4 = 8 of one table and (33 - 1) // 16 = 2 of the other.
    assert spec.need(33) == {"kv": 9, "ssm": 3}
    assert (spec.capacity("kv"), spec.capacity("ssm")) == (16, 4)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)]
)
def test_br22_blocks_at_the_boundaries(tokens, blocks):
    assert two_groups(shards=1).need(tokens) == {"kv": blocks, "ssm": blocks}
    assert two_groups(shards=1).need(tokens) == two_groups(shards=1).need(tokens, "named")


def test_inv40_br23_a_pool_too_small_for_one_sequence_is_refused_with_both_numbers():
    with pytest.raises(SpecError, match=r"32 blocks \(one of them null\).*needs 32.*at least 33"):
        two_groups(blocks=32)
    assert two_groups(blocks=33).blocks("ssm") == 33
    # Fewer blocks than all rows can fill is allowed: requests then wait.
    assert two_groups(blocks=33, rows=64).blocks("kv") == 64 * 16 + 1


def test_br24_the_pool_has_room_for_all_rows_beside_null():
    spec = two_groups(rows=3)
    assert (spec.blocks("kv"), spec.blocks("ssm")) == (3 * 16 + 1, 3 * 32 + 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GroupSpec("", "recurrent", 1, LEAF), "name is ''"),
        (lambda: GroupSpec("g", "mamba", 1, LEAF), "kind is 'mamba'"),
        (lambda: GroupSpec("g", "recurrent", 0, LEAF), "layers is 0"),
        (lambda: GroupSpec("g", "recurrent", True, LEAF), "layers is True"),
        (lambda: GroupSpec("g", "recurrent", 1, LEAF, block_size=0), "block_size is 0"),
        (lambda: GroupSpec("g", "recurrent", 1, LEAF, blocks=-1), "blocks is -1"),
        (lambda: GroupSpec("g", "attention", 1, LEAF), "needs a block_size"),
        (lambda: GroupSpec("g", "recurrent", 1, ()), "not empty"),
        (lambda: GroupSpec("g", "recurrent", 1, {"a": None}), "not empty"),
        (lambda: GroupSpec("g", "recurrent", 1, {"a": 3}), "ShapeDtypeStruct"),
        (lambda: two_groups(rows=0), "rows is 0"),
        (lambda: two_groups(max_len=1.5), r"max_len is 1\.5"),
        (lambda: two_groups(shards=0), "context_shards is 0"),
        (lambda: CacheSpec((), rows=1, max_len=1), "at least one"),
        (lambda: CacheSpec((GroupSpec("g", "recurrent", 1, LEAF),) * 2, 1, 1), "distinct names"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make, says):
    with pytest.raises(SpecError, match=says):
        make()


def test_an_unknown_group_is_named_with_those_there_are():
    with pytest.raises(SpecError, match=r"no group 'conv'; the groups are kv, ssm"):
        two_groups().capacity("conv")


def test_inv14_bytes_count_every_leaf_and_layer():
    leaves = (
        jax.ShapeDtypeStruct((3, 8), jnp.bfloat16),  # 48 bytes
        {"state": jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)},  # 128
        jax.ShapeDtypeStruct((), jnp.int32),  # 4
        jax.ShapeDtypeStruct((5,), jnp.bool_),  # 5
    )
    group = GroupSpec("g", "recurrent", 3, leaves)
    spec = CacheSpec((group,), rows=4, max_len=10)
    assert group.bytes_per_block == 3 * (48 + 128 + 4 + 5) == 555
    assert (spec.bytes_per_sequence, spec.nbytes) == (555, 5 * 555)
    mixed = two_groups()  # 2 layers of 16 bytes a block: (16 + 32) blocks a sequence
    assert mixed.bytes_per_sequence == 32 * 48
    assert mixed.nbytes == 32 * (4 * 16 + 1 + 4 * 32 + 1)


def test_specs_are_values_and_say_what_they_are():
    spec = two_groups()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.max_len = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.groups[0].layers = 1
    text = repr(spec)
    for part in (
        "4 rows of up to 512 tokens",
        "kv: attention",
        "32 tokens a block",
        "16 ids a row",
    ):
        assert part in text
    for part in ("ssm: recurrent", "16 tokens a block", "32 ids a row", "129 blocks of 32 B"):
        assert part in text
    assert "1 block a sequence" in repr(CacheSpec((GroupSpec("m", "recurrent", 1, LEAF),), 1, 9))


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB"), (2**42, "4.0 TiB")],
)
def test_sizes_for_people(n, text):
    assert format_bytes(n) == text


def test_a_spec_can_be_a_static_argument():
    traces = []

    def bytes_of(x, spec):
        traces.append(spec)
        return x + spec.nbytes

    def spec():
        leaves = {
            "a": (jax.ShapeDtypeStruct((2,), jnp.float32),),
            "b": [jax.ShapeDtypeStruct((), jnp.int8)],
        }
        return CacheSpec((GroupSpec("g", "recurrent", 2, leaves),), rows=2, max_len=4)

    jitted = jax.jit(bytes_of, static_argnums=1)
    assert int(jitted(0, spec())) == int(jitted(0, spec())) == 3 * 2 * 9
    assert len(traces) == 1 and hash(spec()) == hash(spec())
