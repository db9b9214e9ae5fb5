"""Attention of several query tokens a sequence, over its pages and over draft branches."""

from ssd_jax.kernels.tree_attention.api import BACKENDS, Scratch, tree_attention

__all__ = ["BACKENDS", "Scratch", "tree_attention"]
