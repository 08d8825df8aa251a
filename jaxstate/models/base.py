"""What every family's language model is: an embedding, blocks that add a mixer's output to a residual, a norm, a head.

A call takes packed tokens of many rows, the state cache, and for each group of layers which blocks each row reads and
writes; it returns the hidden state of every token and the new cache. Layers are unrolled, and the functions of one
block are compiled functions of their own, so that tracing costs one block and not one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstate.models.layers import Embedding, Head, RMSNorm
from jaxstate.models.shards import Cut
from jaxstate.state import GroupSpec, StateCache
from jaxstate.state.spec import format_bytes
from jaxstate.typing import Array, Float, Float32, Int, PyTree
from pallas_kernels.rows import RowIds, Rows

Leaves = dict[str, Array]


class Config(Protocol):
    """What every family's config has."""

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def layer_norm_epsilon(self) -> float: ...
    @property
    def residual_in_fp32(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def to_json(self) -> dict[str, Any]: ...


class Mixer(Protocol):
    """What a block holds: a layer that reads and writes one layer of the pools."""

    def prefill(
        self, x: Float[Array, "tokens d"], pools: Leaves, layer: Any, rows: Rows
    ) -> tuple[Float[Array, "tokens d"], Leaves]: ...

    def constants(self) -> PyTree: ...

    def decode(
        self,
        x: Float[Array, "rows d"],
        pools: Leaves,
        layer: Any,
        rows: RowIds,
        constants: PyTree,
        residual: Float[Array, "rows d"] | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Float[Array, "rows d"], Leaves]: ...


class Block(nnx.Module):
    """A norm and a mixer, added to the residual."""

    def __init__(self, name: str, size: int, eps: float, mixer: Mixer):
        self.norm = RMSNorm(f"{name}.norm", size, eps)
        self.mixer = mixer

    def prefill(
        self, residual: Float[Array, "tokens d"], pools: Leaves, layer: Any, rows: Rows
    ) -> tuple[Float[Array, "tokens d"], Leaves]:
        """Packed tokens through the block; the residual keeps its dtype."""
        y, pools = self.mixer.prefill(self.norm(residual), pools, layer, rows)
        return residual + y.astype(residual.dtype), pools

    def decode(
        self,
        residual: Float[Array, "rows d"],
        pools: Leaves,
        layer: Any,
        rows: RowIds,
        constants: PyTree,
    ) -> tuple[Float[Array, "rows d"], Leaves]:
        """One token of each row through the block; the residual keeps its dtype."""
        # The norm goes along, since on a GPU it is part of the mixer's first launch.
        return self.mixer.decode(residual, pools, layer, rows, constants, residual, self.norm)


# Blocks of one family have the same tree structure, so these are traced once for all layers.
@jax.jit
def _prefill(block: Block, residual: Array, pools: Leaves, layer: Array, rows: Rows) -> PyTree:
    return block.prefill(residual, pools, layer, rows)


@jax.jit
def _decode(
    block: Block, residual: Array, pools: Leaves, layer: Array, rows: RowIds, constants: PyTree
) -> PyTree:
    return block.decode(residual, pools, layer, rows, constants)


class CausalLM(nnx.Module):
    """A language model whose sequences are states in a cache.

    Attributes:
      config: the family's frozen config.
      dtype: dtype of the weights and of the activations between layers.
      state_dtype: dtype of the recurrent state in the cache.
    """

    family: ClassVar[str]
    leaf_axes: ClassVar[dict[str, int]]
    """Per leaf of a block, which of its axes is cut where the model is divided into shards."""
    GROUP: ClassVar[str] = "mamba"

    def __init__(self, config: Config, dtype: Any, state_dtype: Any, mixers: Sequence[Mixer]):
        self.config = config
        self.dtype, self.state_dtype = jnp.dtype(dtype), jnp.dtype(state_dtype)
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.embeddings = Embedding("backbone.embeddings", config.vocab_size, size)
        self.blocks = nnx.List(
            [Block(f"backbone.layers.{i}", size, eps, mixer) for i, mixer in enumerate(mixers)]
        )
        self.norm = RMSNorm("backbone.norm_f", size, eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else Head("lm_head", config.vocab_size, size)

    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One layer's share of one sequence's state."""
        raise NotImplementedError

    def cuts(self, shards: int) -> dict[str, Cut]:
        """How the tensors of a mixer are cut into shards, by their names in it; the others are in each shard whole.

        Raises:
          SpecError: the sizes do not divide.
        """
        raise NotImplementedError

    def blueprint(self, shards: int) -> CausalLM:
        """A model like this one, or one of its shards, with descriptions of tensors for arrays."""
        kind: Any = type(self)
        return kind(self.config, self.dtype, self.state_dtype, shards=shards)

    def groups(self) -> tuple[GroupSpec, ...]:
        """The state layout, as a cache needs it."""
        layers = self.config.num_hidden_layers
        return (GroupSpec(name=self.GROUP, kind="recurrent", layers=layers, leaves=self.leaves()),)

    def prefill(
        self,
        tokens: Int[Array, "tokens"],
        positions: Int[Array, "tokens"],
        rows: Mapping[str, Rows],
        cache: StateCache,
    ) -> tuple[Float[Array, "tokens d"], StateCache]:
        """The hidden state of every packed token, and the cache with the rows' new states."""
        return self._run(_prefill, tokens, rows, cache)

    def decode(
        self,
        tokens: Int[Array, "rows"],
        positions: Int[Array, "rows"],
        rows: Mapping[str, RowIds],
        cache: StateCache,
    ) -> tuple[Float[Array, "rows d"], StateCache]:
        """The hidden state of one token of each row, and the cache with the rows' new states."""
        return self.decoder()(tokens, positions, rows, cache)

    def decoder(self) -> Callable[..., tuple[Array, StateCache]]:
        """`decode` for many tokens: what depends on the weights alone is computed here, once for all of them."""
        # XLA leaves such things in a loop, a launch a layer and token.
        constants = [block.mixer.constants() for block in self.blocks]

        def decode(tokens, positions, rows, cache):
            return self._run(_decode, tokens, rows, cache, constants)

        return decode

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... vocab"]:
        """Scores of every token of the vocabulary, in float32."""
        return (self.embeddings if self.head is None else self.head).attend(hidden)

    def _run(
        self,
        block: Callable[..., PyTree],
        tokens: Array,
        rows: Mapping[str, Any],
        cache: StateCache,
        constants: Sequence[PyTree] | None = None,
    ) -> tuple[Array, StateCache]:
        residual = self.embeddings(tokens)
        residual = residual.astype(jnp.float32 if self.config.residual_in_fp32 else self.dtype)
        pools = cache.groups[self.GROUP]
        for i, layer in enumerate(self.blocks):
            own = () if constants is None else (constants[i],)
            residual, pools = block(layer, residual, pools, np.int32(i), rows[self.GROUP], *own)
        hidden = self.norm(residual)
        return hidden, StateCache({**cache.groups, self.GROUP: pools})

    @property
    def parameters(self) -> int:
        """How many numbers the model was trained to."""
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state over all layers."""
        return sum(group.bytes_per_block for group in self.groups() if group.kind == "recurrent")

    def describe(self) -> str:
        """One line: family, layers, sizes."""
        c, kept = self.config, self.embeddings.weight.dtype
        matrices = "" if kept == self.dtype else f" (matrices in {kept.name})"
        return (
            f"{c.model_type}: {c.num_hidden_layers} layers of {c.hidden_size}, vocabulary {c.vocab_size}, "
            f"{self.parameters:,} parameters in {self.dtype.name}{matrices}, "
            f"{format_bytes(self.state_bytes)} of state a sequence"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    __str__ = __repr__
