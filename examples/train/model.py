"""Mamba-2 as plain functions over a dict of parameters named as in the hub's checkpoints.

The layers' parameters are stacked: ``params["layers"]["mixer.D"]`` is ``[layers, heads]``.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from safetensors.numpy import load_file, save_file

from pallas_kernels.xla.conv import causal_conv_dense
from pallas_kernels.xla.ssd import ssd_dense

Params = dict


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a Mamba-2 model, by the hub's names."""

    vocab_size: int = 4096
    hidden_size: int = 384
    num_hidden_layers: int = 10
    expand: int = 2
    head_dim: int = 64
    state_size: int = 64
    n_groups: int = 1
    conv_kernel: int = 4
    chunk_size: int = 64
    layer_norm_epsilon: float = 1e-5

    @property
    def inner(self) -> int:
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        return self.inner // self.head_dim

    @property
    def conv_size(self) -> int:
        return self.inner + 2 * self.n_groups * self.state_size

    @property
    def in_proj_parts(self) -> tuple[int, ...]:
        """Rows of in_proj: z, x, B, C, dt."""
        state = self.n_groups * self.state_size
        return (self.inner, self.inner, state, state, self.num_heads)


class State(NamedTuple):
    """What a sequence carries on: the last inputs of the convolution, and the SSM state."""

    conv: Float[Array, "layers B K-1 DC"]
    ssm: Float[Array, "layers B H P N"]


def init_params(config: Config, seed: int = 0) -> Params:
    """Returns float32 parameters; dt and A start spread as in Dao & Gu 2024 (arXiv:2405.21060)."""
    rng = np.random.default_rng(seed)
    layers, d, inner, heads = (
        config.num_hidden_layers,
        config.hidden_size,
        config.inner,
        config.num_heads,
    )

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.normal(0.0, std, shape).astype(np.float32)

    dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (layers, heads)))
    stacked = {
        "norm.weight": np.ones((layers, d)),
        "mixer.in_proj.weight": normal(layers, sum(config.in_proj_parts), d, std=d**-0.5),
        "mixer.conv1d.weight": normal(layers, config.conv_size, 1, config.conv_kernel, std=0.3),
        "mixer.conv1d.bias": np.zeros((layers, config.conv_size)),
        "mixer.dt_bias": dt + np.log(-np.expm1(-dt)),  # softplus(dt_bias) = dt
        "mixer.A_log": np.log(rng.uniform(1.0, 16.0, (layers, heads))),
        "mixer.D": np.ones((layers, heads)),
        "mixer.norm.weight": np.ones((layers, inner)),
        "mixer.out_proj.weight": normal(layers, d, inner, std=(2 * layers * inner) ** -0.5),
    }
    params = {
        "embeddings.weight": normal(config.vocab_size, d, std=0.02),
        "norm_f.weight": np.ones(d),
        "layers": stacked,
    }
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), params)


def init_state(config: Config, batch: int, dtype=jnp.bfloat16) -> State:
    """Returns the state before any token."""
    layers, taps = config.num_hidden_layers, config.conv_kernel
    shape = (layers, batch, config.num_heads, config.head_dim, config.state_size)
    return State(
        jnp.zeros((layers, batch, taps - 1, config.conv_size), dtype),
        jnp.zeros(shape, jnp.float32),
    )


def rms_norm(x: Float[Array, "... d"], weight: Float[Array, "d"], eps: float):
    """Returns ``x`` scaled to unit mean square, in float32, times ``weight``."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def mixer(
    config: Config, p: Params, u: Float[Array, "B T d"], state: State, dtype, remat: bool = False
):
    """Returns one mixer's output and the state after it; ``p`` holds one layer's parameters."""
    batch, length, _ = u.shape
    inner, heads, groups = config.inner, config.num_heads, config.n_groups
    # Three products instead of one whose odd width and slices cost more than reading u again.
    in_proj = jnp.split(p["mixer.in_proj.weight"].astype(dtype), [inner, inner + config.conv_size])
    z, xbc, dt = (u.astype(dtype) @ weight.T for weight in in_proj)

    window = jnp.concatenate([state.conv.astype(dtype), xbc], axis=1)
    taps = p["mixer.conv1d.weight"][:, 0].T
    xbc = causal_conv_dense(window, taps, p["mixer.conv1d.bias"], "silu")[:, taps.shape[0] - 1 :]

    x, b, c = jnp.split(xbc, [inner, inner + groups * config.state_size], axis=-1)
    x = x.reshape(batch, length, heads, config.head_dim)
    b, c = (v.reshape(batch, length, groups, config.state_size) for v in (b, c))
    dt = jax.nn.softplus(dt.astype(jnp.float32) + p["mixer.dt_bias"])
    ssd = partial(ssd_dense, chunk=config.chunk_size, matmul_dtype=dtype)
    ssd = jax.checkpoint(ssd) if remat else ssd
    y, ssm = ssd(x, dt, -jnp.exp(p["mixer.A_log"]), b, c, initial=state.ssm)
    y = y.astype(jnp.float32) + p["mixer.D"][:, None] * x.astype(jnp.float32)
    y = y.reshape(batch, length, inner) * jax.nn.silu(z.astype(jnp.float32))
    groupwise = y.reshape(batch, length, groups, -1)
    weight = p["mixer.norm.weight"].reshape(groups, -1)
    y = rms_norm(groupwise, weight, config.layer_norm_epsilon).reshape(y.shape)
    out = y.astype(dtype) @ p["mixer.out_proj.weight"].astype(dtype).T
    return out, State(window[:, length:], ssm)


def forward(
    config: Config,
    params: Params,
    tokens: Int[Array, "B T"],
    state: State,
    *,
    dtype=jnp.bfloat16,
    remat: Literal["none", "ssd", "layer"] = "none",
    unroll: bool = False,
) -> tuple[Float[Array, "B T d"], State]:
    """Returns the normed hidden states and the state after the last token."""
    # Gathered in float32: frequent tokens' gradients meet in one row, too many to add in bfloat16.
    residual = params["embeddings.weight"][tokens]

    def layer(residual, inputs):
        p, state = inputs
        u = rms_norm(residual, p["norm.weight"], config.layer_norm_epsilon)
        out, state = mixer(config, p, u, state, dtype, remat == "ssd")
        return residual + out.astype(jnp.float32), state

    body = jax.checkpoint(layer) if remat == "layer" else layer
    count = config.num_hidden_layers if unroll else 1
    residual, state = lax.scan(body, residual, (params["layers"], state), unroll=count)
    return rms_norm(residual, params["norm_f.weight"], config.layer_norm_epsilon), state


def token_losses(
    params: Params, hidden: Float[Array, "B T d"], targets: Int[Array, "B T"], dtype=jnp.bfloat16
) -> Float[Array, "B T"]:
    """Returns the cross entropy of each target, in nats, with the tied embedding as the head."""
    table = params["embeddings.weight"].astype(dtype)
    logits = (hidden.astype(dtype) @ table.T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def hub_config(config: Config) -> dict:
    """Returns the contents of ``config.json`` for transformers' ``Mamba2ForCausalLM``."""
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "bos_token_id": 0,
        "chunk_size": config.chunk_size,
        "conv_kernel": config.conv_kernel,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "expand": config.expand,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "model_type": "mamba2",
        "n_groups": config.n_groups,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "pad_token_id": 0,
        "rescale_prenorm_residual": False,
        "residual_in_fp32": True,
        "rms_norm": True,
        "state_size": config.state_size,
        "tie_word_embeddings": True,
        "time_step_floor": 1e-4,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": -(-config.hidden_size // 16),
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "vocab_size": config.vocab_size,
    }


def export(config: Config, params: Params, folder: Path) -> int:
    """Writes ``config.json`` and bfloat16 ``model.safetensors``; returns the parameter count.

    ``A_log``, ``D`` and ``dt_bias`` stay float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hub_config(config), indent=2) + "\n")
    tensors = {f"backbone.{name}": v for name, v in params.items() if name != "layers"}
    for name, stacked in params["layers"].items():
        for n in range(config.num_hidden_layers):
            tensors[f"backbone.layers.{n}.{name}"] = stacked[n]

    def stored(name: str, value) -> np.ndarray:
        exact = name.endswith(("A_log", ".D", "dt_bias"))
        return np.asarray(value, np.float32 if exact else jnp.bfloat16)

    arrays = {name: np.ascontiguousarray(stored(name, v)) for name, v in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(v.size for v in arrays.values())


def load(folder: Path) -> tuple[Config, Params]:
    """Reads what ``export`` wrote; parameters in float32."""
    values = json.loads((folder / "config.json").read_text())
    config = Config(**{f.name: values[f.name] for f in dataclasses.fields(Config)})
    tensors = load_file(folder / "model.safetensors")
    tensors = {k.removeprefix("backbone."): jnp.asarray(v, jnp.float32) for k, v in tensors.items()}
    per_layer = [name.removeprefix("layers.0.") for name in tensors if name.startswith("layers.0.")]
    params = {name: v for name, v in tensors.items() if not name.startswith("layers.")}
    params["layers"] = {
        name: jnp.stack([tensors[f"layers.{n}.{name}"] for n in range(config.num_hidden_layers)])
        for name in per_layer
    }
    return config, params
