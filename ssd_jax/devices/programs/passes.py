"""Passes through a model over its pages, shared by the programs of both roles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray
from ssd_jax.kernels.kv_write import write
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.sharding import DATA_AXIS, spans_processes
from ssd_jax.models.token_tree import AllBranches
from ssd_jax.sampling import penalties
from ssd_jax.sampling.penalties import History


def cut(model: FunctionalModel, structs: Any, *axes: str | None) -> Any:
    """Structs of arrays, sharded along mesh axes if the model has several devices."""
    sharding = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec(*axes))
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), structs
    )


def history_structs(model: FunctionalModel, slots: int) -> History:
    """Structs of the history of `slots` slots, sharded as embeddings are."""
    history = jax.eval_shape(lambda: penalties.empty(slots, model.config.vocab_size))
    by_words = cut(model, history, DATA_AXIS, over_words(model, model.rules.vocab))
    return by_words._replace(recent=cut(model, history.recent, DATA_AXIS))


def over_words(model: FunctionalModel, axis: str | None) -> str | None:
    """Mesh axis that shards logits and histories whose weights are sharded along `axis`.

    On processors, devices of several processes have them whole, so that no branch or loop of
    sampling runs a collective: Gloo matches collectives by their order, and on processors XLA
    starts what follows a branch before all collectives within it, on each device at its own time.
    """
    mesh = model.mesh
    if mesh is None or not spans_processes(mesh) or mesh.devices.flat[0].platform != "cpu":
        return axis
    return None


def step(
    model: FunctionalModel,
    parameters: Parameters,
    pages: PageArray,
    table: kv_pages.PageTable,
    tokens: Int32[Array, "B R"],
    positions: Int32[Array, "B R"],
    size: int,
) -> tuple[Float32[Array, "B R hidden"], PageArray]:
    """Runs tokens at their positions; tokens at negative positions are idle and see nothing.

    Args:
      table: of all slots.
      size: positions of a slot's pages; keys and values beyond are not written.

    Returns: hidden states, pages.
    """
    visible = jnp.clip(positions + 1, 0, size)
    positions = jnp.where(positions < 0, size, positions)
    module = model.module(parameters)
    hidden, pages, _ = module.hidden(tokens, positions, visible, pages, table)
    return hidden, pages


def promote(
    model: FunctionalModel,
    pages: PageArray,
    table: kv_pages.PageTable,
    scratch: AllBranches,
    winner: Int32[Array, "B"],
    positions: Int32[Array, "B n"],
    entries: Int32[Array, "B n"] | None = None,
) -> PageArray:
    """Copies the keys and values of one branch a row into its pages.

    Args:
      table: of all slots.
      scratch: of M branches a row.
      winner: the branch.
      positions: of each of its tokens; a token outside the slot's pages is not copied.
      entries: of these tokens in the branch; None are all, in order.
    """
    rows = jnp.arange(winner.shape[0])

    def copy(array: jax.Array, branches: jax.Array, table: kv_pages.PageTable) -> jax.Array:
        winner_kv = branches[rows, :, :, jnp.maximum(winner, 0)].swapaxes(
            1, 2
        )  # [B, depths, heads, 2 D]
        if entries is not None:
            winner_kv = jnp.take_along_axis(winner_kv, entries[:, :, None, None], axis=1)
        windows, kernels = model.execution.window_writes, model.execution.write_kernels
        return write(array, table, positions, winner_kv, windows=windows, kernels=kernels)

    count = pages.shape[0] // scratch.shape[0]  # layers lie one after another
    if not model.execution.scan_layers:
        for index, branches in enumerate(scratch):
            pages = copy(pages, branches, kv_pages.layer_page_table(table, index, count))
        return pages

    def body(pages: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, branches = layer
        return copy(pages, branches, kv_pages.layer_page_table(table, index, count)), None

    return jax.lax.scan(body, pages, (jnp.arange(scratch.shape[0]), scratch))[0]


def logits(
    model: FunctionalModel, parameters: Parameters, hidden: Float32[Array, "*rows hidden"]
) -> Float32[Array, "*rows outputs"]:
    """The head's logits of hidden states, sharded as the head is; see `over_words`."""
    flat = model.module(parameters).logits(hidden.reshape(-1, hidden.shape[-1]))
    if model.mesh is not None:
        axis = model.rules.outputs
        for spec in dict.fromkeys((axis, over_words(model, axis))):
            flat = jax.lax.with_sharding_constraint(flat, PartitionSpec(None, spec))
    return flat.reshape(*hidden.shape[:-1], -1)
