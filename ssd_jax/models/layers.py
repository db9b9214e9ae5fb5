"""Building blocks shared by every decoder family. Attribute names are the checkpoint's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Shaped
from typing_extensions import override

from ssd_jax.kernels.experts import groups as expert_groups
from ssd_jax.kernels.experts.api import ExpertWeight
from ssd_jax.kernels.experts.groups import ExpertGroups
from ssd_jax.kernels.linear.api import (
    W8A8,
    GroupQuantized,
    Packed,
    Quantized,
    ScaledSums,
    Weight,
    products,
    take,
)
from ssd_jax.kernels.linear.blocks import BLOCK
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.kinds import KINDS
from ssd_jax.kernels.linear.tiles import whole
from ssd_jax.kernels.rows import Norm, rms_norm, row_sum
from ssd_jax.models.mechanisms import XIELU_LARGEST, XIELU_SLOPE, Activation

Axes = tuple[str | None, ...]
Stream = Float32[Array, "n H"]
"""Hidden states of tokens: the residual stream, or its norm."""
Multiply = Callable[[jax.Array, Sequence[Weight], Norm | None], list[jax.Array]]
"""`products`, or a function that does the same with other types."""

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,  # by default JAX's is the approximation
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

"""Those that have no parameters."""

Layer = TypeVar("Layer", bound=nnx.Module)


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param:
    """A parameter, without an array yet, with its logical axis names (see `sharding.py`)."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


class XIELU(nnx.Module):
    """An activation with two parameters: x^2 grows above 0, and what exp(x) - 1 is more than x
    below."""

    def __init__(self) -> None:
        self.alpha_p = parameter((1,), (None,), jnp.dtype(jnp.float32))
        self.alpha_n = parameter((1,), (None,), jnp.dtype(jnp.float32))

    def __call__(self, x: Float32[Array, "*rows n"]) -> Float32[Array, "*rows n"]:
        """The activations of x. Source: https://arxiv.org/abs/2411.13010."""
        above = jax.nn.softplus(self.alpha_p[...])
        below = XIELU_SLOPE + jax.nn.softplus(self.alpha_n[...])
        curved = above * x * x, below * (jnp.expm1(jnp.minimum(x, XIELU_LARGEST)) - x)
        return jnp.where(x > 0, *curved) + XIELU_SLOPE * x


def stack(layer: Layer, depth: int) -> Layer:
    """A layer whose parameters, without arrays yet, are the stacked ones of `depth` layers."""
    graph, state = nnx.split(layer)

    def stack_struct(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((depth, *struct.shape), struct.dtype)

    return nnx.merge(graph, jax.tree.map(stack_struct, state))


class Matrix(nnx.Module):
    """A weight [out, in]; if it is int8, with a scale for each output, made at loading; or in
    groups of inputs, with their scales and minima."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype):
        self.weight = parameter(shape, axes, dtype)
        scales = parameter(shape[:-1], axes[:-1], jnp.dtype(jnp.float32))
        self.weight_scale = scales if dtype == jnp.int8 else None
        self.weight_minimum: nnx.Param | None = None
        self.shape = shape
        self.axes = axes
        self.kind: str | None = None
        self.form: GroupForm | None = None
        self.cache_resident = False  # see `Packed`
        self.digits = 2  # of an activation, if the weight is int8
        self.scaled_sums = False  # see `ScaledSums`

    def pack(self, kind: str) -> None:
        """Stores the weight in panels of a kind; to be called before there are arrays."""
        *experts, outputs, inputs = self.shape
        panels, panel_bytes = KINDS[kind].packed_shape(outputs, inputs)
        shape = (math.prod(experts) * panels, panel_bytes)
        self.weight = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.uint8), axes=(None, None))
        self.weight_scale = None
        self.kind = kind

    def group(self, form: GroupForm) -> None:
        """Stores the weight in groups of inputs; to be called before there are arrays."""
        value: Any = self.weight.get_value()
        (outputs, inputs), (output_axis, input_axis) = self.shape, self.axes
        stacked, groups = value.shape[:-2], inputs // form.group
        shape, axes = (*stacked, groups, outputs), (input_axis, output_axis)
        self.weight_scale = nnx.data(parameter(shape, axes, jnp.dtype(jnp.float32)))
        if form.minima:
            self.weight_minimum = nnx.data(parameter(shape, axes, jnp.dtype(jnp.float32)))
        shape, axes = (*stacked, groups, form.group, outputs), (input_axis, None, output_axis)
        self.weight = parameter(shape, axes, jnp.dtype(form.dtype))
        self.form = form

    def block(self) -> None:
        """Stores the weight in blocks of inputs; to be called before there are arrays."""
        value: Any = self.weight.get_value()
        shape = (*value.shape[:-2], self.shape[1] // BLOCK, self.shape[0], BLOCK)
        self.weight = parameter(shape, (*self.axes[::-1], None), value.dtype)

    def widen(self) -> None:
        """Stores the weight in whole tiles; to be called before there are arrays."""
        value: Any = self.weight.get_value()
        self.weight = parameter((*value.shape[:-1], whole(self.shape[1])), self.axes, value.dtype)

    @property
    def operand(self) -> Weight:
        """The weight as `products` takes it."""
        if self.kind is not None:
            panels: Any = self.weight.get_value()
            *_, outputs, inputs = self.shape
            return Packed(panels, self.kind, outputs, inputs, self.cache_resident)
        if self.weight_scale is None:
            return self.weight[...]
        if self.form is not None:
            minimum = self.weight_minimum
            minima = None if minimum is None else minimum[...]
            groups = ScaledSums if self.scaled_sums else GroupQuantized
            return groups(self.weight[...], self.weight_scale[...], minima)
        int8 = Quantized if self.digits == 2 else W8A8
        return int8(self.weight[...], self.weight_scale[...])


class ExpertMatrix(Matrix):
    """A weight [experts, out, in], one matrix of every expert, with optional biases."""

    def __init__(
        self, shape: tuple[int, int, int], axes: Axes, dtype: jnp.dtype, *, bias: bool = False
    ):
        super().__init__(shape, axes, dtype)
        self.device_outputs = shape[1]
        self.extra_inputs = self.extra_outputs = 0  # zeros behind the others
        self.bias = parameter(shape[:-1], axes[:-1], jnp.dtype(jnp.float32)) if bias else None

    @override
    def widen(self) -> None:
        """As of a `Matrix`, but of the model's channels, which are inputs or outputs."""
        value: Any = self.weight.get_value()
        *stacked, outputs, inputs = value.shape
        if self.axes[-1] == "embed":
            self.extra_inputs = whole(inputs) - inputs
        else:
            self.extra_outputs = whole(outputs) - outputs
        shape = (*stacked, outputs + self.extra_outputs, inputs + self.extra_inputs)
        self.weight = parameter(shape, self.axes, value.dtype)
        if self.weight_scale is not None:
            scales = parameter(shape[:-1], self.axes[:-1], jnp.dtype(jnp.float32))
            self.weight_scale = nnx.data(scales)

    def group_on(self, form: GroupForm, devices: tuple[int, int]) -> None:
        """Stores the weight in groups of inputs; to be called before there are arrays.

        Args:
          form: on a device (`expert_groups.device_form`).
          devices: that have different outputs, and different inputs.
        """
        value: Any = self.weight.get_value()
        (experts, outputs, inputs), axes = self.shape, (self.axes[0], self.axes[2], self.axes[1])
        self.device_outputs, on_device = outputs // devices[0], inputs // devices[1]
        columns = devices[0] * expert_groups.columns(self.device_outputs)
        kind = jnp.dtype(jnp.int32 if form.dtype == FLOAT4 else jnp.float32)

        def array(rows: int, dtype: jnp.dtype) -> nnx.Param:
            shape = (*value.shape[:-3], experts, devices[1] * rows, columns)
            return parameter(shape, axes, dtype)

        scale_rows = expert_groups.scale_rows(form, on_device)
        self.weight_scale = nnx.data(array(scale_rows, kind))
        if form.minima:
            self.weight_minimum = nnx.data(array(scale_rows, kind))
        dtype = jnp.dtype(jnp.int32 if form.bits == 4 else form.dtype)
        self.weight = array(expert_groups.rows(form, on_device), dtype)
        self.form = form

    @property
    @override
    def operand(self) -> ExpertWeight:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The weight as `expert_products` takes it."""
        if self.form is not None:
            scale, minimum = self.weight_scale, self.weight_minimum
            assert scale is not None
            minima = None if minimum is None else minimum[...]
            return ExpertGroups(
                self.weight[...], scale[...], minima, self.form.group, self.device_outputs
            )
        operand = super().operand
        assert not isinstance(operand, GroupQuantized)
        return operand


class Linear(Matrix):
    """y = x W^T + b."""

    def __init__(self, shape: tuple[int, int], axes: Axes, dtype: jnp.dtype, *, bias: bool = False):
        super().__init__(shape, axes, dtype)
        self.bias = parameter(shape[:1], axes[:1], jnp.dtype(jnp.float32)) if bias else None


class RMSNorm(nnx.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, axis: str | None, eps: float):
        self.weight = parameter((size,), (axis,), jnp.dtype(jnp.float32))
        self.eps = eps

    @property
    def operand(self) -> Norm:
        """The norm as `products` takes it."""
        return Norm(self.weight.get_value(), self.eps)

    def __call__(self, x: Float32[Array, "*rows size"]) -> Float32[Array, "*rows size"]:
        """Normalises x over its last axis."""
        return rms_norm(x, self.operand)


class LayerNorm(nnx.Module):
    """Norm to mean 0 and variance 1 over the last axis, with weights and perhaps biases."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, eps: float, *, bias: bool = True):
        self.weight = parameter(shape, axes, jnp.dtype(jnp.float32))
        self.bias = parameter(shape, axes, jnp.dtype(jnp.float32)) if bias else None
        self.eps = eps

    def __call__(self, x: Float32[Array, "*rows size"]) -> Float32[Array, "*rows size"]:
        """Normalises x over its last axis."""
        centred = x - row_sum(x) / x.shape[-1]
        normed = rms_norm(centred, Norm(self.weight[...], self.eps))
        return normed if self.bias is None else normed + self.bias[...]


AnyNorm = RMSNorm | LayerNorm | None


def normed_products(
    x: Float[Array, "n inputs"],
    weights: Sequence[Weight],
    norm: AnyNorm,
    multiply: Multiply = products,
) -> list[Float32[Array, "n _"]]:
    """x @ weight^T for each weight, with x normed first if a norm is given.

    Only a root-mean-square norm can be a part of the products.
    """
    if isinstance(norm, LayerNorm):
        return multiply(norm(x), weights, None)
    return multiply(x, weights, norm and norm.operand)


def linear(
    x: Float[Array, "n inputs"],
    layers: Sequence[Linear],
    multiply: Multiply = products,
    norm: AnyNorm = None,
) -> list[Float32[Array, "n _"]]:
    """Each layer's outputs of n rows, which are normed first if a norm is given."""
    ys = normed_products(x, [layer.operand for layer in layers], norm, multiply)
    return [
        y if layer.bias is None else y + layer.bias[...]
        for y, layer in zip(ys, layers, strict=True)
    ]


class Embedding(Matrix):
    """Token embeddings [vocab, hidden]; also the output head when tied."""

    def __init__(self, shape: tuple[int, int], dtype: jnp.dtype):
        super().__init__(shape, ("vocab", "embed"), dtype)

    def __call__(self, tokens: Int32[Array, "n"]) -> Float32[Array, "n H"]:
        """The embeddings of tokens.

        One token is looked up as two: for one, XLA would slice the whole table, which devices that
        share it would first have to gather.
        """
        rows = take(self.operand, pad_rows(tokens, 2))
        return rows[: tokens.shape[0], : self.shape[1]]


def soft_capped(x: Float32[Array, "*rows n"], cap: float | None) -> Float32[Array, "*rows n"]:
    """cap * tanh(x / cap), or x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def gated(
    gate: Float32[Array, "*rows n"],
    up: Float32[Array, "*rows n"],
    activation: Activation,
    limit: float | None = None,
) -> Float32[Array, "*rows n"]:
    """act(gate) * up; under a limit see `Mechanisms.gate_limit`."""
    act = ACTIVATIONS[activation]
    if limit is None:
        return act(gate) * up
    return act(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)


def pad_rows(x: Shaped[Array, "n ..."], rows: int) -> Shaped[Array, "padded ..."]:
    """x with zeros appended up to `rows`."""
    return jnp.pad(x, ((0, max(rows - x.shape[0], 0)), *((0, 0),) * (x.ndim - 1)))
