"""One table of shapes, dtypes and tolerances for tests, benchmarks and tuning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import Rows

# Largest error allowed, as a share of the largest value that the result holds.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Case:
    """One call of an op: its sizes, the length of each row and what is unusual about it."""

    op: str
    sizes: Mapping[str, int]
    lengths: tuple[int, ...]
    padding: int = 0  # tokens after the last row
    checkpoints: int = 0  # per row
    dtype: str = "float32"
    state_dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()  # optional operands that are None

    @property
    def name(self) -> str:
        sizes = "_".join(f"{name}{size}" for name, size in self.sizes.items())
        odd = [self.dtype] if self.dtype != "float32" else []
        odd += [f"state_{self.state_dtype}"] if self.state_dtype != "float32" else []
        odd += [f"{name}_{value}" for name, value in self.options.items()]
        odd += [f"no_{name}" for name in self.absent]
        tokens = sum(self.lengths) + self.padding
        return "-".join([self.op, sizes, f"R{len(self.lengths)}_T{tokens}", *odd])

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def decode(self) -> bool:
        return self.op.endswith("_step")


_RAGGED = (3, 0, 64, 70, 1, 2, 129)
_ONES = (1,) * 6
_CONV = {"D": 24, "K": 4}
_MAMBA = {"D": 24, "N": 16}
_MAMBA2 = {"H": 4, "P": 8, "G": 2, "N": 16}
_PROJECTED = {"I": 10, "O": 33, "D": 24, "K": 4}
_HALF: Mapping[str, Any] = {"dtype": "bfloat16", "state_dtype": "bfloat16"}

TESTS = (
    Case("causal_conv", _CONV, _RAGGED, 5, 3, options={"activation": "silu"}),
    Case("causal_conv", {"D": 5, "K": 2}, (2, 1, 5), 1, 1, absent=("bias",)),
    Case("causal_conv", _CONV, _RAGGED, 5, 3, "bfloat16", "bfloat16"),
    Case("selective_scan", _MAMBA, _RAGGED, 5, 3),
    Case("selective_scan", {"D": 5, "N": 3}, (2, 1, 65), absent=("skip", "z", "dt_bias")),
    Case("selective_scan", _MAMBA, _RAGGED, 5, 3, "bfloat16"),
    Case("ssd", _MAMBA2, _RAGGED, 5, 3),
    Case("ssd", _MAMBA2, (64, 128, 64), options={"chunk": 64}),
    Case("ssd", {"H": 3, "P": 5, "G": 1, "N": 7}, _RAGGED, 5, 3, options={"chunk": 16}),
    Case("ssd", {"H": 6, "P": 4, "G": 3, "N": 8}, (40, 9), 3, options={"dt_limit": (0.1, 0.9)}),
    Case("ssd", _MAMBA2, (5, 33), 2, 1, options={"chunk": 1}, absent=("skip", "dt_bias")),
    Case("ssd", _MAMBA2, _RAGGED, 5, 3, "bfloat16"),
    Case("conv_step", _CONV, _ONES, options={"activation": "silu"}),
    Case("conv_step", _CONV, _ONES, dtype="bfloat16", state_dtype="bfloat16", absent=("bias",)),
    Case("selective_step", _MAMBA, _ONES),
    Case("selective_step", _MAMBA, _ONES, dtype="bfloat16", absent=("skip", "z", "dt_bias")),
    Case("selective_step", {**_MAMBA, "rank": 6}, _ONES),
    Case("selective_step", {**_MAMBA, "rank": 6}, _ONES, dtype="bfloat16", absent=("dt_bias",)),
    Case("ssd_step", _MAMBA2, _ONES, options={"dt_limit": (0.1, 0.9)}),
    Case("ssd_step", _MAMBA2, _ONES, dtype="bfloat16", state_dtype="bfloat16"),
    Case("ssd_step", {"H": 3, "P": 5, "G": 1, "N": 7}, (1,), absent=("skip", "dt_bias", "gate")),
    Case("projected_conv_step", _PROJECTED, _ONES, options={"first": 5, "activation": "silu"}),
    Case(
        "projected_conv_step",
        _PROJECTED,
        _ONES,
        options={"first": 0},
        absent=("conv_bias",),
        **_HALF,
    ),
)

_MAMBA_2_8B = {"D": 5120, "N": 16}
_MAMBA2_2_7B = {"H": 80, "P": 64, "G": 1, "N": 128}
_PREFILLS = ((2048,), (8192,), (32768,), (2048,) * 8)

BENCHMARKS = (
    *(
        Case("selective_step", _MAMBA_2_8B, (1,) * rows, dtype="bfloat16")
        for rows in (1, 8, 32, 128, 256)
    ),
    *(Case("ssd_step", _MAMBA2_2_7B, (1,) * rows, dtype="bfloat16") for rows in (1, 8, 32, 128)),
    *(Case("selective_scan", _MAMBA_2_8B, lengths, dtype="bfloat16") for lengths in _PREFILLS),
    *(Case("ssd", _MAMBA2_2_7B, lengths, dtype="bfloat16") for lengths in _PREFILLS),
)

# Shapes of every operand of an op, in terms of a case's sizes; pools have layers and blocks in front.
SHAPES: Mapping[str, Mapping[str, str]] = {
    "causal_conv": {"x": "T D", "weight": "K D", "bias": "D", "windows": "K-1 D"},
    "selective_scan": {
        "x": "T D",
        "dt": "T D",
        "A": "D N",
        "B": "T N",
        "C": "T N",
        "skip": "D",
        "z": "T D",
        "dt_bias": "D",
        "states": "N D",
    },
    "ssd": {
        "x": "T H P",
        "dt": "T H",
        "A": "H",
        "B": "T G N",
        "C": "T G N",
        "skip": "H",
        "dt_bias": "H",
        "states": "H P N",
    },
    "projected_conv_step": {
        "x": "T I",
        "weight": "O I",
        "conv_weight": "K D",
        "conv_bias": "D",
        "windows": "K-1 D",
    },
}
SHAPES = {
    **SHAPES,
    "conv_step": SHAPES["causal_conv"],
    "selective_step": SHAPES["selective_scan"],
    "ssd_step": {**SHAPES["ssd"], "gate": "T HP"},
}
# Where a case has a rank.
LOW_RANK = {"dt": "T rank", "dt_weight": "D rank"}
POOLS = ("windows", "states")
PER_TOKEN = ("x", "dt", "B", "C", "z", "gate")


def make_rows(case: Case, rng: np.random.Generator, blocks: int, *, steady: bool = False) -> Rows:
    """Rows of a case, over shuffled blocks, with checkpoints at 1, between and at the end.

    Every fourth starts fresh, every fourth is null but names a block to read, the others continue
    in place or from a block of their own. If `steady`, as in a benchmark, all continue in place.
    """
    count, per_row = len(case.lengths), case.checkpoints
    ids = rng.permutation(np.arange(1, blocks))[: count * (2 + per_row)].reshape((count, -1))
    reads, writes, points = ids[:, 0].copy(), ids[:, 1].copy(), ids[:, 2:]
    kind = np.full(count, 1) if steady else np.arange(count) % 4
    reads[kind == 0] = 0
    writes[kind == 3] = 0
    writes[kind == 1] = reads[kind == 1]
    positions = np.zeros((count, per_row), np.int32)
    for row, length in enumerate(case.lengths):
        wanted = [1, length, *rng.integers(1, max(length, 1) + 1, per_row)][:per_row]
        positions[row] = wanted if length else 0
    points = np.where(positions > 0, points, 0)
    offsets = np.concatenate([[0], np.cumsum(case.lengths)])
    return Rows(*(v.astype(np.int32) for v in (offsets, reads, writes, points, positions)))  # pyright: ignore


def make_operands(
    case: Case,
    seed: int = 0,
    *,
    layers: int = 2,
    blocks: int | None = None,
    steady: bool = False,
) -> dict[str, Any]:
    """Random operands of a case for its op, options included.

    Every block that no live row reads is NaN, block 0 too, and so are the tokens of the padding.
    """
    rng = np.random.default_rng(seed)
    if blocks is None:
        blocks = 3 + len(case.lengths) * (2 + case.checkpoints)
    rows = make_rows(case, rng, blocks, steady=steady)  # numpy, so that this works inside a trace
    sizes = {"T": sum(case.lengths) + case.padding, **case.sizes}
    if "K" in sizes:
        sizes["K-1"] = sizes["K"] - 1
    if case.op == "ssd_step":
        sizes["HP"] = sizes["H"] * sizes["P"]
    operands: dict[str, Any] = {"layer": layers - 1, **case.options}
    for name, dims in {**SHAPES[case.op], **(LOW_RANK if "rank" in sizes else {})}.items():
        shape = tuple(sizes[dim] for dim in dims.split())
        if name in case.absent:
            operands[name] = None
        elif name in POOLS:
            pool = np.full((layers, blocks, *shape), np.nan, np.float32)
            read = rows.read_ids[rows.write_ids > 0]
            read = read[read > 0]
            pool[-1, read] = rng.normal(size=(len(read), *shape))
            operands[name] = jnp.asarray(pool, case.state_dtype)
        elif name == "A":
            operands[name] = jnp.asarray(-np.exp(rng.normal(size=shape)), jnp.float32)
        else:
            values = rng.normal(size=shape)
            if "rank" in sizes and name in LOW_RANK:
                # Sums are exact in float32 in any order, so that all round them alike.
                values = np.round(8 * values) / (8 if name == "dt" else 32)
            if name in PER_TOKEN:
                values[sum(case.lengths) :] = np.nan
            operands[name] = jnp.asarray(values, case.dtype)
    if case.decode:
        operands |= {"read_ids": jnp.asarray(rows.read_ids)}
        operands |= {"write_ids": jnp.asarray(rows.write_ids)}
    else:
        operands["rows"] = Rows(*map(jnp.asarray, rows))
    return operands
