"""The decoder of all families, readable top to bottom; `mechanisms.py` says how they differ.

Attribute names spell llama's tensor names (`model.layers.0.self_attn.q_proj.weight`), so most
checkpoints need no table. Tokens of all rows are flattened to [n, hidden] for the products and take
their [B, R] shape back for attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch
from ssd_jax.kernels.kv_write import write
from ssd_jax.kernels.linear.api import products
from ssd_jax.kernels.tree_attention.api import tree_attention
from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.experts import ExpertMatrices, Router, SharedGate
from ssd_jax.models.layer_kinds import attention_variant
from ssd_jax.models.layers import (
    ACTIVATIONS,
    Embedding,
    LayerNorm,
    Linear,
    Multiply,
    RMSNorm,
    gated,
    linear,
    normed_products,
    pad_rows,
    parameter,
    soft_capped,
    stack,
)
from ssd_jax.models.mechanisms import Activation, Experts
from ssd_jax.models.rope import Rotation, rotations

Stream = Float32[Array, "n H"]
"""Hidden states of tokens: the residual stream, or its norm."""

BranchArray = Shaped[Array, "B kv_heads entries M width"]
"""Keys and values of branch tokens of one layer, as in `Scratch`."""

AllBranches = Shaped[Array, "layers B kv_heads entries M width"]
"""Those of all layers. (They and the pages are one array each: a call takes the host a microsecond
or two for each array.)"""

AnyNorm = RMSNorm | LayerNorm | None

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""From q [B, R, heads, head_dim], k and v [B, R, kv_heads, head_dim], all float32, q and k
rotated, to the attention output, shaped as q, and what else the layer returns, such as pages."""


class Tree(NamedTuple):
    """Tokens of which some belong to branches that leave the trunk at different positions.

    Attributes:
      branches: keys and values of the branches so far.
      paths: see `Scratch`; path 0 is a token of the trunk.
      write_positions: position in the pages that a token is written to; one outside is not written.
    """

    branches: AllBranches
    paths: Int32[Array, "B R 2"]
    write_positions: Int32[Array, "B R"]


class Step(NamedTuple):
    """What every layer needs to know of the tokens being run."""

    write_positions: Int32[Array, "B R"]  # positions; one outside the pages is not written
    visible: Int32[Array, "B R"]
    paths: Int32[Array, "B R 2"] | None  # None without branches
    present: Bool[Array, "tokens"] | None  # that see something; None if no layer asks
    stacked: Int32[Array, ""] | None  # place of the layer in experts' weights of several
    page_table: PageTable
    rotation: Rotation
    variant: AttentionVariant


OfLayer = Callable[[int | jax.Array], dict[str, Any]]
"""From a layer's number to the fields of a `Step` that differ between layers."""


class Attention(nnx.Module):
    """Grouped-query self-attention, with optional biases, norms of queries and keys, and sinks."""

    def __init__(self, config: ModelConfig, execution: Execution):
        c, m, dtype, size = config, config.mechanisms, execution.compute, config.head_dim
        q, kv, bias = c.num_heads * size, c.num_kv_heads * size, c.qkv_bias
        self.q_proj = Linear((q, c.hidden_size), ("heads", "embed"), dtype, bias=bias)
        self.k_proj = Linear((kv, c.hidden_size), ("kv_heads", "embed"), dtype, bias=bias)
        self.v_proj = Linear((kv, c.hidden_size), ("kv_heads", "embed"), dtype, bias=bias)
        self.o_proj = Linear((c.hidden_size, q), ("embed", "heads"), dtype, bias=m.output_bias)
        self.joint_norm = m.joint_qk_norm
        q_size, k_size = (
            ((q, "heads"), (kv, "kv_heads")) if self.joint_norm else 2 * ((size, None),)
        )
        self.q_norm = RMSNorm(*q_size, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(*k_size, c.rms_norm_eps) if c.qk_norm else None
        sinks = parameter((c.num_heads,), ("heads",), jnp.dtype(jnp.float32))
        self.sinks = sinks if m.sinks else None
        self.head_dim = size
        self.execution = execution

    def with_sinks(self, variant: AttentionVariant) -> AttentionVariant:
        """The attention of a layer with the sinks of this one, if it has any."""
        if self.sinks is None:
            return variant
        return dataclasses.replace(variant, sinks=self.sinks[...])

    def __call__(
        self, x: Stream, norm: AnyNorm, rope: Rotation, attend: Attend, multiply: Multiply
    ) -> tuple[Stream, Any]:
        """x, not normed yet, has n >= B * R rows; surplus rows are padding."""
        batch, rows = rope.cos.shape[:2]
        heads = (batch, rows, -1, self.head_dim)
        normed = heads[:3] if self.joint_norm else heads
        projections = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = (
            y[: batch * rows].reshape(normed) for y in linear(x, projections, multiply, norm)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(heads) for y in (q, k, v))
        attended, aux = attend(rope(q), rope(k), v)
        flat = attended.reshape(batch * rows, -1)
        [out] = linear(pad_rows(flat, x.shape[0]), [self.o_proj], multiply)
        return out, aux


class MLP(nnx.Module):
    """Feed-forward of two matrices, or of three with a gate."""

    def __init__(self, config: ModelConfig, execution: Execution, channels: int):
        m, dtype, bias = config.mechanisms, execution.compute, config.mechanisms.mlp_bias
        up_shape = (channels, config.hidden_size)
        down_shape = (config.hidden_size, channels)
        gate = Linear(up_shape, ("ffn", "embed"), dtype, bias=bias)
        self.gate_proj = gate if m.gated else None
        self.up_proj = Linear(up_shape, ("ffn", "embed"), dtype, bias=bias)
        self.down_proj = Linear(down_shape, ("embed", "ffn"), dtype, bias=bias)
        self.activation: Activation = m.activation
        self.gate_limit = m.gate_limit

    def __call__(self, x: Stream, norm: AnyNorm, multiply: Multiply) -> Stream:
        """down(act(gate(x)) * up(x)), or down(act(up(x))); x is not normed yet."""
        if self.gate_proj is None:
            [up] = linear(x, [self.up_proj], multiply, norm)
            inner = ACTIVATIONS[self.activation](up)
        else:
            gate, up = linear(x, [self.gate_proj, self.up_proj], multiply, norm)
            inner = gated(gate, up, self.activation, self.gate_limit)
        [down] = linear(inner, [self.down_proj], multiply)
        return down


class ExpertMLP(nnx.Module):
    """Feed-forward of experts, of which one may see every token."""

    def __init__(self, config: ModelConfig, execution: Execution, experts: Experts):
        self.router = Router(config, experts)
        self.experts = ExpertMatrices(config, execution, experts)
        self.shared_expert = MLP(config, execution, experts.shared) if experts.shared else None
        self.shared_expert_gate = SharedGate(config) if experts.shared_gate else None

    def __call__(
        self,
        x: Stream,
        norm: AnyNorm,
        multiply: Multiply,
        present: Bool[Array, "tokens"] | None,
        stacked: Int32[Array, ""] | None = None,
    ) -> Stream:
        """The sum of the experts' outputs, with their weights; x is not normed yet.

        Rows that are not present, and those behind the tokens, read no weights; None stands for
        all present.
        """
        x = x if norm is None else norm(x)
        present = jnp.ones(x.shape[0], bool) if present is None else present
        total = self.experts(x, self.router(x), present, stacked)
        if self.shared_expert is None:
            return total
        shared = self.shared_expert(x, None, multiply)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x) * shared
        return total + shared


class DecoderLayer(nnx.Module):
    """Attention and feed-forward with residual connections, and norms before, after or both.

    The norms before them have llama's names.
    """

    def __init__(self, config: ModelConfig, execution: Execution, experts: Experts | None = None):
        m, norm = config.mechanisms, functools.partial(_norm, config)
        before, after = m.norm_placement != "post", m.norm_placement != "pre"
        self.input_layernorm = norm() if before else None
        self.self_attn = Attention(config, execution)
        self.attention_output_norm = norm() if after else None
        self.post_attention_layernorm = norm() if before else None
        self.mlp: MLP | ExpertMLP
        if experts is None:
            self.mlp = MLP(config, execution, config.intermediate_size)
        else:
            self.mlp = ExpertMLP(config, execution, experts)
        self.mlp_output_norm = norm() if after else None
        self.residual_multiplier = m.multipliers.residual

    def __call__(
        self,
        x: Stream,
        rope: Rotation,
        attend: Attend,
        multiply: Multiply = products,
        present: Bool[Array, "tokens"] | None = None,
        stacked: Int32[Array, ""] | None = None,
    ) -> tuple[Stream, Any]:
        """Runs one layer on the residual stream x; also returns the second result of `attend`.

        Rows that are not present may get any result; None stands for all present. `stacked` is the
        layer's place where weights of experts are those of several layers.
        """
        attended, aux = self.self_attn(x, self.input_layernorm, rope, attend, multiply)
        x = self._add(x, attended, self.attention_output_norm)
        norm = self.post_attention_layernorm
        if isinstance(self.mlp, ExpertMLP):
            fed = self.mlp(x, norm, multiply, present, stacked)
        else:
            fed = self.mlp(x, norm, multiply)
        return self._add(x, fed, self.mlp_output_norm), aux

    def _add(self, x: Stream, change: Stream, norm: AnyNorm) -> Stream:
        change = change if norm is None else norm(change)
        return x + (change if self.residual_multiplier == 1 else change * self.residual_multiplier)


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
        made = {kind: DecoderLayer(config, execution, kind) for kind in dict.fromkeys(kinds)}
        first = 0
        if execution.scan_layers:
            first = kinds.index(experts)
            self.layers = stack(made[experts], count - first)
        else:  # a clone costs a fraction of a layer
            self.layers = nnx.List(nnx.clone(made[kind]) for kind in kinds)
        dense = nnx.List(nnx.clone(made[None]) for _ in range(first))
        self.first_layers = dense if first else None
        self.norm = _norm(config)

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
            run: Any = _unroll if isinstance(layers, nnx.List) else _scan
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


def _norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of hidden states."""
    kind = LayerNorm if config.mechanisms.layer_norm else RMSNorm
    return kind(config.hidden_size, "embed", config.rms_norm_eps)


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    graph: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x: Stream,
    pages: PageArray,
    branches: BranchArray | None,
    step: Step,
) -> tuple[Stream, tuple[PageArray, BranchArray | None]]:
    """One layer, traced once for all layers; the compiler inlines it.

    Keys and values of its tokens are written to the pages, and to the branches if there are any.
    """
    layer = nnx.merge(graph, state)
    execution = layer.self_attn.execution

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        if execution.attention != "cpu":  # "cpu" skips what a query does not see
            k, v = kv_pages.contain_nonfinite(k, v)
        kv, windows = kv_pages.pack_kv(k, v, pages.shape[-1]), execution.window_writes
        write_kernels = execution.write_kernels
        new_pages = write(
            pages, step.page_table, step.write_positions, kv, windows=windows, kernels=write_kernels
        )
        scratch = None
        if branches is not None:
            assert step.paths is not None
            scratch = Scratch(branches, step.paths).write(kv, windows=windows)
        attended = tree_attention(
            q.astype(execution.floating),
            new_pages,
            step.page_table,
            step.visible,
            scratch,
            variant=layer.self_attn.with_sinks(step.variant),
            backend=execution.attention,
            kernels=execution.kernels,
        )
        return attended, (new_pages, None if scratch is None else scratch.kv)

    return layer(x, step.rotation, attend, present=step.present, stacked=step.stacked)


def _unroll(
    layers: Sequence[DecoderLayer],
    x: Stream,
    pages: PageArray,
    branches: AllBranches | None,
    step: Step,
    of_layer: OfLayer,
    first: int,
) -> tuple[Stream, PageArray, AllBranches | None]:
    new_branches = []
    for index, layer in enumerate(layers, start=first):
        layer_branches = None if branches is None else branches[index - first]
        layer_step = step._replace(**of_layer(index))
        x, (pages, layer_branches) = _layer(*nnx.split(layer), x, pages, layer_branches, layer_step)
        new_branches.append(layer_branches)
    return x, pages, None if branches is None else jnp.stack(new_branches)


def _scan(
    layers: DecoderLayer,
    x: Stream,
    pages: PageArray,
    branches: AllBranches | None,
    step: Step,
    of_layer: OfLayer,
    first: int,
) -> tuple[Stream, PageArray, AllBranches | None]:
    """One compiled layer, run by a loop.

    The pages of all layers are carried, so that each layer updates its own in place; the branches
    are small, and stacked anew. Weights of experts are not sliced: a slice that only kernels and
    loops use would be a copy of all experts.
    """
    graph, of_experts, state = nnx.split(layers, _of_experts, ...)
    depth = jax.tree.leaves(state)[0].shape[0]
    numbers = jnp.arange(first, first + depth)

    def body(carry, layer):
        (x, pages), (state, index, layer_branches) = carry, layer
        layer_step = step._replace(**of_layer(index))
        if jax.tree.leaves(of_experts):
            layer_step = layer_step._replace(stacked=index - first)
            state = nnx.merge_state(state, of_experts)
        x, (pages, layer_branches) = _layer(graph, state, x, pages, layer_branches, layer_step)
        return (x, pages), layer_branches

    (x, pages), new_branches = jax.lax.scan(body, (x, pages), (state, numbers, branches))
    return x, pages, new_branches


def _of_experts(path: Sequence[Any], _variable: Any) -> bool:
    """Whether a parameter is a weight of all experts, or its scales."""
    return "experts" in path and path[-1] in ("weight", "weight_scale")
