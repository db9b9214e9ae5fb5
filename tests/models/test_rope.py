"""Rotary angles: the same numbers wherever they are used, and computed once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.models.config import ModelConfig
from ssd_jax.models.rope import inverse_frequencies, rotation
from ssd_jax.testing import tiny

CONFIG = dataclasses.replace(ModelConfig.from_hf(tiny.config("llama")), head_dim=64)
POSITIONS = jnp.array([[0, 1, 5], [7, 100, 4000]], jnp.int32)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_angles_are_products_of_positions_and_frequencies(head_dim):
    config = dataclasses.replace(CONFIG, head_dim=head_dim)
    angles = np.asarray(POSITIONS)[..., None, None] * inverse_frequencies(config)
    found = rotation(config, POSITIONS)
    np.testing.assert_allclose(found.cos, np.cos(angles), atol=3e-4)  # 4000 radians in float32
    np.testing.assert_allclose(found.sin, np.sin(angles), atol=3e-4)


@pytest.mark.shipped
def test_queries_and_keys_share_their_cosines():
    """XLA on CPU would compute them where they are used, for every element there."""

    def layers(x, positions):
        rotated = rotation(CONFIG, positions)
        return rotated(jnp.tanh(rotated(x * 2)))

    x = jnp.ones((*POSITIONS.shape, 3, CONFIG.head_dim))
    text = jax.jit(layers).lower(x, POSITIONS).compile().as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1
