"""Mamba (Gu & Dao 2023, arXiv:2312.00752), and Falcon-Mamba, which norms dt, B and C without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels as pk
from jaxstate.models import tensors
from jaxstate.models.base import CausalLM, Leaves
from jaxstate.models.fields import Fields
from jaxstate.models.layers import (
    Linear,
    RMSNorm,
    ShortConv,
    parameter,
    projected_conv_step,
    rms_normalise,
    value,
)
from jaxstate.models.shards import Cut, Section, check_divides
from jaxstate.typing import Array, Float
from pallas_kernels.rows import RowIds, Rows

_ARCHITECTURES = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM"}


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """The sizes and options of a Mamba model, under the names of its config.json.

    `mixer_rms_eps` is None for mamba, and for falcon_mamba the epsilon of the norms of dt, B and C.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    time_step_rank: int
    state_size: int = 16
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = True
    mixer_rms_eps: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any], what: str = "config.json") -> MambaConfig:
        """The config in a config.json.

        Raises:
          CheckpointError: fields that are missing, wrong, or ask for what is not supported, all of them named.
        """
        f = Fields(values, what)
        f.only("hidden_act", "silu", "swish")
        f.only("rms_norm", True)
        f.only("quantization_config", None)
        hidden = f.size("hidden_size")
        expand = f.size("expand", 2)
        rank = values.get("time_step_rank", "auto")
        falcon = values.get("model_type") == "falcon_mamba"
        config = cls(
            vocab_size=f.size("vocab_size"),
            hidden_size=hidden,
            num_hidden_layers=f.size("num_hidden_layers"),
            # Where both are given and disagree, the size is what the tensors have.
            intermediate_size=f.size("intermediate_size", expand * hidden),
            time_step_rank=-(-hidden // 16) if rank == "auto" else f.size("time_step_rank"),
            state_size=f.size("state_size"),
            conv_kernel=f.size("conv_kernel", 4, least=2),
            use_bias=f.flag("use_bias", False),
            use_conv_bias=f.flag("use_conv_bias", True),
            layer_norm_epsilon=f.number("layer_norm_epsilon", 1e-5),
            residual_in_fp32=f.flag("residual_in_fp32", True),
            tie_word_embeddings=f.flag("tie_word_embeddings", True),
            mixer_rms_eps=f.number("mixer_rms_eps", 1e-6) if falcon else None,
            eos_token_ids=f.ids("eos_token_id"),
        )
        f.done()
        return config

    def to_json(self) -> dict[str, Any]:
        """The fields of a config.json in the published format."""
        fields = dataclasses.asdict(self)
        eos = fields.pop("eos_token_ids")
        if self.mixer_rms_eps is None:
            del fields["mixer_rms_eps"]
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            **fields,
            "hidden_act": "silu",
            "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        }

    @property
    def model_type(self) -> str:
        return "mamba" if self.mixer_rms_eps is None else "falcon_mamba"

    def shard(self, shards: int) -> MambaConfig:
        """The sizes of one shard's mixers; SpecError when the channels do not divide."""
        check_divides("intermediate_size", self.intermediate_size, shards)
        return dataclasses.replace(self, intermediate_size=self.intermediate_size // shards)


class MambaMixer(nnx.Module):
    """Projection, short convolution, selective scan with gate, projection; or one shard of that."""

    def __init__(self, name: str, config: MambaConfig, shards: int = 1):
        c = self.config = config.shard(shards)
        self.shards = shards
        inner, selected = c.intermediate_size, c.time_step_rank + 2 * c.state_size
        self.in_proj = Linear(f"{name}.in_proj", c.hidden_size, 2 * inner, bias=c.use_bias)
        self.conv1d = ShortConv(f"{name}.conv1d", inner, c.conv_kernel, bias=c.use_conv_bias)
        self.x_proj = Linear(f"{name}.x_proj", inner, selected)
        self.dt_proj = Linear(f"{name}.dt_proj", c.time_step_rank, inner)
        # Added inside the scan, in float32.
        self.dt_bias = parameter(
            f"{name}.dt_proj.bias", (inner,), tensors.inverse_softplus_step, float32=True
        )
        self.A_log = parameter(
            f"{name}.A_log", (inner, c.state_size), tensors.log_arange, float32=True
        )
        self.D = parameter(f"{name}.D", (inner,), tensors.ones, float32=True)
        self.out_proj = Linear(f"{name}.out_proj", inner, c.hidden_size, bias=c.use_bias)

    def prefill(
        self, x: Float[Array, "tokens d"], pools: Leaves, layer: Any, rows: Rows
    ) -> tuple[Float[Array, "tokens d"], Leaves]:
        """Packed tokens of many rows."""
        inner, gate = self._project(x)
        inner, windows = pk.causal_conv(
            inner, self.conv1d.weight[...], value(self.conv1d.bias), pools["conv"], layer, rows,
            activation="silu",
        )  # fmt: skip
        dt, B, C = self._select(inner)
        y, states = pk.selective_scan(
            inner, self.dt_proj(dt), self._A(), B, C, self.D[...], gate, self.dt_bias[...], pools["ssm"], layer,
            rows,
        )  # fmt: skip
        return self.out_proj(y, self.shards), {"conv": windows, "ssm": states}

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
        (_, inner, gate), windows = projected_conv_step(
            self.in_proj, self.conv1d, x, pools["conv"], layer, rows, first=0, norm=norm
        )
        dt, B, C = self._select(inner)
        y, states = pk.selective_step(
            inner, dt, constants, B, C, self.D[...], gate, self.dt_bias[...], pools["ssm"], layer,
            rows.read_ids, rows.write_ids, self.dt_proj.weight[...],
        )  # fmt: skip
        return self.out_proj(y, self.shards, residual), {"conv": windows, "ssm": states}

    def _project(self, x: Array) -> list[pk.Columns]:
        """Inputs of the convolution, and gate."""
        return pk.split(self.in_proj(x), *[self.config.intermediate_size] * 2)

    def _select(self, inner: Array | pk.Columns) -> list[pk.Columns] | list[Array]:
        """What `dt_proj` makes the step sizes of, and the input and output maps of the state.

        They depend on all channels, so that shards sum here too, before the scan.
        """
        c, chosen = self.config, self.x_proj(inner, self.shards)
        parts = pk.split(chosen, c.time_step_rank, c.state_size, c.state_size)
        if c.mixer_rms_eps is not None:
            parts = [part.sliced() for part in parts]
            return [rms_normalise(part, c.mixer_rms_eps).astype(part.dtype) for part in parts]
        return parts

    def _A(self) -> Array:
        return -jnp.exp(self.A_log[...])


class MambaLM(CausalLM):
    """A Mamba or Falcon-Mamba language model."""

    family = "mamba"
    config: MambaConfig
    leaf_axes: ClassVar = {"conv": 1, "ssm": 1}

    def __init__(
        self, config: MambaConfig, dtype: Any, state_dtype: Any = jnp.float32, *, shards: int = 1
    ):
        self.shards = shards
        mixers = [
            MambaMixer(f"backbone.layers.{i}.mixer", config, shards)
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, dtype, state_dtype, mixers)

    def cuts(self, shards: int) -> dict[str, Cut]:
        """By channels."""
        inner = Section(self.config.intermediate_size, shards)
        first, second = Cut(0, (inner,)), Cut(1, (inner,))
        return {
            "in_proj.weight": Cut(0, (inner, inner)),
            "in_proj.bias": Cut(0, (inner, inner)),
            **dict.fromkeys(("conv1d.weight", "x_proj.weight", "out_proj.weight"), second),
            **dict.fromkeys(("conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D"), first),
        }

    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The last inputs of the convolution, and the state of each channel, channels contiguous."""
        c = self.config.shard(self.shards)
        state = (c.state_size, c.intermediate_size)
        return {
            "conv": jax.ShapeDtypeStruct((c.conv_kernel - 1, c.intermediate_size), self.dtype),
            "ssm": jax.ShapeDtypeStruct(state, self.state_dtype),
        }
