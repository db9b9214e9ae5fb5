"""Steps of an expansion of trees, of which the programs of `tree_expansion_programs` are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.devices import passes, tree_branching, tree_growth
from ssd_jax.devices.paged_programs import PagedPrograms
from ssd_jax.devices.tree_branching import TreeExpansion, TreeForks, TreeRecord
from ssd_jax.devices.tree_growth import Continuations, Frontier
from ssd_jax.kernels.kv_pages import PageArray, chain_path
from ssd_jax.kernels.rows import map_row_blocks
from ssd_jax.models.decoder import AllBranches, Tree
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.sampling import penalties, topology
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.ranking import Ranking, rank
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.variants import Parts


class TreeContext(NamedTuple):
    """What the steps of a program read.

    Attributes:
      table: page table of all slots.
      history, sampling: of every slot.
      log_rates: see `tree_growth.add_run`.
      parts: of the variant.
    """

    parameters: Parameters
    table: Any
    history: History
    sampling: Sampling
    log_rates: Float32[Array, "B depths classes ranks"]
    parts: Parts


class Keys(NamedTuple):
    """Keys and values that a forward reads and writes: of texts, and of M branches and the record.

    The record is the last branch, and its node i has entry i. A branch has its stem's entries
    first, those of the record's path to it and of its bonus token, then those of its runs.
    """

    pages: PageArray
    scratch: AllBranches


class TreeExpansionSteps:
    """The steps for the branches of each sequence; they are called while tracing.

    Args:
      programs: that they are steps of.
      drafting: of these.
      shape: of the trees.
      tokens: number of ids that exist.
    """

    def __init__(
        self, programs: PagedPrograms, drafting: Drafting, shape: TreeShape, tokens: int
    ) -> None:
        self._programs, self._shape, self._tokens = programs, shape, tokens
        self._drafting, self._branches = drafting, drafting.branches
        self._model, self._capacity = programs.model, programs.capacity
        self._slots = programs.local_slots

    @property
    def slot_of_branches(self) -> Int32[Array, "branches"]:
        """The slot of each of all branches."""
        return jnp.repeat(jnp.arange(self._slots), self._branches)

    def run_nodes(
        self, context: TreeContext, keys: Keys, record: TreeRecord, live: Bool[Array, "B"]
    ) -> tuple[TreeRecord, Keys]:
        """Runs the rows of live records that have not run, and ranks their continuations."""
        run = record.exists & ~record.has_run & live[:, None]
        path, start = topology.paths(record.parents), record.start[:, None]
        depth = topology.depth_of(path)
        is_root = jnp.arange(path.shape[1]) == 0
        positions = jnp.where(run, start + depth, self._capacity)
        branch = jnp.full_like(path, self._branches)
        hidden, keys = self._run(
            context,
            keys,
            tokens=jnp.concatenate([record.pending[:, None], record.tokens], axis=1),
            positions=positions,
            visible=jnp.where(run, jnp.clip(start + 1, 0, self._capacity), 0),
            paths=jnp.stack([branch, jnp.where(run, path, 0)], axis=-1),
            written=jnp.where(is_root, positions, self._capacity),
        )
        slot, flat = jnp.repeat(jnp.arange(self._slots), path.shape[1]), path.reshape(-1)

        def history(slot: Int32[Array, "n"], path: Int32[Array, "n"]) -> History:
            outputs = self._model.output_ids
            return penalties.in_flight(context.history, record.tokens, slot, path, outputs)

        position = record.start[slot] + 1 + depth.reshape(-1)
        ranking = self._rank(context, hidden, history, slot, position, flat)
        return tree_branching.add_ranking(record, ranking, run), keys

    def copy_stems(self, keys: Keys, forks: TreeForks) -> Keys:
        """Copies keys and values of the record's paths to the front of the branches."""
        ancestors, scratch = self._shape.ancestors, keys.scratch
        of_record = scratch[..., self._branches, :]  # [layers, B, heads, entries, width]
        nodes = forks.nodes.reshape(self._slots, -1)
        stems = jnp.take_along_axis(of_record, nodes[None, :, None, :, None], axis=3)
        shape = (*stems.shape[:3], self._branches, ancestors, stems.shape[-1])
        stems = stems.reshape(shape).swapaxes(3, 4)
        return keys._replace(scratch=scratch.at[:, :, :, :ancestors, : self._branches].set(stems))

    def run_branches(
        self,
        context: TreeContext,
        keys: Keys,
        record: TreeRecord,
        expansion: TreeExpansion,
        nodes: Frontier,
        depth: Int32[Array, ""],
    ) -> tuple[TreeExpansion, Keys]:
        """Runs nodes of the branches' trees, all at one depth, and ranks their continuations."""
        shape, growth = self._shape, expansion.growth
        live = (growth.start >= 0)[:, None] & ((depth == 0) | (nodes.path > 0))
        accepted = (expansion.path[:, :-1] >= 0).sum(axis=1, dtype=jnp.int32)
        stem = chain_path(accepted) | 1 << shape.ancestors
        path = stem[:, None] | nodes.path << shape.stem
        by_slot = (self._slots, -1)
        branch = jnp.tile(jnp.arange(self._branches), self._slots)
        branch = jnp.broadcast_to(branch[:, None], path.shape)
        positions = jnp.where(live, growth.start[:, None] + depth, self._capacity)
        slot = jnp.repeat(self.slot_of_branches, path.shape[1])
        visible = jnp.clip((record.start[slot] + 1).reshape(live.shape), 0, self._capacity)
        hidden, keys = self._run(
            context,
            keys,
            tokens=jnp.maximum(nodes.tokens, 0).reshape(by_slot),
            positions=positions.reshape(by_slot),
            visible=jnp.where(live, visible, 0).reshape(by_slot),
            paths=jnp.stack([branch, jnp.where(live, path, 0)], axis=-1).reshape(*by_slot, 2),
            written=jnp.full(positions.reshape(by_slot).shape, self._capacity),
        )
        row = jnp.repeat(jnp.arange(growth.start.shape[0]), path.shape[1])
        runs = tree_growth.tokens_of_runs(growth, nodes, depth, shape)

        def history(
            slot: Int32[Array, "n"], path: Int32[Array, "n"], row: Int32[Array, "n"]
        ) -> History:
            outputs = self._model.output_ids
            drafted = jnp.concatenate([expansion.path, runs], axis=1)[row]
            precedes = topology.on_path(path, drafted.shape[1])
            committed = penalties.history_of(context.history, slot, outputs)
            return penalties.add_output(committed, jnp.where(precedes, drafted, -1), outputs)

        position = growth.start[row] + 1 + depth
        ranking = self._rank(context, hidden, history, slot, position, path.reshape(-1), row)
        token = ranking.tokens[:, :1]
        continuations = Continuations(ranking, token, jnp.ones(token.shape, jnp.float32))
        log_rates = context.log_rates[self.slot_of_branches]
        growth = tree_growth.add_run(growth, nodes, continuations, depth, log_rates, shape)
        return expansion._replace(growth=growth), keys

    def pack(self, record: TreeRecord, expansion: TreeExpansion) -> Int32[Array, "B M+1 columns"]:
        """All that the host reads of branches, and the gap classes of the record behind them."""
        tree = tree_growth.propose(expansion.growth, self._shape)
        outcomes = (array.reshape(-1) for array in expansion.outcomes)
        head = jnp.stack([*outcomes, tree.proposal.length], axis=1)
        columns = jnp.concatenate(
            [tree.gap_class, head, tree.proposal.tokens, tree.parents, tree.rank], axis=1
        ).reshape(self._slots, self._branches, -1)
        missing = columns.shape[2] - record.gap_class.shape[1]
        of_record = jnp.pad(record.gap_class[:, None], ((0, 0), (0, 0), (0, missing)))
        return jnp.concatenate([columns, of_record], axis=1)

    def _run(
        self,
        context: TreeContext,
        keys: Keys,
        *,
        tokens: Int32[Array, "B R"],
        positions: Int32[Array, "B R"],
        visible: Int32[Array, "B R"],
        paths: Int32[Array, "B R 2"],
        written: Int32[Array, "B R"],
    ) -> tuple[Float32[Array, "B R hidden"], Keys]:
        module = self._model.module(context.parameters)
        tree = Tree(keys.scratch, paths, written)
        hidden, pages, scratch = module.hidden(
            tokens, positions, visible, keys.pages, context.table, tree
        )
        assert scratch is not None
        return hidden, Keys(pages, scratch)

    def _rank(
        self,
        context: TreeContext,
        hidden: Float32[Array, "B R hidden"],
        history: Callable[..., History],
        slot: Int32[Array, "n"],
        position: Int32[Array, "n"],
        *of_history: Int32[Array, "n"],
    ) -> Ranking:
        """Ranks the continuations of n = B * R rows, of which `history` gives the history of some.

        Its arguments are their slots and `of_history`.
        """
        logits = passes.logits(self._model, context.parameters, hidden)

        def ranked(logits, slot, position, *of_history) -> Ranking:
            return rank(
                logits,
                sampling_of(context.sampling, slot),
                position,
                lambda: history(slot, *of_history),
                tokens=self._tokens,
                count=self._shape.ranks,
                support=min(self._drafting.support, logits.shape[1]),
                outputs=self._model.output_ids,
                parts=context.parts,
            )

        rows = logits.reshape(position.shape[0], -1)
        return map_row_blocks(ranked, rows, slot, position, *of_history)
