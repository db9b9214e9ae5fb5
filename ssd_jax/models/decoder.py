"""The decoder of all families, readable top to bottom; `mechanisms.py` says how they differ.

Attribute names spell llama's tensor names (`model.layers.0.self_attn.q_proj.weight`), so most
checkpoints need no table. Tokens of all rows are flattened to [n, hidden] for the products and take
their [B, R] shape back for attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray, PageTable
from ssd_jax.kernels.linear.api import products
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.decoder_layer import DecoderLayer, hidden_norm
from ssd_jax.models.execution import Execution
from ssd_jax.models.layer_kinds import attention_variant
from ssd_jax.models.layer_loops import Step, scan, unroll
from ssd_jax.models.layers import (
    Embedding,
    Linear,
    Multiply,
    Stream,
    normed_products,
    pad_rows,
    soft_capped,
    stack,
)
from ssd_jax.models.rope import rotations
from ssd_jax.models.token_tree import AllBranches, Tree


class Decoder(nnx.Module):
    """Embedding, layers and final norm.

    Where layers are scanned, `layers` is one stacked layer, and `first_layers`, if there are any,
    are those before it that have no experts.
    """

    def __init__(self, config: ModelConfig, execution: Execution):
        # Only an output head gains from int8; rows that are only looked up keep their precision.
        dtype = execution.compute if config.tie_embeddings else execution.floating
        self.embed_tokens = Embedding((config.vocab_size, config.hidden_size), dtype)
        count, experts = config.num_layers, config.mechanisms.experts
        kinds = [experts if config.mechanisms.has_experts(i) else None for i in range(count)]
        layer_of = {kind: DecoderLayer(config, execution, kind) for kind in dict.fromkeys(kinds)}
        first = 0
        if execution.scan_layers:
            first = kinds.index(experts)
            self.layers = stack(layer_of[experts], count - first)
        else:  # a clone costs a fraction of a layer
            self.layers = nnx.List(nnx.clone(layer_of[kind]) for kind in kinds)
        dense = nnx.List(nnx.clone(layer_of[None]) for _ in range(first))
        self.first_layers = dense if first else None
        self.norm = hidden_norm(config)

    @property
    def parts(self) -> list[tuple[int, nnx.List[DecoderLayer] | DecoderLayer]]:
        """Layers that are unrolled, or stacked, with the number of the first of them."""
        if self.first_layers is None:
            return [(0, self.layers)]
        return [(0, self.first_layers), (len(self.first_layers), self.layers)]


class CausalLM(nnx.Module):
    """A decoder with its output head (the embedding itself when tied)."""

    def __init__(self, config: ModelConfig, execution: Execution):
        self.model = Decoder(config, execution)
        shape = (config.outputs, config.hidden_size)
        head = Linear(shape, ("outputs", "embed"), execution.compute)
        self.lm_head = None if config.tie_embeddings else head
        self.config = config
        self.execution = execution

    def embed(self, tokens: Int32[Array, "n"]) -> Stream:
        """The residual stream before the first layer."""
        factor = self.config.mechanisms.multipliers.embedding
        if self.execution.foreign_tokens:
            tokens = jnp.minimum(tokens, self.config.vocab_size - 1)
        x = self.model.embed_tokens(tokens)
        return x if factor == 1 else x * factor

    def hidden(
        self,
        tokens: Int32[Array, "B R"],
        positions: Int32[Array, "B R"],
        visible: Int32[Array, "B R"],
        pages: PageArray,
        page_table: PageTable,
        tree: Tree | None = None,
    ) -> tuple[Float32[Array, "B R H"], PageArray, AllBranches | None]:
        """Runs tokens through the layers, writing their keys and values.

        Args:
          positions: a token at a position outside the pages is not written.
          visible: see `tree_attention`.
          page_table: pages of the first layer.
          tree: given if some tokens belong to branches; `positions` then only rotate.

        Returns: hidden states before the final norm, the new pages and the new branches.
        """
        write_positions, paths = (
            (positions, None) if tree is None else (tree.write_positions, tree.paths)
        )
        ropes = rotations(self.config, positions)

        pages_per_layer = pages.shape[0] // self.config.num_layers

        def of_layer(layer: int | jax.Array) -> dict[str, Any]:
            """What of a `Step` differs from layer to layer."""
            table = kv_pages.layer_page_table(page_table, layer, pages_per_layer)
            variant = attention_variant(self.config, layer)
            return {"page_table": table, "rotation": ropes.of(layer), "variant": variant}

        present = None
        if self.config.mechanisms.experts is not None:
            seeing = visible > 0 if paths is None else (visible > 0) | jnp.any(paths != 0, axis=2)
            present = seeing.reshape(-1)
        step = Step(write_positions, visible, paths, present, None, **of_layer(0))
        x = self.embed(pad_rows(tokens.reshape(-1), self.execution.min_rows))
        branches: Any = None if tree is None else tree.branches
        new_branches, parts = [], self.model.parts
        for (first, layers), (end, _) in zip(parts, [*parts[1:], (None, None)], strict=True):
            run: Any = unroll if isinstance(layers, nnx.List) else scan
            of_part = branches if branches is None or len(parts) == 1 else branches[first:end]
            x, pages, new = run(layers, x, pages, of_part, step, of_layer, first)
            new_branches.append(new)
        if branches is not None:
            branches = new_branches[0] if len(new_branches) == 1 else jnp.concatenate(new_branches)
        return x[: tokens.size].reshape(*tokens.shape, -1), pages, branches

    def logits(self, hidden: Stream, multiply: Multiply = products) -> Float32[Array, "n outputs"]:
        """Logits of states from `hidden`; for their columns see `ModelConfig.output_size`."""
        x, m = pad_rows(hidden, self.execution.min_rows), self.config.mechanisms
        head = self.lm_head or self.model.embed_tokens
        [logits] = normed_products(x, [head.operand], self.model.norm, multiply)
        logits, factor = logits[: hidden.shape[0]], m.multipliers.logits
        return soft_capped(logits if factor == 1 else logits * factor, m.logit_soft_cap)
