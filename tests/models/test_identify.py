"""Which model a state is of."""

import jax.numpy as jnp
import numpy as np

from jaxstate.models import Mamba2Config, from_random
from jaxstate.models.identify import identify


def test_one_bit_of_one_weight_makes_another_model():
    config = Mamba2Config(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8
    )
    model = from_random(config, dtype=jnp.bfloat16)
    own, seen = identify(model), set()
    assert identify(from_random(config, dtype=jnp.bfloat16)) == own
    table = np.asarray(model.embeddings.weight[...])
    for place in [(77, 3), (77, 4), (299, 15)]:
        bits = table.view(np.uint16).copy()
        bits[place] ^= 1
        model.embeddings.weight[...] = jnp.asarray(bits.view(table.dtype))
        seen.add(identify(model).fingerprint)
    # Two weights that change places are another model too.
    swapped = table.copy()
    swapped[[77, 78]] = swapped[[78, 77]]
    model.embeddings.weight[...] = jnp.asarray(swapped)
    seen.add(identify(model).fingerprint)
    assert len(seen) == 4 and own.fingerprint not in seen
