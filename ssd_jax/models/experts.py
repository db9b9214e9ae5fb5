"""A feed-forward of experts, of which a router chooses some for each token."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.experts.api import expert_products, product_by_rows
from ssd_jax.kernels.experts.estimate import expected_experts, expected_share
from ssd_jax.kernels.linear.tiles import widen
from ssd_jax.kernels.rows import row_sum
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import ExpertMatrix, gated, parameter
from ssd_jax.models.mechanisms import Activation, Experts

_LEAST_SUM = 1e-20  # that weights are divided by

_FLOAT32 = jnp.dtype(jnp.float32)
_NONE = -1  # the expert of choices that do not count


class Routing(NamedTuple):
    """The experts of tokens, and their weights."""

    experts: Int32[Array, "n chosen"]
    weights: Float32[Array, "n chosen"]


class _Use(NamedTuple):
    """What a device is expected to have of what tokens choose: the number of experts, and the part
    of all choices."""

    experts: float
    share: float


class Router(nnx.Module):
    """Chooses the experts of tokens, in float32."""

    def __init__(self, config: ModelConfig, experts: Experts):
        shape, axes = (experts.count, config.hidden_size), (None, "embed")
        self.weight = parameter(shape, axes, _FLOAT32)
        bias, correction = (
            parameter(shape[:1], axes[:1], _FLOAT32) if has_parameter else None
            for has_parameter in (experts.router_bias, experts.correction)
        )
        self.bias = bias
        self.e_score_correction_bias = correction
        self.experts = experts

    def __call__(self, x: Float32[Array, "n H"]) -> Routing:
        """The experts of normed tokens; see `Experts`."""
        logits = product_by_rows(x, self.weight[...])
        if self.bias is not None:
            logits = logits + self.bias[...]
        softmax = self.experts.scoring == "softmax"
        scores = logits if softmax else jax.nn.sigmoid(logits)
        preference = scores
        if self.e_score_correction_bias is not None:
            scores = _softmax(logits) if softmax else scores
            preference = scores + self.e_score_correction_bias[...]
        _, chosen = jax.lax.top_k(preference, self.experts.chosen)
        if softmax:
            scores = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if self.experts.normalized:
            weights = weights / (row_sum(weights) + _LEAST_SUM)
        elif softmax:
            weights = weights / row_sum(scores)
        return Routing(chosen, weights * self.experts.scale)


class ExpertMatrices(nnx.Module):
    """The matrices of all experts of a layer."""

    def __init__(self, config: ModelConfig, execution: Execution, experts: Experts):
        up_shape = (experts.count, experts.intermediate, config.hidden_size)
        down_shape = (experts.count, config.hidden_size, experts.intermediate)
        up_axes, down_axes = ("experts", "expert_ffn", "embed"), ("experts", "embed", "expert_ffn")
        dtype, bias = execution.compute, experts.biases
        self.gate_proj = ExpertMatrix(up_shape, up_axes, dtype, bias=bias)
        self.up_proj = ExpertMatrix(up_shape, up_axes, dtype, bias=bias)
        self.down_proj = ExpertMatrix(down_shape, down_axes, dtype, bias=bias)
        self.activation: Activation = config.mechanisms.activation
        self.gate_limit = config.mechanisms.gate_limit
        self.count = experts.count
        self.chosen = experts.chosen
        self.shards = execution.expert_shards
        self.backend = execution.experts

    def __call__(
        self,
        x: Float32[Array, "n H"],
        routing: Routing,
        present: Bool[Array, "tokens"],
        layer: Int32[Array, ""] | None = None,
    ) -> Float32[Array, "n H"]:
        """The weighted sum of what each token's experts give: down(act(gate(x)) * up(x)).

        Tokens that are not present, and rows behind all tokens, give zeros, and read no weights.
        `layer` is given where the weights are those of several layers; see `expert_products`.
        """
        devices = self.shards.devices if self.shards is not None and self.shards.by_expert else 1
        chosen = self.count, present.shape[0], self.chosen, devices
        use = _Use(expected_experts(*chosen), expected_share(*chosen))
        padding = x.shape[0] - present.shape[0]
        if padding:
            # A program has as many items, or turns of a loop, as rows may have experts.
            x, routing = jax.tree.map(lambda array: array[: len(present)], (x, routing))
        total = self._total(use, x, routing, present, layer)
        return jnp.pad(total, ((0, padding), (0, 0))) if padding else total

    def _total(
        self,
        use: _Use,
        x: Float32[Array, "n H"],
        routing: Routing,
        present: Bool[Array, "n"],
        layer: Int32[Array, ""] | None,
    ) -> Float32[Array, "n H"]:
        """The weighted sum of all tokens, over all devices."""
        experts = jnp.where(present[:, None], routing.experts, _NONE)
        layers = () if layer is None else (layer,)
        if self.shards is None:
            return self._sum(use, x, experts, routing.weights, *layers)
        graph, state = nnx.split(self)
        variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        weights, structure = jax.tree.flatten(state)

        def of_device(weights: list[jax.Array], *arrays: jax.Array) -> jax.Array:
            return nnx.merge(graph, jax.tree.unflatten(structure, weights))._sum(use, *arrays)

        axes = [
            (None,) * (weight.ndim - len(variable.axes)) + variable.axes  # of several layers
            for weight, variable in zip(weights, variables, strict=True)
        ]
        return self.shards.add(of_device, weights, axes, x, experts, routing.weights, *layers)

    def _sum(
        self,
        use: _Use,
        x: Float32[Array, "n H"],
        experts: Int32[Array, "n chosen"],
        weights: Float32[Array, "n chosen"],
        layer: Int32[Array, ""] | None = None,
    ) -> Float32[Array, "n H"]:
        """The sum over those experts, and those of their channels, that the device has."""
        count = self.count
        if self.shards is not None and self.shards.by_expert:
            count //= self.shards.devices
            experts = experts - self.shards.device * count
        here = (experts >= 0) & (experts < count)
        experts = jnp.where(here, experts, count)
        order, place, group_sizes = _sorted(experts, count)
        rows, expert = order // experts.shape[1], experts.reshape(-1)[order]
        multiply = partial(self._linear, expert, group_sizes, layer, use)
        gate, up = multiply(x[rows], [self.gate_proj, self.up_proj])
        inner = gated(gate, up, self.activation, self.gate_limit)
        [down] = multiply(inner, [self.down_proj])
        return _weighted_sum(down[place], jnp.where(here, weights, 0))

    def _linear(
        self,
        expert: Int32[Array, "m"],
        group_sizes: Int32[Array, "E"],
        layer: Int32[Array, ""] | None,
        use: _Use,
        x: Float32[Array, "m inputs"],
        matrices: list[ExpertMatrix],
    ) -> list[Float32[Array, "m _"]]:
        ys = expert_products(
            widen(x, x.shape[1] + matrices[0].extra_inputs),
            group_sizes,
            [matrix.operand for matrix in matrices],
            backend=self.backend,
            layer=layer,
            used=use.experts,
            share=use.share,
        )

        def finished(y: jax.Array, matrix: ExpertMatrix) -> jax.Array:
            y = y[:, : y.shape[1] - matrix.extra_outputs]
            return y if matrix.bias is None else y + self._bias(matrix)[expert]

        return list(map(finished, ys, matrices))

    def _bias(self, matrix: ExpertMatrix) -> Float32[Array, "E outputs"]:
        """The biases that the device adds: of several with the same outputs, one does."""
        assert matrix.bias is not None
        bias = matrix.bias[...]
        if self.shards is None or self.shards.by_expert or matrix is not self.down_proj:
            return bias
        return jnp.where(self.shards.device == 0, bias, 0)


class SharedGate(nnx.Module):
    """The weight of the expert that sees every token, in float32."""

    def __init__(self, config: ModelConfig):
        self.weight = parameter((1, config.hidden_size), (None, "embed"), _FLOAT32)

    def __call__(self, x: Float32[Array, "n H"]) -> Float32[Array, "n 1"]:
        """The sigmoid of a product of normed tokens with a vector."""
        return jax.nn.sigmoid(product_by_rows(x, self.weight[...]))


def _softmax(logits: Float32[Array, "n E"]) -> Float32[Array, "n E"]:
    exponentials = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return exponentials / row_sum(exponentials)


def _sorted(
    experts: Int32[Array, "n chosen"], count: int
) -> tuple[Int32[Array, "m"], Int32[Array, "n chosen"], Int32[Array, "E"]]:
    """Choices in the order of their experts; of expert `count`, which there is not, they are last.

    Returns: the choice of each row of this order, the row of each choice, and rows of each expert.
    """
    keys = experts.reshape(-1)
    choices = jnp.arange(keys.shape[0], dtype=jnp.int32)
    _, order = jax.lax.sort((keys, choices), num_keys=1, is_stable=True)
    _, place = jax.lax.sort((order, choices), num_keys=1)
    group_sizes = jnp.sum(keys[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    return order, place.reshape(experts.shape), group_sizes


def _weighted_sum(
    parts: Float32[Array, "n chosen H"], weights: Float32[Array, "n chosen"]
) -> Float32[Array, "n H"]:
    """The sum over a token's choices, the first before the second and so on."""
    parts = parts * weights[:, :, None]
    # Else a product may or may not be contracted with the addition.
    parts = jnp.where(jnp.isnan(parts), jnp.nan, parts)
    total = parts[:, 0]
    for choice in range(1, parts.shape[1]):
        total = total + parts[:, choice]
    return total
