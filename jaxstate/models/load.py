"""Models from folders, from random numbers, and back into folders."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxstate.errors import CheckpointError
from jaxstate.models.base import CausalLM, Config
from jaxstate.models.checkpoint import CONFIG, WEIGHTS, Checkpoint
from jaxstate.models.mamba import MambaConfig, MambaLM
from jaxstate.models.mamba2 import Mamba2Config, Mamba2LM
from jaxstate.models.tensors import Tensor, Unread

FAMILIES: dict[str, tuple[Any, Any]] = {
    "falcon_mamba": (MambaConfig, MambaLM),
    "mamba": (MambaConfig, MambaLM),
    "mamba2": (Mamba2Config, Mamba2LM),
}
"""Config and model class by the `model_type` of a config.json."""

_EMBEDDING, _HEAD = "backbone.embeddings.weight", "lm_head.weight"


def parse_config(values: Mapping[str, Any], what: str = CONFIG) -> Config:
    """The frozen config of the family that `model_type` names.

    Raises:
      CheckpointError: an unknown family, with those supported, or fields that are wrong or not supported.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{what}: model_type is {model_type!r}; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type][0].from_json(values, what)


def load_model(
    folder: str | pathlib.Path, dtype: Any = None, *, state_dtype: Any = jnp.float32, read: bool = True,
) -> CausalLM:  # fmt: skip
    """The model in a folder with config.json and safetensors files.

    Args:
      folder: a local folder, in the published format or the first one (state-spaces).
      dtype: of weights and activations; None for the file's own on a GPU and float32 on a CPU. `A_log`, `D` and the
        bias of dt stay float32 whatever it is, and matrices that the file has in bfloat16 stay so in a float32 model,
        which computes the same with half the bytes.
      state_dtype: of the recurrent state in the cache.
      read: with False the tensors stay in their files until an engine puts them on devices, on each its share alone.

    Raises:
      CheckpointError: the folder is not a whole model of a supported family; nothing was created.
    """
    checkpoint = Checkpoint.open(folder)
    config = parse_config(checkpoint.config, str(checkpoint.folder / CONFIG))
    checkpoint.check_layers(config.num_hidden_layers)
    blueprint = _blueprint(config, jnp.float32, state_dtype)
    tied = {_HEAD: _EMBEDDING} if config.tie_word_embeddings else {}
    checkpoint.check(jax.tree.leaves(blueprint), tied=tied)
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else checkpoint.dtype(_EMBEDDING)
    dtype = _float_dtype(dtype)
    if not read:
        return jax.tree.map(
            lambda tensor: tensor.unread(
                checkpoint.dtype(tensor.name), dtype, partial(checkpoint.read_part, tensor.name)
            ),
            _blueprint(config, dtype, state_dtype),
        )
    # Without the copy an array on a CPU could share its memory with the file.
    return jax.tree.map(
        lambda tensor: tensor.kept(jnp.array(checkpoint.read(tensor.name), copy=True), dtype),
        _blueprint(config, dtype, state_dtype),
    )


def from_random(
    config: Config, seed: int = 0, dtype: Any = jnp.float32, *, state_dtype: Any = jnp.float32, read: bool = True,
) -> CausalLM:  # fmt: skip
    """A model with the random weights that training starts from, made on the device; `read` is as in `load_model`."""
    dtype = _float_dtype(dtype)
    if not read:
        return jax.tree.map(
            lambda tensor: Unread(
                tensor.kept_shape(), tensor.dtype(dtype), partial(_random_part, tensor, seed, dtype)
            ),
            _blueprint(config, dtype, state_dtype),
        )
    return jax.tree.map(
        lambda tensor: tensor.random(seed, dtype), _blueprint(config, dtype, state_dtype)
    )


def save_model(model: CausalLM, folder: str | pathlib.Path) -> None:
    """Writes a model in the published format; loading it in the model's dtype gives every bit back.

    Raises:
      CheckpointError: the folder already holds a model.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in (CONFIG, WEIGHTS) if (folder / name).exists()]
    if taken:
        raise CheckpointError(
            f"{folder} already has {' and '.join(taken)}; choose another folder or remove them"
        )
    blueprint = _blueprint(model.config, model.dtype, model.state_dtype)
    weights: dict[str, np.ndarray] = {
        tensor.name: tensor.filed(leaf)
        for tensor, leaf in zip(jax.tree.leaves(blueprint), jax.tree.leaves(model), strict=True)
    }
    config = {**model.config.to_json(), "dtype": model.dtype.name}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _random_part(tensor: Tensor, seed: int, dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
    return _random(tensor, seed, dtype)[index]


@lru_cache(maxsize=1)  # for the parts of a tensor, which are asked for one after the other
def _random(tensor: Tensor, seed: int, dtype: Any) -> np.ndarray:
    return np.asarray(tensor.random(seed, dtype))


def _blueprint(config: Config, dtype: Any, state_dtype: Any) -> CausalLM:
    return cast(CausalLM, FAMILIES[config.model_type][1](config, dtype, state_dtype))


def _float_dtype(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(
            f"dtype {dtype!r} is not known; use float32, bfloat16 or float16"
        ) from error
    if found not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise CheckpointError(
            f"dtype {found.name} is not supported; use float32, bfloat16 or float16"
        )
    return found
