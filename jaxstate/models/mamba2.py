"""Mamba-2: state space duality with a scalar decay per head (Dao & Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels as pk
from jaxstate.errors import SpecError
from jaxstate.models import tensors
from jaxstate.models.base import CausalLM, Leaves
from jaxstate.models.fields import Fields
from jaxstate.models.layers import (
    GatedRMSNorm,
    Linear,
    RMSNorm,
    ShortConv,
    matmul,
    parameter,
    projected_conv_step,
    value,
)
from jaxstate.models.shards import Cut, Section, check_divides, normed_total
from jaxstate.typing import Array, Float
from pallas_kernels.rows import RowIds, Rows


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """The sizes and options of a Mamba-2 model, under the names of its config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 1
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any], what: str = "config.json") -> Mamba2Config:
        """The config in a config.json.

        Raises:
          CheckpointError: fields that are missing, wrong, or ask for what is not supported, all of them named.
        """
        f = Fields(values, what)
        f.only("hidden_act", "silu", "swish")
        f.only("rms_norm", True)
        f.only("quantization_config", None)
        config = cls(
            vocab_size=f.size("vocab_size"),
            hidden_size=f.size("hidden_size"),
            num_hidden_layers=f.size("num_hidden_layers"),
            num_heads=f.size("num_heads"),
            head_dim=f.size("head_dim"),
            state_size=f.size("state_size"),
            n_groups=f.size("n_groups"),
            conv_kernel=f.size("conv_kernel", 4, least=2),
            use_bias=f.flag("use_bias", False),
            use_conv_bias=f.flag("use_conv_bias", True),
            layer_norm_epsilon=f.number("layer_norm_epsilon", 1e-5),
            residual_in_fp32=f.flag("residual_in_fp32", True),
            tie_word_embeddings=f.flag("tie_word_embeddings", False),
            time_step_limit=f.limits("time_step_limit", (0.0, math.inf)),
            eos_token_ids=f.ids("eos_token_id"),
        )
        expand = f.size("expand", 2)
        if not f.problems and expand * config.hidden_size != config.inner_size:
            f.problem(
                f"expand * hidden_size is {expand * config.hidden_size} but num_heads * head_dim is "
                f"{config.inner_size}; they must be equal"
            )
        if config.num_heads % config.n_groups:
            f.problem(
                f"num_heads {config.num_heads} is not a multiple of n_groups {config.n_groups}"
            )
        f.done()
        return config

    def to_json(self) -> dict[str, Any]:
        """The fields of a config.json in the published format."""
        fields = dataclasses.asdict(self)
        eos = fields.pop("eos_token_ids")
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": self.model_type,
            **fields,
            "time_step_limit": list(self.time_step_limit),
            "expand": self.inner_size // self.hidden_size,
            "hidden_act": "silu",
            "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        }

    @property
    def model_type(self) -> str:
        return "mamba2"

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.n_groups * self.state_size

    def shard(self, shards: int) -> Mamba2Config:
        """The sizes of one shard's mixers. A group that several shards need is in each of them.

        Raises:
          SpecError: the heads do not divide, or would be cut within a group and across groups at once.
        """
        check_divides("num_heads", self.num_heads, shards)
        if self.n_groups % shards and shards % self.n_groups:
            raise SpecError(
                f"tensor_parallel is {shards} and n_groups is {self.n_groups}; one must divide the other"
            )
        groups = max(1, self.n_groups // shards)
        return dataclasses.replace(self, num_heads=self.num_heads // shards, n_groups=groups)


class Mamba2Mixer(nnx.Module):
    """Projection, short convolution, state space recurrence, gated norm, projection; or one shard of that."""

    def __init__(self, name: str, config: Mamba2Config, shards: int = 1):
        c = self.config = config.shard(shards)
        self.shards, self.norm_groups = shards, config.n_groups
        projected = c.inner_size + c.conv_size + c.num_heads
        self.in_proj = Linear(f"{name}.in_proj", c.hidden_size, projected, bias=c.use_bias)
        self.conv1d = ShortConv(f"{name}.conv1d", c.conv_size, c.conv_kernel, bias=c.use_conv_bias)
        heads = (c.num_heads,)
        self.A_log = parameter(f"{name}.A_log", heads, tensors.log_uniform_decay, float32=True)
        self.D = parameter(f"{name}.D", heads, tensors.ones, float32=True)
        self.dt_bias = parameter(
            f"{name}.dt_bias", heads, tensors.inverse_softplus_step, float32=True
        )
        self.norm = GatedRMSNorm(f"{name}.norm", c.inner_size, c.n_groups, c.layer_norm_epsilon)
        self.out_proj = Linear(f"{name}.out_proj", c.inner_size, c.hidden_size, bias=c.use_bias)

    def prefill(
        self, x: Float[Array, "tokens d"], pools: Leaves, layer: Any, rows: Rows
    ) -> tuple[Float[Array, "tokens d"], Leaves]:
        """Packed tokens of many rows."""
        c = self.config
        gate, xbc, dt = self._project(x)
        xbc, windows = pk.causal_conv(
            xbc, self.conv1d.weight[...], value(self.conv1d.bias), pools["conv"], layer, rows,
            activation="silu",
        )  # fmt: skip
        inner, B, C = self._sections(xbc)
        y, states = pk.ssd(
            inner, dt, self._A(), B, C, self.D[...], self.dt_bias[...], pools["ssm"], layer, rows,
            dt_limit=c.time_step_limit,
        )  # fmt: skip
        return self._finish(y, pk.sliced(gate)), {"conv": windows, "ssm": states}

    def constants(self) -> Array:
        """What decoding needs beside the parameters themselves: the decay rates."""
        return self._A()

    def decode(
        self,
        x: Float[Array, "rows d"],
        pools: Leaves,
        layer: Any,
        rows: RowIds,
        constants: Array,
        residual: Float[Array, "rows d"] | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Float[Array, "rows d"], Leaves]:
        """One token of each row, normed before if there is a norm, added to the residual if there is one."""
        c = self.config
        (gate, xbc, dt), windows = projected_conv_step(
            self.in_proj, self.conv1d, x, pools["conv"], layer, rows, first=c.inner_size, norm=norm
        )
        inner, B, C = self._sections(xbc)
        y, states = pk.ssd_step(
            inner, dt, constants, B, C, self.D[...], self.dt_bias[...], pools["ssm"], layer,
            rows.read_ids, rows.write_ids, gate, dt_limit=c.time_step_limit,
        )  # fmt: skip
        y = self._close(y.reshape((-1, c.inner_size)), residual)
        return y, {"conv": windows, "ssm": states}

    def _project(self, x: Array) -> list[pk.Columns]:
        """Gate, inputs of the convolution, and step sizes."""
        c = self.config
        return pk.split(self.in_proj(x), c.inner_size, c.conv_size, c.num_heads)

    def _sections(self, xbc: Array | pk.Columns) -> tuple[pk.Columns, pk.Columns, pk.Columns]:
        """Inputs by head, and the input and output maps of the state by group."""
        c = self.config
        grouped = (c.n_groups, c.state_size)
        inner, B, C = pk.split(xbc, c.inner_size, *[c.n_groups * c.state_size] * 2)
        return inner.reshaped(c.num_heads, c.head_dim), B.reshaped(*grouped), C.reshaped(*grouped)

    def _A(self) -> Array:
        return -jnp.exp(self.A_log[...])

    def _finish(self, y: Array, gate: Array) -> Array:
        return self._close(self.norm.gated(y.reshape(gate.shape), gate))

    def _close(self, gated: Array, residual: Array | None = None) -> Array:
        """Norm and output projection of what was gated, summed over the shards, added to the residual."""
        if self.shards <= self.norm_groups:
            return self.out_proj(self.norm.normed(gated), self.shards, residual)
        c, gated, scale = self.config, gated.astype(jnp.float32), self.norm.weight[...]
        partial = matmul(
            (gated * scale.astype(jnp.float32)).astype(scale.dtype), self.out_proj.weight[...], jnp.float32
        )  # fmt: skip
        squares = (gated * gated).sum(-1, keepdims=True)
        width = c.inner_size * self.shards // self.norm_groups
        y = normed_total(partial, squares, self.norm_groups, self.shards, width, self.norm.eps)
        y = y.astype(scale.dtype)
        bias = value(self.out_proj.bias)
        y = y if bias is None else y + bias
        return y if residual is None else residual + y.astype(residual.dtype)


class Mamba2LM(CausalLM):
    """A Mamba-2 language model."""

    family = "mamba2"
    config: Mamba2Config
    leaf_axes: ClassVar = {"conv": 1, "ssm": 0}

    def __init__(
        self, config: Mamba2Config, dtype: Any, state_dtype: Any = jnp.float32, *, shards: int = 1
    ):
        self.shards = shards
        mixers = [
            Mamba2Mixer(f"backbone.layers.{i}.mixer", config, shards)
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, dtype, state_dtype, mixers)

    def cuts(self, shards: int) -> dict[str, Cut]:
        """By heads; the input and output maps by groups."""
        c = self.config
        inner, heads = Section(c.inner_size, shards), Section(c.num_heads, shards)
        shared = Section(c.n_groups * c.state_size, min(c.n_groups, shards))
        projected = (inner, inner, shared, shared, heads)
        return {
            "in_proj.weight": Cut(0, projected),
            "in_proj.bias": Cut(0, projected),
            "conv1d.weight": Cut(1, (inner, shared, shared)),
            "conv1d.bias": Cut(0, (inner, shared, shared)),
            **dict.fromkeys(("A_log", "D", "dt_bias"), Cut(0, (heads,))),
            "norm.weight": Cut(0, (inner,)),
            "out_proj.weight": Cut(1, (inner,)),
        }

    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The last inputs of the convolution, and the state of each head."""
        c = self.config.shard(self.shards)
        state = (c.num_heads, c.head_dim, c.state_size)
        return {
            "conv": jax.ShapeDtypeStruct((c.conv_kernel - 1, c.conv_size), self.dtype),
            "ssm": jax.ShapeDtypeStruct(state, self.state_dtype),
        }
