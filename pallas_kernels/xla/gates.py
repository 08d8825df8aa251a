"""The pointwise parts that the ops share, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

NO_LIMIT = (0.0, float("inf"))


def activate(y: Float[Array, "..."], activation: str | None) -> Float[Array, "..."]:
    """`y` through the named activation."""
    return jax.nn.silu(y) if activation == "silu" else y


def live_outputs(y: Float[Array, "R ..."], live: Bool[Array, "R"]) -> Float[Array, "R ..."]:
    """`y` with the outputs of null rows, or of padding, exactly 0."""
    return jnp.where(live.reshape((-1,) + (1,) * (y.ndim - 1)), y, jnp.zeros((), y.dtype))


def step_size(
    dt: Float[Array, "... F"],
    dt_bias: Float[Array, "F"] | None,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Float[Array, "... F"]:
    """`clip(softplus(dt + dt_bias), *dt_limit)` in float32."""
    dt = dt.astype(jnp.float32)
    dt = jax.nn.softplus(dt if dt_bias is None else dt + dt_bias.astype(jnp.float32))
    return dt if dt_limit == NO_LIMIT else jnp.clip(dt, *dt_limit)
