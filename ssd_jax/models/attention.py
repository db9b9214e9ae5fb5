"""Self-attention of a layer, over whatever keys and values its caller has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import (
    AnyNorm,
    LayerNorm,
    Linear,
    Multiply,
    RMSNorm,
    Stream,
    linear,
    pad_rows,
    parameter,
)
from ssd_jax.models.rope import Rotation

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""From q [B, R, heads, head_dim], k and v [B, R, kv_heads, head_dim], all float32, q and k
rotated, to the attention output, shaped as q, and what else the layer returns, such as pages."""


def head_norm(config: ModelConfig, heads: int, axis: str) -> RMSNorm | LayerNorm | None:
    """A norm of so many heads of queries or keys, as the axis says; None if there is none."""
    m, size, eps = config.mechanisms, config.head_dim, config.rms_norm_eps
    if not config.qk_norm:
        return None
    if m.head_qk_norm:
        return LayerNorm((heads, size), (axis, None), eps, bias=False)
    return RMSNorm(heads * size, axis, eps) if m.joint_qk_norm else RMSNorm(size, None, eps)


class Attention(nnx.Module):
    """Grouped-query self-attention, with optional biases, norms of queries and keys, and sinks."""

    def __init__(self, config: ModelConfig, execution: Execution):
        c, m, dtype, size = config, config.mechanisms, execution.compute, config.head_dim
        q, kv, bias = c.num_heads * size, c.num_kv_heads * size, c.qkv_bias
        self.q_proj = Linear((q, c.hidden_size), ("heads", "embed"), dtype, bias=bias)
        self.k_proj = Linear((kv, c.hidden_size), ("kv_heads", "embed"), dtype, bias=bias)
        self.v_proj = Linear((kv, c.hidden_size), ("kv_heads", "embed"), dtype, bias=bias)
        self.o_proj = Linear((c.hidden_size, q), ("embed", "heads"), dtype, bias=m.output_bias)
        self.joint_norm, self.late_norm = m.joint_qk_norm, m.late_qk_norm
        self.q_norm = head_norm(c, c.num_heads, "heads")
        self.k_norm = head_norm(c, c.num_kv_heads, "kv_heads")
        sinks = parameter((c.num_heads,), ("heads",), jnp.dtype(jnp.float32))
        self.sinks = sinks if m.sinks else None
        self.head_dim = size
        self.execution = execution

    def with_sinks(self, variant: AttentionVariant) -> AttentionVariant:
        """The attention of a layer with the sinks of this one, if it has any."""
        if self.sinks is None:
            return variant
        return dataclasses.replace(variant, sinks=self.sinks[...])

    def __call__(
        self, x: Stream, norm: AnyNorm, rope: Rotation, attend: Attend, multiply: Multiply
    ) -> tuple[Stream, Any]:
        """x, not normed yet, has n >= B * R rows; surplus rows are padding."""
        batch, rows = rope.cos.shape[:2]
        heads = (batch, rows, -1, self.head_dim)
        normed = heads[:3] if self.joint_norm else heads
        projections = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = (
            y[: batch * rows].reshape(normed) for y in linear(x, projections, multiply, norm)
        )
        if not self.late_norm:
            q, k = self._normed(q, k)
        q, k, v = (y.reshape(heads) for y in (q, k, v))
        q, k = rope.queries(q), rope(k)
        if self.late_norm:
            q, k = self._normed(q, k)
        attended, aux = attend(q, k, v)
        flat = attended.reshape(batch * rows, -1)
        [out] = linear(pad_rows(flat, x.shape[0]), [self.o_proj], multiply)
        return out, aux

    def _normed(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)
