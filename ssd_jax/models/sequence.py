"""Whole sequences through the decoder, without pages: for training, and for scoring given text.

Modules and arithmetic are the engine's, but attention is between the tokens of one array, and
everything is differentiable. Several texts may share a row (packing): a token sees itself and
earlier tokens of its own segment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from ssd_jax.kernels.linear.api import GroupQuantized, Packed, Quantized, Weight, products
from ssd_jax.kernels.linear.xla import product
from ssd_jax.kernels.precision import precision
from ssd_jax.kernels.rows import Norm, rms_norm
from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from ssd_jax.models.decoder import CausalLM
from ssd_jax.models.decoder_layer import DecoderLayer
from ssd_jax.models.layer_kinds import attention_variant
from ssd_jax.models.layers import Stream
from ssd_jax.models.rope import Rotation, rotations
from ssd_jax.models.sequence_attention import causal_attention

_BLOCK_ROWS = 64

Graph = nnx.GraphDef[DecoderLayer]


class LayerVisibility(NamedTuple):
    """What tokens see in a layer; see `causal_attention`."""

    visible: Bool[Array, "B T T"]
    positions: Int32[Array, "B T"]
    variant: AttentionVariant


def sequence_hidden(
    model: CausalLM,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    segments: Int32[Array, "B T"],
    *,
    compute: jnp.dtype | None = None,
    rematerialise: bool = False,
) -> Float32[Array, "B T H"]:
    """Hidden states of packed texts, before the final norm (see `sequence_logits`).

    Args:
      model: its weights may be wider than `compute`; they are cast where they are used, and their
        gradients keep the weights' dtype.
      positions: counted from the start of a token's own text; used only for RoPE.
      segments: equal numbers in a row are one text, whose tokens are in order.
      compute: dtype of products and of attention's operands; by default the weights' own. The
        residual stream, norms, softmax and sums are float32.
      rematerialise: for gradients, keep only the inputs of layers and run the layers again.

    Raises:
      ValueError: `compute` is given for a model with experts, whose weights are not cast, and which
        has no gradients.
    """
    if compute is not None and model.config.mechanisms.experts is not None:
        raise ValueError(f"compute = {compute} for a model with experts")
    earlier = jnp.tri(tokens.shape[1], dtype=bool)
    visible = (segments[:, :, None] == segments[:, None, :]) & earlier
    ropes = rotations(model.config, positions)
    run_layer = jax.checkpoint(_layer, static_argnums=(0, 1)) if rematerialise else _layer

    def run(x: jax.Array, graph: Graph, state: nnx.State, index: int | jax.Array) -> jax.Array:
        visibility = LayerVisibility(visible, positions, attention_variant(model.config, index))
        return run_layer(graph, compute, state, x, visibility, ropes.of(index))

    def unroll(x: jax.Array, layers: nnx.List[DecoderLayer], first: int) -> jax.Array:
        for index, layer in enumerate(layers, start=first):
            x = run(x, *nnx.split(layer), index)
        return x

    def scan(x: jax.Array, layers: DecoderLayer, first: int) -> jax.Array:
        graph, state = nnx.split(layers)
        numbers = jnp.arange(first, model.config.num_layers)
        return jax.lax.scan(lambda x, of: (run(x, graph, *of), None), x, (state, numbers))[0]

    x = model.embed(tokens.reshape(-1))
    for first, layers in model.model.parts:
        x = unroll(x, layers, first) if isinstance(layers, nnx.List) else scan(x, layers, first)
    return x.reshape(*tokens.shape, -1)


def sequence_logits(
    model: CausalLM, hidden: Stream, *, compute: jnp.dtype | None = None
) -> Float32[Array, "n outputs"]:
    """Logits of hidden states: final norm and output head."""
    return model.logits(hidden, functools.partial(_products, compute=compute))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(
    graph: Graph,
    compute: jnp.dtype | None,
    state: nnx.State,
    x: Stream,
    visibility: LayerVisibility,
    rope: Rotation,
) -> Stream:
    """One layer, traced once for all layers; x is the residual stream."""
    layer = nnx.merge(graph, state)
    dtype = layer.self_attn.execution.floating if compute is None else compute
    visibility = visibility._replace(variant=layer.self_attn.with_sinks(visibility.variant))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        return causal_attention(
            q.astype(dtype), k.astype(dtype), v.astype(dtype), *visibility
        ), None

    return layer(x, rope, attend, functools.partial(_products, compute=compute))[0]


def _products(
    x: Float32[Array, "n inputs"],
    weights: Sequence[Weight],
    norm: Norm | None = None,
    *,
    compute: jnp.dtype | None = None,
) -> list[Float32[Array, "n _"]]:
    """`products` with the weights cast to `compute`, in which gradients are computed too."""
    floating = [
        weight for weight in weights if not isinstance(weight, Quantized | GroupQuantized | Packed)
    ]
    if not floating:
        return products(x, weights, norm)
    x = x if norm is None else rms_norm(x, norm)
    return [narrow_product(x, w, w.dtype if compute is None else compute) for w in floating]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def narrow_product(
    x: Float[Array, "n inputs"], weight: Float[Array, "outputs inputs"], compute: jnp.dtype
) -> Float32[Array, "n outputs"]:
    """x @ weight^T, with operands of type `compute`.

    The operands of both gradients have this type too (JAX would derive float32 products); sums are
    float32, and each gradient has the dtype of its argument.
    """
    return product(x, weight.astype(compute))


def _narrow_forward(x: jax.Array, weight: jax.Array, compute: jnp.dtype) -> Any:
    narrow = x.astype(compute), weight.astype(compute)
    dtypes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    return product(*narrow), (*narrow, *dtypes)


def _narrow_backward(compute: jnp.dtype, residuals, cotangent: jax.Array):
    x, weight, x_dtype, weight_dtype = residuals
    g = cotangent.astype(compute)
    grad_x = _matmul(g, weight)
    grad_weight = _matmul(_transpose(g), x)  # transposing the result instead fails in XLA on CPU
    return grad_x.astype(x_dtype.dtype), grad_weight.astype(weight_dtype.dtype)


narrow_product.defvjp(_narrow_forward, _narrow_backward)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot(a, b, precision=precision(a, b), preferred_element_type=jnp.float32)


def _transpose(x: jax.Array) -> jax.Array:
    """x^T, for a product over the rows of x."""
    if x.dtype != jnp.bfloat16:
        return x.T
    return jax.lax.platform_dependent(x, cpu=_transpose_by_blocks, default=jnp.transpose)


def _transpose_by_blocks(x: jax.Array) -> jax.Array:
    """x^T [columns, n] as a separate array, made a few rows at a time.

    XLA on CPU folds a transposition into the product that takes it, and widens a bfloat16 product
    whose first operand is transposed to float32, at a seventh of the speed (JAX 0.10.2). It does
    not see through a loop of two steps or more, and a few rows at a time stay in the cache. The
    loop moves bits, since XLA would widen a bfloat16 update too.
    """
    count, columns = x.shape
    rows = min(_BLOCK_ROWS, -(-count // 2))
    blocks = max(2, -(-count // rows))
    bits = jnp.pad(
        jax.lax.bitcast_convert_type(x, jnp.uint16), ((0, blocks * rows - count), (0, 0))
    ).reshape(blocks, rows, columns)

    def put_block(transposed: jax.Array, block: tuple[jax.Array, jax.Array]):
        index, rows_of_block = block
        return jax.lax.dynamic_update_slice(transposed, rows_of_block.T, (0, index * rows)), None

    start = jnp.zeros((columns, blocks * rows), jnp.uint16)
    transposed, _ = jax.lax.scan(put_block, start, (jnp.arange(blocks), bits))
    return jax.lax.bitcast_convert_type(transposed[:, :count], x.dtype)
