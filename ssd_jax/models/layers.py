"""Building blocks shared by every decoder family. Attribute names are the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ssd_jax.kernels.rows import row_sum
from ssd_jax.models.quantized import Quantized, digits, integer_product, take

Axes = tuple[str | None, ...]
Weight = Float[Array, "outputs inputs"] | Quantized
Multiply = Callable[[jax.Array, Weight], jax.Array]
"""`product`, or what does the same with other types."""


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param:
    """A parameter with its logical axis names (see `sharding.py`); built under `eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def product(x: Float[Array, "n inputs"], weight: Weight) -> Float32[Array, "n outputs"]:
    """x @ weight^T, with x cast to the weight's dtype and the sum accumulated in float32.

    For a quantised weight, x is quantised by row and the sum is of integers; products that share x
    share its quantised form, which the compiler computes once.
    """
    if isinstance(weight, Quantized):
        return integer_product(digits(x), weight)
    contract_in = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(weight.dtype), weight, contract_in, preferred_element_type=jnp.float32
    )


class Matrix(nnx.Module):
    """A weight [out, in]; an int8 one has a scale for each output, made when it is loaded."""

    def __init__(self, shape: tuple[int, int], axes: Axes, dtype: jnp.dtype):
        self.weight = parameter(shape, axes, dtype)
        scales = parameter(shape[:1], axes[:1], jnp.dtype(jnp.float32))
        self.weight_scale = scales if dtype == jnp.int8 else None

    @property
    def rows(self) -> Weight:
        """The weight as `product` takes it."""
        if self.weight_scale is None:
            return self.weight[...]
        return Quantized(self.weight[...], self.weight_scale[...])


class Linear(Matrix):
    """y = x W^T + b."""

    def __init__(self, shape: tuple[int, int], axes: Axes, dtype: jnp.dtype, *, bias: bool = False):
        super().__init__(shape, axes, dtype)
        self.bias = parameter(shape[:1], axes[:1], jnp.dtype(jnp.float32)) if bias else None

    def __call__(
        self, x: Float[Array, "n inputs"], multiply: Multiply = product
    ) -> Float32[Array, "n outputs"]:
        """The outputs of n rows."""
        y = multiply(x, self.rows)
        return y if self.bias is None else y + self.bias[...]


class Embedding(Matrix):
    """Token embeddings [vocab, hidden]; also the output head when tied."""

    def __init__(self, shape: tuple[int, int], dtype: jnp.dtype):
        super().__init__(shape, ("vocab", "embed"), dtype)

    def __call__(self, tokens: Int32[Array, "n"]) -> Float32[Array, "n H"]:
        """The rows of some tokens."""
        rows = self.rows
        if isinstance(rows, Quantized):
            return take(rows, tokens)
        return rows[tokens].astype(jnp.float32)


class RMSNorm(nnx.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, axis: str | None, eps: float):
        self.weight = parameter((size,), (axis,), jnp.dtype(jnp.float32))
        self.eps = eps

    def __call__(self, x: Float32[Array, "*rows size"]) -> Float32[Array, "*rows size"]:
        """Over the last axis."""
        scale = jax.lax.rsqrt(row_sum(jnp.square(x)) / x.shape[-1] + self.eps)
        return x * scale * self.weight[...]


def pad_rows(x: Shaped[Array, "n ..."], rows: int) -> Shaped[Array, "padded ..."]:
    """x with zeros appended up to `rows`."""
    return jnp.pad(x, ((0, max(rows - x.shape[0], 0)), *((0, 0),) * (x.ndim - 1)))
