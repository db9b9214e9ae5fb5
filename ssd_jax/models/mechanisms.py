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

Activation = Literal["silu", "gelu_pytorch_tanh", "quick_gelu", "relu2", "xielu"]

XIELU_SLOPE, XIELU_LARGEST = 0.5, -1e-6
"""Of `xielu`: its slope at 0, and the largest x whose exponential is taken."""

Scoring = Literal["softmax", "sigmoid"]
"""What makes weights of a router's logits."""


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
class Experts:
    """A feed-forward of many gated ones, the experts, of which a router chooses some for a token.

    A token adds the sum of what its experts give, each times its weight.

    Attributes:
      count: experts of a layer.
      chosen: experts of a token: those with the largest logits, the first of equal ones.
      intermediate: channels of an expert.
      scoring: weights are the softmax of the logits of all experts, or their sigmoids.
      normalized: whether the weights of a token's experts are divided by their sum.
      scale: of the weights, in the end.
      correction: whether the choice, but no weight, is by these weights with biases.
      router_bias, biases: of the router's logits, and of all matrices of experts.
      shared: channels of an expert that sees every token, with weight 1; 0 is none.
      shared_gate: whether its weight is the sigmoid of a product with a vector instead.
      dense_layers: layers with a usual feed-forward.
    """

    count: int
    chosen: int
    intermediate: int
    scoring: Scoring = "softmax"
    normalized: bool = True
    scale: float = 1.0
    correction: bool = False
    router_bias: bool = False
    biases: bool = False
    shared: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()

    def of_layers(self, layers: Sequence[int]) -> Experts | None:
        """Those of a decoder that consists of these layers; None if none of them has experts."""
        dense = tuple(i for i, layer in enumerate(layers) if layer in self.dense_layers)
        return None if len(dense) == len(layers) else dataclasses.replace(self, dense_layers=dense)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """Mechanisms of a decoder; see the module.

    Attributes:
      rotary_dim: dimensions of a head that are rotated, the first ones; None is all.
      output_bias, mlp_bias: of the attention's output, and of all matrices of the feed-forward.
      joint_qk_norm: whether a norm of queries or keys, if there is one, spans all heads.
      head_qk_norm: whether it subtracts the mean of a head, and has weights for each head.
      late_qk_norm: whether it is behind RoPE.
      norm_placement: see `NormPlacement`.
      parallel: whether the feed-forward reads what attention reads, of which it has the norm, and
        not what attention has added to.
      layer_norm: whether norms subtract the mean, except those of queries and keys.
      norm_bias: whether these norms add a bias.
      activation, gated: of the feed-forward, act(gate(x)) * up(x), or act(up(x)) if not gated.
      gate_limit: c, if it is act(min(gate(x), c)) * (clip(up(x), -c, c) + 1).
      layer_kinds: of each layer; empty is full attention everywhere.
      window: tokens that a query of a layer with a window sees, itself included.
      window_rope_theta: base of RoPE in layers with a window, unscaled; None is RoPE of the others.
      multipliers: see there.
      score_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap), for scores and logits.
      sinks: whether each query head has a score of a key without a value that every query sees.
      experts: in place of the feed-forward; None is none.
    """

    rotary_dim: int | None = None
    output_bias: bool = False
    mlp_bias: bool = False
    joint_qk_norm: bool = False
    head_qk_norm: bool = False
    late_qk_norm: bool = False
    norm_placement: NormPlacement = "pre"
    parallel: bool = False
    layer_norm: bool = False
    norm_bias: bool = True
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
    experts: Experts | None = None

    @property
    def widest_window(self) -> int | None:
        """Most tokens that a query of any layer sees; None if some layer sees all."""
        return self.window if {*self.layer_kinds} == {"window"} else None

    def kind(self, layer: int) -> LayerKind:
        """Attention of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else "full"

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def of_layers(self, layers: Sequence[int]) -> Mechanisms:
        """Those of a decoder that consists of these layers."""
        kinds = tuple(self.layer_kinds[layer] for layer in layers) if self.layer_kinds else ()
        experts = self.experts and self.experts.of_layers(layers)
        return dataclasses.replace(self, layer_kinds=kinds, experts=experts)

    def to_json(self) -> dict[str, Any]:
        """What is not neutral, as plain JSON values."""
        plain = dataclasses.asdict(PLAIN)
        values: dict[str, Any] = dataclasses.asdict(self) | {"layer_kinds": [*self.layer_kinds]}
        if self.experts is not None:
            dense = {"dense_layers": [*self.experts.dense_layers]}
            values["experts"] = dataclasses.asdict(self.experts) | dense
        return {name: value for name, value in values.items() if value not in (plain[name], [])}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Mechanisms:
        """Reads what `to_json` wrote.

        Raises:
          TypeError: there is an unknown name, or a value of another type.
        """
        kinds, multipliers = values.get("layer_kinds", ()), values.get("multipliers", {})
        read = {"layer_kinds": tuple(kinds), "multipliers": Multipliers(**multipliers)}
        if experts := values.get("experts"):
            dense = tuple(experts.get("dense_layers", ()))
            read["experts"] = Experts(**{**experts, "dense_layers": dense})
        return cls(**{**values, **read})


PLAIN = Mechanisms()
"""No mechanism."""
