"""Whole sequences through the decoder, without pages: for training, and for scoring given text.

The modules and the arithmetic are the engine's; what differs is attention, which here is between
the tokens of one array, and that everything can be differentiated. Several texts may share a row
(packing): a token sees only earlier tokens of its own segment.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ssd_jax.models import rope
from ssd_jax.models.decoder import MLP, Attention, CausalLM, DecoderLayer
from ssd_jax.models.layers import Linear, Matrix, RMSNorm, product
from ssd_jax.models.quantized import Quantized
from ssd_jax.models.sequence_attention import causal_attention

_BLOCK_ROWS = 64


class _Pass(NamedTuple):
    """What every layer needs to know of the tokens being run."""

    visible: jax.Array  # [B, T, T] bool, whether the first sees the second
    cos: jax.Array  # [B, T, 1, head_dim / 2] float32
    sin: jax.Array


def sequence_hidden(
    model: CausalLM,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    *,
    compute: jnp.dtype | None = None,
    rematerialise: bool = False,
) -> jax.Array:
    """Hidden states of packed texts.

    Args:
      model: its weights may be wider than `compute`: they are cast where they are used, and their
        gradients have their own type.
      tokens, positions, segments: [B, T] int32. A position counts from the start of its text and
        only rotates; equal segments in a row are one text, whose tokens lie in order.
      compute: dtype of products and of attention's operands; by default the weights' own. The
        residual stream, norms, softmax and sums are float32.
      rematerialise: for gradients, keep only what enters a layer and run it again.

    Returns: [B, T, hidden] float32, before the final norm (see `sequence_logits`).
    """
    batch, length = tokens.shape
    frequencies = rope.inverse_frequencies(model.config)
    earlier = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    same = segments[:, :, None] == segments[:, None, :]
    step = _Pass(same & earlier, *rope.rotation(positions, frequencies))
    x = model.model.embed_tokens(tokens.reshape(-1)).reshape(batch, length, -1)
    layers = model.model.layers
    layer_type = None if compute is None else jnp.dtype(compute).name
    run = jax.checkpoint(_layer, static_argnums=(0, 1)) if rematerialise else _layer
    if isinstance(layers, nnx.List):
        for layer in layers:
            graph, state = nnx.split(layer)
            x = run(graph, layer_type, state, x, step)
        return x
    graph, state = nnx.split(layers)
    return jax.lax.scan(lambda x, own: (run(graph, layer_type, own, x, step), None), x, state)[0]


def sequence_logits(
    model: CausalLM, hidden: jax.Array, *, compute: jnp.dtype | None = None
) -> jax.Array:
    """Final norm and output head: hidden [n, hidden] float32 -> [n, rows of the head] float32."""
    head: Matrix = model.model.embed_tokens if model.lm_head is None else model.lm_head
    return _product(model.model.norm(hidden), head.rows, compute)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(
    graph: nnx.GraphDef[DecoderLayer],
    compute: str | None,
    state: nnx.State,
    x: jax.Array,
    step: _Pass,
) -> jax.Array:
    """One layer on x [B, T, hidden] float32, the residual stream; traced once for all layers."""
    layer = nnx.merge(graph, state)
    dtype = None if compute is None else jnp.dtype(compute)
    x = x + _attend(layer.self_attn, layer.input_layernorm(x), step, dtype)
    return x + _feed_forward(layer.mlp, layer.post_attention_layernorm(x), dtype)


def _attend(
    attention: Attention, x: jax.Array, step: _Pass, compute: jnp.dtype | None
) -> jax.Array:
    batch, length, _ = x.shape

    def heads(projection: Linear, norm: RMSNorm | None = None) -> jax.Array:
        split = _linear(projection, x, compute).reshape(batch, length, -1, attention.head_dim)
        return split if norm is None else norm(split)

    q = rope.rotate(heads(attention.q_proj, attention.q_norm), step.cos, step.sin)
    k = rope.rotate(heads(attention.k_proj, attention.k_norm), step.cos, step.sin)
    v = heads(attention.v_proj)
    dtype = attention.floating if compute is None else compute
    attended = causal_attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), step.visible)
    return _linear(attention.o_proj, attended.reshape(batch, length, -1), compute)


def _feed_forward(mlp: MLP, x: jax.Array, compute: jnp.dtype | None) -> jax.Array:
    gate, up = _linear(mlp.gate_proj, x, compute), _linear(mlp.up_proj, x, compute)
    return _linear(mlp.down_proj, jax.nn.silu(gate) * up, compute)


def _linear(linear: Linear, x: jax.Array, compute: jnp.dtype | None) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    y = _product(rows, linear.rows, compute)
    y = y if linear.bias is None else y + linear.bias[...]
    return y.reshape(*x.shape[:-1], -1)


def _product(
    x: jax.Array, weight: jax.Array | Quantized, compute: jnp.dtype | None = None
) -> jax.Array:
    """`layers.product` with the weight cast to `compute`; its gradient is computed in it too."""
    if isinstance(weight, Quantized):
        return product(x, weight)
    return narrow_product(x, weight, weight.dtype if compute is None else compute)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def narrow_product(x: jax.Array, weight: jax.Array, compute: jnp.dtype) -> jax.Array:
    """x [n, in] @ weight [out, in]^T -> [n, out] float32, with operands of type `compute`.

    So are the operands of both its gradients (those that JAX derives would be float32 products);
    sums are float32, and a gradient has the type of what it is of.
    """
    return product(x, weight.astype(compute))


def _narrow_forward(x: jax.Array, weight: jax.Array, compute: jnp.dtype):
    narrow = x.astype(compute), weight.astype(compute)
    kinds = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    return product(*narrow), (*narrow, *kinds)


def _narrow_backward(compute: jnp.dtype, kept, cotangent: jax.Array):
    x, weight, x_kind, weight_kind = kept
    g = cotangent.astype(compute)
    grad_x = _matmul(g, weight)
    grad_weight = _matmul(_transposed(g), x)  # not the result transposed: XLA on CPU then fails
    return grad_x.astype(x_kind.dtype), grad_weight.astype(weight_kind.dtype)


narrow_product.defvjp(_narrow_forward, _narrow_backward)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    contract = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
    """x^T, for a product over the rows of x."""
    if x.dtype != jnp.bfloat16:
        return x.T
    return jax.lax.platform_dependent(x, cpu=_transposed_by_blocks, default=jnp.transpose)


def _transposed_by_blocks(x: jax.Array) -> jax.Array:
    """x^T [columns, n] as an array of its own, made some rows at a time.

    XLA on CPU folds a transposition into the product that takes it, and widens a bfloat16 product
    with its first operand transposed to float32, at a seventh of the speed (JAX 0.10.2). It does
    not see through a loop, and rows at a time stay in the cache. Bits, since it would widen a
    bfloat16 update, too.
    """
    rows = next(size for size in (_BLOCK_ROWS, x.shape[0]) if x.shape[0] % size == 0)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).reshape(-1, rows, x.shape[1])

    def put(transposed: jax.Array, block: tuple[jax.Array, jax.Array]):
        index, part = block
        return jax.lax.dynamic_update_slice(transposed, part.T, (0, index * rows)), None

    start = jnp.zeros((x.shape[1], x.shape[0]), jnp.uint16)
    filled, _ = jax.lax.scan(put, start, (jnp.arange(bits.shape[0]), bits))
    return jax.lax.bitcast_convert_type(filled, x.dtype)
