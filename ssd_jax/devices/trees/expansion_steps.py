"""Steps of an expansion of trees, of which the programs of `expansion_programs` are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.devices.programs import passes
from ssd_jax.devices.programs.paged import PagedPrograms
from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.devices.trees import outcomes as tree_outcomes
from ssd_jax.devices.trees import record as tree_record
from ssd_jax.devices.trees import residuals
from ssd_jax.devices.trees.branching import TreeExpansion, TreeForks
from ssd_jax.devices.trees.continuations import continuations, places
from ssd_jax.devices.trees.growth import Continuations, Frontier
from ssd_jax.devices.trees.outcomes import TreeOutcomes
from ssd_jax.devices.trees.record import TreeRecord
from ssd_jax.kernels.kv_pages import PageArray, chain_path
from ssd_jax.kernels.rows import map_row_blocks
from ssd_jax.models.functional import Parameters
from ssd_jax.models.token_tree import AllBranches, Tree
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.sampling import penalties, prediction, topology
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.ranking import Ranking, rank
from ssd_jax.sampling.rules import RULES
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.siblings import Place
from ssd_jax.sampling.variants import Parts, when


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
        self._draws_from_q = not RULES[drafting.rule].keyed_by_position

    @property
    def slot_of_branches(self) -> Int32[Array, "branches"]:
        """The slot of each of all branches."""
        return jnp.repeat(jnp.arange(self._slots), self._branches)

    def run_nodes(
        self, context: TreeContext, keys: Keys, record: TreeRecord, live: Bool[Array, "B"]
    ) -> tuple[TreeRecord, Keys]:
        """Runs the rows of live records that have not run, and ranks their continuations.

        Sampled rows that compare p with q run all: what they expect is not what was drawn there.
        """
        hot = (context.sampling.temperature > 0) & self._draws_from_q
        run = record.exists & (~record.has_run | hot[:, None]) & live[:, None]
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

        ranking = self._expect(
            context, hidden, history, slot, record.start[slot], depth.reshape(-1), flat
        )
        if self._draws_from_q:
            expected = ranking.tokens.reshape(record.candidates.shape)
            of_residual = residuals.continuations(record, expected)
            tokens = jnp.where(hot[:, None, None], of_residual, expected)
            ranking = ranking._replace(tokens=tokens.reshape(ranking.tokens.shape))
        return tree_record.add_ranking(record, ranking, run), keys

    def outcomes(
        self,
        context: TreeContext,
        record: TreeRecord,
        counts: Int32[Array, "B depths"],
        share: Int32[Array, "2"],
    ) -> TreeOutcomes:
        """The outcomes that get branches; see `tree_outcomes.likeliest_outcomes`."""
        log_rates = tree_outcomes.log_rates_of(record, context.log_rates)
        if self._draws_from_q:
            rates = residuals.outcome_rates(record, self._drafting.predict)
            hot = (context.sampling.temperature > 0)[:, None, None]
            log_rates = jnp.where(hot, jnp.log(rates), log_rates)
        return tree_outcomes.likeliest_outcomes(record, log_rates, counts, share, self._branches)

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

        at = places(growth.start, depth, path.shape[1], shape)
        behind = self._continue(context, hidden, history, slot, at, path.reshape(-1), row)
        log_rates = context.log_rates[self.slot_of_branches]
        growth = tree_growth.add_run(growth, nodes, behind, depth, log_rates, shape)
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

    def _continue(
        self,
        context: TreeContext,
        hidden: Float32[Array, "B R hidden"],
        history: Callable[..., History],
        slot: Int32[Array, "n"],
        place: Place,
        *of_history: Int32[Array, "n"],
    ) -> Continuations:
        """What follows n = B * R nodes, of which `history` gives the history of some.

        Its arguments are their slots and `of_history`.
        """

        def of_rows(logits, slot, place, *of_history) -> Continuations:
            return continuations(
                logits,
                sampling_of(context.sampling, slot),
                place,
                lambda: history(slot, *of_history),
                drafting=self._drafting,
                count=self._shape.ranks,
                tokens=self._tokens,
                outputs=self._model.output_ids,
                parts=context.parts,
            )

        logits = passes.logits(self._model, context.parameters, hidden)
        rows = logits.reshape(slot.shape[0], -1)
        return map_row_blocks(of_rows, rows, slot, place, *of_history)

    def _expect(
        self,
        context: TreeContext,
        hidden: Float32[Array, "B R hidden"],
        history: Callable[..., History],
        slot: Int32[Array, "n"],
        start: Int32[Array, "n"],
        depth: Int32[Array, "n"],
        *of_history: Int32[Array, "n"],
    ) -> Ranking:
        """Ranks the tokens that a target may draw behind n = B * R rows; see `_continue`.

        By q, and by the noise that draws them, unless bonus tokens are predicted without it.
        """
        drafting, parts = self._drafting, context.parts
        by_q = parts._replace(sampled=False, truncated=False) if self._draws_from_q else parts
        common = {
            "tokens": self._tokens,
            "count": self._shape.ranks,
            "outputs": self._model.output_ids,
        }

        def of_rows(logits, slot, start, depth, *of_history) -> Ranking:
            sampling = sampling_of(context.sampling, slot)

            def get_history() -> History:
                return history(slot, *of_history)

            ranking = rank(
                logits,
                sampling,
                start + 1 + depth,
                get_history,
                support=min(drafting.support, logits.shape[1]),
                parts=by_q,
                **common,
            )
            if not self._draws_from_q or drafting.predict == "plain":
                return ranking
            hot = sampling.temperature > 0

            def by_noise() -> Int32[Array, "n ranks"]:
                bonus = prediction.predict_bonus(
                    logits, sampling, start, depth, get_history, rule=drafting.rule, parts=parts,
                    **common,
                )  # fmt: skip
                return jnp.where(hot[:, None], bonus, ranking.tokens)

            tokens = when(parts.sampled, jnp.any(hot), by_noise, lambda: ranking.tokens)
            return ranking._replace(tokens=tokens)

        logits = passes.logits(self._model, context.parameters, hidden)
        rows = logits.reshape(slot.shape[0], -1)
        return map_row_blocks(of_rows, rows, slot, start, depth, *of_history)
