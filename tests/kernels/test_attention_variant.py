"""What the attention of a layer differs in, as an argument of programs."""

import jax
import jax.numpy as jnp

from ssd_jax.kernels.tree_attention.variant import NOTHING, AttentionVariant


def test_a_variant_comes_back_from_its_leaves():
    for variant in (
        AttentionVariant(window=70, soft_cap=1.5, scale=0.2),
        AttentionVariant(window=jnp.asarray(2), layer_windows=(2, NOTHING), sinks=jnp.zeros(4)),
    ):
        leaves, structure = jax.tree.flatten(variant)
        assert jax.tree.unflatten(structure, leaves) == variant


def test_costs_are_estimated_by_what_the_windows_of_layers_see():
    assert AttentionVariant().mean_reach(8192) == 8192
    assert AttentionVariant(window=1024).mean_reach(8192) == 1024
    assert AttentionVariant(window=1024).mean_reach(512) == 512
    five_of_six = (1024,) * 5 + (NOTHING,)
    of_array = AttentionVariant(window=jnp.asarray(1024), layer_windows=five_of_six)
    assert of_array.mean_reach(8192) == (5 * 1024 + 8192) / 6
