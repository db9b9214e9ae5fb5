"""The decoder of the llama, qwen2 and qwen3 families, readable top to bottom.

Attribute names spell the checkpoint's tensor names (`model.layers.0.self_attn.q_proj.weight`), so
loading needs no table. Tokens of all rows are flattened to [n, hidden] for the products and take
their [B, R] shape back for attention.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.tree_attention import tree_attention
from ssd_jax.models import rope
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import Embedding, Linear, RMSNorm, pad_rows, product

Pages = tuple[jax.Array, jax.Array]
"""One layer's key and value pages, each [pages, kv_heads, page_size, head_dim]."""


class Step(NamedTuple):
    """What every layer needs to know of the tokens being run."""

    positions: jax.Array  # [B, R] int32; outside the pages: not written
    visible: jax.Array  # [B, R] int32
    page_table: kv_pages.PageTable  # [B, P] int32 or Contiguous
    cos: jax.Array  # [B, R, 1, head_dim / 2] float32
    sin: jax.Array


class Attention(nnx.Module):
    """Grouped-query self-attention over pages, with optional q/k norm and q/k/v bias."""

    def __init__(self, config: ModelConfig, execution: Execution):
        c, dtype, size = config, execution.compute, config.head_dim
        q, kv, bias = c.num_heads * size, c.num_kv_heads * size, c.qkv_bias
        self.q_proj = Linear((q, c.hidden_size), ("heads", "embed"), dtype, bias=bias)
        self.k_proj = Linear((kv, c.hidden_size), ("kv_heads", "embed"), dtype, bias=bias)
        self.v_proj = Linear((kv, c.hidden_size), ("kv_heads", "embed"), dtype, bias=bias)
        self.o_proj = Linear((c.hidden_size, q), ("embed", "heads"), dtype)
        self.q_norm = RMSNorm(size, None, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(size, None, c.rms_norm_eps) if c.qk_norm else None
        self.head_dim = size
        self.backend = execution.attention
        self.floating = execution.floating

    def __call__(self, x: jax.Array, pages: Pages, step: Step) -> tuple[jax.Array, Pages]:
        """x [n, hidden] with n >= B * R (surplus rows are padding) -> [n, hidden], pages."""
        q = self._heads(self.q_proj(x), self.q_norm, step)
        k = self._heads(self.k_proj(x), self.k_norm, step)
        v = self._split(self.v_proj(x), step)
        q, k = rope.rotate(q, step.cos, step.sin), rope.rotate(k, step.cos, step.sin)
        pages = (
            kv_pages.write(pages[0], step.page_table, step.positions, k),
            kv_pages.write(pages[1], step.page_table, step.positions, v),
        )
        attended = tree_attention(
            q.astype(self.floating),
            *pages,
            step.page_table,
            step.visible,
            backend=self.backend,
        )
        flat = attended.reshape(step.positions.size, -1)
        return self.o_proj(pad_rows(flat, x.shape[0])), pages

    def _split(self, x: jax.Array, step: Step) -> jax.Array:
        batch, rows = step.positions.shape
        return x[: batch * rows].reshape(batch, rows, -1, self.head_dim)

    def _heads(self, x: jax.Array, norm: RMSNorm | None, step: Step) -> jax.Array:
        heads = self._split(x, step)
        return heads if norm is None else norm(heads)


class MLP(nnx.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, execution: Execution):
        wide, dtype = (config.intermediate_size, config.hidden_size), execution.compute
        narrow = (config.hidden_size, config.intermediate_size)
        self.gate_proj = Linear(wide, ("ffn", "embed"), dtype)
        self.up_proj = Linear(wide, ("ffn", "embed"), dtype)
        self.down_proj = Linear(narrow, ("embed", "ffn"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, hidden] -> [n, hidden] float32."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, config: ModelConfig, execution: Execution):
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, "embed", eps)
        self.self_attn = Attention(config, execution)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, "embed", eps)
        self.mlp = MLP(config, execution)

    def __call__(self, x: jax.Array, pages: Pages, step: Step) -> tuple[jax.Array, Pages]:
        """x [n, hidden] float32, the residual stream."""
        attended, pages = self.self_attn(self.input_layernorm(x), pages, step)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), pages


class Decoder(nnx.Module):
    """Embedding, layers and final norm; `layers` is one stacked layer when layers are scanned."""

    def __init__(self, config: ModelConfig, execution: Execution):
        # Only a head gains from int8; rows that are merely looked up keep their precision.
        dtype = execution.compute if config.tie_embeddings else execution.floating
        self.embed_tokens = Embedding((config.vocab_size, config.hidden_size), dtype)
        if execution.scan_layers:
            stack = nnx.vmap(
                lambda _: DecoderLayer(config, execution), axis_size=config.num_layers, in_axes=None
            )
            self.layers = stack(None)
        else:
            self.layers = nnx.List(
                DecoderLayer(config, execution) for _ in range(config.num_layers)
            )
        self.norm = RMSNorm(config.hidden_size, "embed", config.rms_norm_eps)


class CausalLM(nnx.Module):
    """A decoder with its output head (the embedding itself when tied)."""

    def __init__(self, config: ModelConfig, execution: Execution):
        self.model = Decoder(config, execution)
        shape = (config.vocab_size, config.hidden_size)
        head = Linear(shape, ("vocab", "embed"), execution.compute)
        self.lm_head = None if config.tie_embeddings else head
        self.config = config
        self.execution = execution

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        pages: list[Pages] | Pages,
        page_table: kv_pages.PageTable,
    ) -> tuple[jax.Array, list[Pages] | Pages]:
        """Runs tokens through the layers, writing their keys and values.

        Args:
          tokens, positions, visible: [B, R] int32. A position outside the pages is not written.
          pages: one `Pages` a layer; with scanned layers one `Pages` that holds all layers, layer
            by layer.
          page_table: [B, P] int32 or `Contiguous`; pages of the first layer.

        Returns: hidden states [B, R, hidden] float32 before the final norm, and the new pages.
        """
        frequencies = rope.inverse_frequencies(self.config)
        step = Step(positions, visible, page_table, *rope.rotation(positions, frequencies))
        x = self.model.embed_tokens(pad_rows(tokens.reshape(-1), self.execution.min_rows))
        layers = self.model.layers
        if isinstance(layers, nnx.List):
            assert isinstance(pages, list)
            x, pages = _unroll(layers, x, pages, step)
        else:
            assert isinstance(pages, tuple)
            x, pages = _scan(layers, x, pages, step)
        return x[: tokens.size].reshape(*tokens.shape, -1), pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [n, hidden] float32 -> [n, vocab] float32."""
        count = hidden.shape[0]
        x = self.model.norm(pad_rows(hidden, self.execution.min_rows))
        if self.lm_head is not None:
            return self.lm_head(x)[:count]
        return product(x, self.model.embed_tokens.rows)[:count]


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    graph: nnx.GraphDef[DecoderLayer], state: nnx.State, x: jax.Array, pages: Pages, step: Step
) -> tuple[jax.Array, Pages]:
    """One layer as a function, traced once for all layers; the compiler inlines it."""
    return nnx.merge(graph, state)(x, pages, step)


def _unroll(
    layers: nnx.List[DecoderLayer], x: jax.Array, pages: list[Pages], step: Step
) -> tuple[jax.Array, list[Pages]]:
    written = []
    for layer, layer_pages in zip(layers, pages, strict=True):
        x, layer_pages = _layer(*nnx.split(layer), x, layer_pages, step)
        written.append(layer_pages)
    return x, written


def _scan(layers: DecoderLayer, x: jax.Array, pages: Pages, step: Step) -> tuple[jax.Array, Pages]:
    """One compiled layer; the pages are carried, so that each layer updates them in place."""
    graph, state = nnx.split(layers)
    depth = jax.tree.leaves(state)[0].shape[0]
    pages_per_layer = pages[0].shape[0] // depth

    def body(carry, layer):
        (x, pages), (state, index) = carry, layer
        table = kv_pages.of_layer(step.page_table, index, pages_per_layer)
        return nnx.merge(graph, state)(x, pages, step._replace(page_table=table)), None

    (x, pages), _ = jax.lax.scan(body, (x, pages), (state, jnp.arange(depth)))
    return x, pages
