"""Language models of recurrent families, from published checkpoints."""

from jaxstate.models.base import CausalLM
from jaxstate.models.load import FAMILIES, from_random, load_model, parse_config, save_model
from jaxstate.models.mamba import MambaConfig, MambaLM
from jaxstate.models.mamba2 import Mamba2Config, Mamba2LM

__all__ = [
    "FAMILIES",
    "CausalLM",
    "Mamba2Config",
    "Mamba2LM",
    "MambaConfig",
    "MambaLM",
    "from_random",
    "load_model",
    "parse_config",
    "save_model",
]
