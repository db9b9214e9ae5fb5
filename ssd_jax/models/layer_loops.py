"""Runs layers one after the other, over the pages of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int32

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch
from ssd_jax.kernels.kv_write import write
from ssd_jax.kernels.tree_attention.api import tree_attention
from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from ssd_jax.models.decoder_layer import DecoderLayer
from ssd_jax.models.layers import Stream
from ssd_jax.models.rope import Rotation
from ssd_jax.models.token_tree import AllBranches, BranchArray


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


def unroll(
    layers: Sequence[DecoderLayer],
    x: Stream,
    pages: PageArray,
    branches: AllBranches | None,
    step: Step,
    of_layer: OfLayer,
    first: int,
) -> tuple[Stream, PageArray, AllBranches | None]:
    """Each layer as it is, the first of them number `first` of the decoder."""
    new_branches = []
    for index, layer in enumerate(layers, start=first):
        layer_branches = None if branches is None else branches[index - first]
        layer_step = step._replace(**of_layer(index))
        x, (pages, layer_branches) = _layer(*nnx.split(layer), x, pages, layer_branches, layer_step)
        new_branches.append(layer_branches)
    return x, pages, None if branches is None else jnp.stack(new_branches)


def scan(
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
    """Whether a parameter is a weight of all experts, or its scales or minima."""
    return "experts" in path and path[-1] in ("weight", "weight_scale", "weight_minimum")
