"""Feed-forwards of a layer: of all its channels, or of experts."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int32

from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.experts import ExpertMatrices, Router, SharedGate
from ssd_jax.models.layers import (
    ACTIVATIONS,
    XIELU,
    AnyNorm,
    Linear,
    Multiply,
    Stream,
    gated,
    linear,
)
from ssd_jax.models.mechanisms import Activation, Experts


class MLP(nnx.Module):
    """Feed-forward of two matrices, or of three with a gate."""

    def __init__(self, config: ModelConfig, execution: Execution, channels: int):
        m, dtype, bias = config.mechanisms, execution.compute, config.mechanisms.mlp_bias
        up_shape = (channels, config.hidden_size)
        down_shape = (config.hidden_size, channels)
        gate = Linear(up_shape, ("ffn", "embed"), dtype, bias=bias)
        self.gate_proj = gate if m.gated else None
        self.up_proj = Linear(up_shape, ("ffn", "embed"), dtype, bias=bias)
        self.down_proj = Linear(down_shape, ("embed", "ffn"), dtype, bias=bias)
        self.activation: Activation = m.activation
        self.act_fn = XIELU() if m.activation == "xielu" else None
        self.gate_limit = m.gate_limit

    def __call__(self, x: Stream, norm: AnyNorm, multiply: Multiply) -> Stream:
        """down(act(gate(x)) * up(x)), or down(act(up(x))); x is not normed yet."""
        if self.gate_proj is None:
            [up] = linear(x, [self.up_proj], multiply, norm)
            act = ACTIVATIONS[self.activation] if self.act_fn is None else self.act_fn
            inner = act(up)
        else:
            gate, up = linear(x, [self.gate_proj, self.up_proj], multiply, norm)
            inner = gated(gate, up, self.activation, self.gate_limit)
        [down] = linear(inner, [self.down_proj], multiply)
        return down


class ExpertMLP(nnx.Module):
    """Feed-forward of experts, of which one may see every token."""

    def __init__(self, config: ModelConfig, execution: Execution, experts: Experts):
        self.router = Router(config, experts)
        self.experts = ExpertMatrices(config, execution, experts)
        self.shared_expert = MLP(config, execution, experts.shared) if experts.shared else None
        self.shared_expert_gate = SharedGate(config) if experts.shared_gate else None

    def __call__(
        self,
        x: Stream,
        norm: AnyNorm,
        multiply: Multiply,
        present: Bool[Array, "tokens"] | None,
        stacked: Int32[Array, ""] | None = None,
    ) -> Stream:
        """The sum of the experts' outputs, with their weights; x is not normed yet.

        Rows that are not present, and those behind the tokens, read no weights; None stands for
        all present.
        """
        x = x if norm is None else norm(x)
        present = jnp.ones(x.shape[0], bool) if present is None else present
        total = self.experts(x, self.router(x), present, stacked)
        if self.shared_expert is None:
            return total
        shared = self.shared_expert(x, None, multiply)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x) * shared
        return total + shared
