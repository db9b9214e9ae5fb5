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
from ssd_jax.kernels.tree_attention import Scratch, tree_attention
from ssd_jax.models import rope
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import Embedding, Linear, RMSNorm, pad_rows, product

Pages = tuple[jax.Array, jax.Array]
"""One layer's key and value pages, each [pages, kv_heads, page_size, head_dim]."""

Branches = tuple[jax.Array, jax.Array]
"""One layer's keys and values of branch tokens, as `Scratch.k` and `Scratch.v`; with scanned layers
those of all, [layers, ...]."""


class Tree(NamedTuple):
    """Tokens of which some belong to branches that leave the trunk at different positions.

    Attributes:
      branches: keys and values so far: one `Branches` a layer, or those of all when scanned.
      ancestor: [B, R, 2] int32, see `Scratch`; depth -1 is a token of the trunk.
      written: [B, R] int32, where in the pages a token goes; outside: nowhere.
    """

    branches: list[Branches] | Branches
    ancestor: jax.Array
    written: jax.Array


class Step(NamedTuple):
    """What every layer needs to know of the tokens being run."""

    written: jax.Array  # [B, R] int32, positions; outside the pages: not written
    visible: jax.Array  # [B, R] int32
    ancestor: jax.Array | None  # [B, R, 2] int32 where there are branches
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

    def __call__(
        self, x: jax.Array, pages: Pages, branches: Branches | None, step: Step
    ) -> tuple[jax.Array, Pages, Branches | None]:
        """x [n, hidden] with n >= B * R (surplus rows are padding); returns as many."""
        q = self._heads(self.q_proj(x), self.q_norm, step)
        k = self._heads(self.k_proj(x), self.k_norm, step)
        v = self._split(self.v_proj(x), step)
        q, k = rope.rotate(q, step.cos, step.sin), rope.rotate(k, step.cos, step.sin)
        pages = (
            kv_pages.write(pages[0], step.page_table, step.written, k),
            kv_pages.write(pages[1], step.page_table, step.written, v),
        )
        scratch = None
        if branches is not None:
            assert step.ancestor is not None
            scratch = Scratch(*branches, step.ancestor).write(k, v)
            branches = (scratch.k, scratch.v)
        attended = tree_attention(
            q.astype(self.floating),
            *pages,
            step.page_table,
            step.visible,
            scratch,
            backend=self.backend,
        )
        flat = attended.reshape(step.visible.size, -1)
        return self.o_proj(pad_rows(flat, x.shape[0])), pages, branches

    def _split(self, x: jax.Array, step: Step) -> jax.Array:
        batch, rows = step.visible.shape
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

    def __call__(
        self, x: jax.Array, pages: Pages, branches: Branches | None, step: Step
    ) -> tuple[jax.Array, Pages, Branches | None]:
        """x [n, hidden] float32, the residual stream."""
        normed = self.input_layernorm(x)
        attended, pages, branches = self.self_attn(normed, pages, branches, step)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), pages, branches


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
        shape = (config.outputs, config.hidden_size)
        head = Linear(shape, ("outputs", "embed"), execution.compute)
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
        tree: Tree | None = None,
    ) -> tuple[jax.Array, list[Pages] | Pages, list[Branches] | Branches | None]:
        """Runs tokens through the layers, writing their keys and values.

        Args:
          tokens, positions, visible: [B, R] int32. A position outside the pages is not written.
          pages: one `Pages` a layer; with scanned layers one `Pages` that holds all layers, layer
            by layer.
          page_table: [B, P] int32 or `Contiguous`; pages of the first layer.
          tree: where some tokens belong to branches; `positions` then only rotate.

        Returns: hidden states [B, R, hidden] float32 before the final norm, the new pages and the
        new branches.
        """
        rotation = rope.rotation(positions, rope.inverse_frequencies(self.config))
        written, ancestor = (positions, None) if tree is None else (tree.written, tree.ancestor)
        step = Step(written, visible, ancestor, page_table, *rotation)
        branches = None if tree is None else tree.branches
        x = self.model.embed_tokens(pad_rows(tokens.reshape(-1), self.execution.min_rows))
        layers = self.model.layers
        if isinstance(layers, nnx.List):
            assert isinstance(pages, list)
            x, pages, branches = _unroll(layers, x, pages, branches, step)
        else:
            assert isinstance(pages, tuple)
            x, pages, branches = _scan(layers, x, pages, branches, step)
        return x[: tokens.size].reshape(*tokens.shape, -1), pages, branches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [n, hidden] float32 -> [n, outputs] float32; see `ModelConfig.output_size`."""
        count = hidden.shape[0]
        x = self.model.norm(pad_rows(hidden, self.execution.min_rows))
        if self.lm_head is not None:
            return self.lm_head(x)[:count]
        return product(x, self.model.embed_tokens.rows)[:count]


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    graph: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x: jax.Array,
    pages: Pages,
    branches: Branches | None,
    step: Step,
) -> tuple[jax.Array, Pages, Branches | None]:
    """One layer as a function, traced once for all layers; the compiler inlines it."""
    return nnx.merge(graph, state)(x, pages, branches, step)


def _unroll(
    layers: nnx.List[DecoderLayer],
    x: jax.Array,
    pages: list[Pages],
    branches: list[Branches] | Branches | None,
    step: Step,
) -> tuple[jax.Array, list[Pages], list[Branches] | None]:
    written, grown = [], []
    for index, (layer, layer_pages) in enumerate(zip(layers, pages, strict=True)):
        own = branches[index] if isinstance(branches, list) else None
        x, layer_pages, own = _layer(*nnx.split(layer), x, layer_pages, own, step)
        written.append(layer_pages)
        if own is not None:
            grown.append(own)
    return x, written, grown or None


def _scan(
    layers: DecoderLayer,
    x: jax.Array,
    pages: Pages,
    branches: list[Branches] | Branches | None,
    step: Step,
) -> tuple[jax.Array, Pages, Branches | None]:
    """One compiled layer; the pages are carried, so that each layer updates them in place."""
    graph, state = nnx.split(layers)
    depth = jax.tree.leaves(state)[0].shape[0]
    pages_per_layer = pages[0].shape[0] // depth

    def body(carry, layer):
        (x, pages), (state, index, own) = carry, layer
        table = kv_pages.of_layer(step.page_table, index, pages_per_layer)
        x, pages, own = nnx.merge(graph, state)(x, pages, own, step._replace(page_table=table))
        return (x, pages), own

    (x, pages), grown = jax.lax.scan(body, (x, pages), (state, jnp.arange(depth), branches))
    return x, pages, grown
