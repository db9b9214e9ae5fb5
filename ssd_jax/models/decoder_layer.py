"""One layer of a decoder."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Int32

from ssd_jax.kernels.linear.api import products
from ssd_jax.models.attention import Attend, Attention
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.feed_forward import MLP, ExpertMLP
from ssd_jax.models.layers import AnyNorm, LayerNorm, Multiply, RMSNorm, Stream
from ssd_jax.models.mechanisms import Experts
from ssd_jax.models.rope import Rotation


def hidden_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of hidden states."""
    size, eps, m = config.hidden_size, config.rms_norm_eps, config.mechanisms
    if m.layer_norm:
        return LayerNorm((size,), ("embed",), eps, bias=m.norm_bias)
    return RMSNorm(size, "embed", eps)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward with residual connections, and norms before, after or both.

    They run one after the other, or side by side. The norms before them have llama's names.
    """

    def __init__(self, config: ModelConfig, execution: Execution, experts: Experts | None = None):
        m, norm = config.mechanisms, functools.partial(hidden_norm, config)
        before, after = m.norm_placement != "post", m.norm_placement != "pre"
        self.input_layernorm = norm() if before else None
        self.self_attn = Attention(config, execution)
        self.attention_output_norm = norm() if after else None
        self.parallel = m.parallel
        self.post_attention_layernorm = norm() if before and not m.parallel else None
        self.mlp: MLP | ExpertMLP
        if experts is None:
            self.mlp = MLP(config, execution, config.intermediate_size)
        else:
            self.mlp = ExpertMLP(config, execution, experts)
        self.mlp_output_norm = norm() if after else None
        self.residual_multiplier = m.multipliers.residual

    def __call__(
        self,
        x: Stream,
        rope: Rotation,
        attend: Attend,
        multiply: Multiply = products,
        present: Bool[Array, "tokens"] | None = None,
        stacked: Int32[Array, ""] | None = None,
    ) -> tuple[Stream, Any]:
        """Runs one layer on the residual stream x; also returns the second result of `attend`.

        Rows that are not present may get any result; None stands for all present. `stacked` is the
        layer's place where weights of experts are those of several layers.
        """
        attended, aux = self.self_attn(x, self.input_layernorm, rope, attend, multiply)
        added = self._add(x, attended, self.attention_output_norm)
        source, norm = added, self.post_attention_layernorm
        if self.parallel:
            source, norm = x, self.input_layernorm
        if isinstance(self.mlp, ExpertMLP):
            fed = self.mlp(source, norm, multiply, present, stacked)
        else:
            fed = self.mlp(source, norm, multiply)
        return self._add(added, fed, self.mlp_output_norm), aux

    def _add(self, x: Stream, change: Stream, norm: AnyNorm) -> Stream:
        change = change if norm is None else norm(change)
        return x + (change if self.residual_multiplier == 1 else change * self.residual_multiplier)
