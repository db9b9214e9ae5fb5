"""What decoders do beyond the plain one: pre-norms, SwiGLU, RoPE of whole heads, full attention.

Each default is neutral: a decoder without a mechanism has the programs that it would have if there
were no such mechanism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

LayerKind = Literal["full", "nope", "window"]
"""Attention of a layer: to all earlier tokens, the same without RoPE, or to a window of them."""

NormPlacement = Literal["pre", "post", "both"]
"""Norms of what attention and the feed-forward read, of what they add, or of both."""

Activation = Literal["silu", "gelu_pytorch_tanh", "quick_gelu", "relu2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors.

    Attributes:
      embedding: of token embeddings.
      residual: of what attention and the feed-forward add to the residual stream.
      scores: of the products of queries and keys; None is head_dim ** -0.5.
      logits: of logits.
    """

    embedding: float = 1.0
    residual: float = 1.0
    scores: float | None = None
    logits: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """Mechanisms of a decoder; see the module.

    Attributes:
      rotary_dim: dimensions of a head that are rotated, the first ones; None is all.
      output_bias, mlp_bias: of the attention's output, and of all matrices of the feed-forward.
      joint_qk_norm: whether a norm of queries or keys, if there is one, spans all heads.
      norm_placement: see `NormPlacement`.
      layer_norm: whether norms subtract the mean and add a bias, except those of queries and keys.
      activation, gated: of the feed-forward, act(gate(x)) * up(x), or act(up(x)) if not gated.
      gate_limit: c, if it is act(min(gate(x), c)) * (clip(up(x), -c, c) + 1).
      layer_kinds: of each layer; empty is full attention everywhere.
      window: tokens that a query of a layer with a window sees, itself included.
      window_rope_theta: base of RoPE in layers with a window, unscaled; None is RoPE of the others.
      multipliers: see there.
      score_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap), for scores and logits.
      sinks: whether each query head has a score of a key without a value that every query sees.
    """

    rotary_dim: int | None = None
    output_bias: bool = False
    mlp_bias: bool = False
    joint_qk_norm: bool = False
    norm_placement: NormPlacement = "pre"
    layer_norm: bool = False
    activation: Activation = "silu"
    gated: bool = True
    gate_limit: float | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    window: int | None = None
    window_rope_theta: float | None = None
    multipliers: Multipliers = Multipliers()
    score_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sinks: bool = False

    @property
    def widest_window(self) -> int | None:
        """Most tokens that a query of any layer sees; None if some layer sees all."""
        return self.window if {*self.layer_kinds} == {"window"} else None

    def kind(self, layer: int) -> LayerKind:
        """Attention of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else "full"

    def of_layers(self, layers: Sequence[int]) -> Mechanisms:
        """Those of a decoder that consists of these layers."""
        kinds = tuple(self.layer_kinds[layer] for layer in layers) if self.layer_kinds else ()
        return dataclasses.replace(self, layer_kinds=kinds)

    def to_json(self) -> dict[str, Any]:
        """What is not neutral, as plain JSON values."""
        plain = dataclasses.asdict(PLAIN)
        values = dataclasses.asdict(self) | {"layer_kinds": [*self.layer_kinds]}
        return {name: value for name, value in values.items() if value not in (plain[name], [])}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Mechanisms:
        """Reads what `to_json` wrote.

        Raises:
          TypeError: there is an unknown name, or a value of another type.
        """
        kinds, multipliers = values.get("layer_kinds", ()), values.get("multipliers", {})
        read = {"layer_kinds": tuple(kinds), "multipliers": Multipliers(**multipliers)}
        return cls(**{**values, **read})


PLAIN = Mechanisms()
"""No mechanism."""
