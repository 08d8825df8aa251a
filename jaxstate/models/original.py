"""The layout of the first Mamba checkpoints (state-spaces): its config.json in the words of the published format.

Its tensors have the same names but for `backbone.embedding`, which `Checkpoint` accepts in place of
`backbone.embeddings`; a tied head may lie in the file a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxstate.models.fields import Fields

_COMMON = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}
_MAMBA1 = {**_COMMON, "dt_rank": "time_step_rank"}
_MAMBA2 = {**_COMMON, "headdim": "head_dim", "ngroups": "n_groups", "dt_limit": "time_step_limit"}

# Options of a layer that matter for initialisation or speed alone.
_INERT = {
    "layer", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path",
    "conv_init", "A_init_range", "chunk_size", "use_mem_eff_path",
}  # fmt: skip


def is_original(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the first layout."""
    return "model_type" not in config and "d_model" in config and "n_layer" in config


def published(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The same config in the published format.

    Raises:
      CheckpointError: an option that would change the computation in a way that is not supported, by name.
    """
    fields = Fields(config, what)
    fields.only("attn_layer_idx", [], None)
    fields.only("d_intermediate", 0, None)
    fields.only("rms_norm", True)
    multiple = fields.size("pad_vocab_size_multiple", 8)
    hidden = fields.size("d_model")
    out: dict[str, Any] = {
        "vocab_size": -(-fields.size("vocab_size") // multiple) * multiple,
        "hidden_size": hidden,
        "num_hidden_layers": fields.size("n_layer"),
        "residual_in_fp32": fields.flag("residual_in_fp32", True),
        "tie_word_embeddings": fields.flag("tie_embeddings", True),
    }
    options = config.get("ssm_cfg") or {}
    if not isinstance(options, dict):
        fields.problem(f"ssm_cfg is {options!r}; it must be an object")
        options = {}
    layer = options.get("layer", "Mamba1")
    if layer == "Mamba1":
        out |= {"model_type": "mamba", "state_size": 16}
        names = _MAMBA1
    elif layer == "Mamba2":
        out |= {"model_type": "mamba2", "state_size": 128, "head_dim": 64, "n_groups": 1}
        names = _MAMBA2
    else:
        fields.problem(f"ssm_cfg.layer is {layer!r}; supported: 'Mamba1', 'Mamba2'")
        fields.done()
        raise AssertionError
    inner = Fields(options, "")
    inner.size("expand", 2)
    if layer == "Mamba2":
        inner.size("headdim", 64)
    inner.only("D_has_hdim", False)
    inner.only("rmsnorm", True)
    inner.only("norm_before_gate", False)
    inner.only("d_ssm", None)
    inner.only("activation", "silu", "swish")
    checked = {"D_has_hdim", "rmsnorm", "norm_before_gate", "d_ssm", "activation"}
    for name, value in options.items():
        if name in names:
            out[names[name]] = value
        elif name not in _INERT and name not in checked:
            inner.problem(f"{name} is not an option that is known")
    for problem in inner.problems:
        fields.problem(f"ssm_cfg.{problem}")
    fields.done()
    if layer == "Mamba2":
        out["num_heads"] = out.get("expand", 2) * hidden // out["head_dim"]
    return out
