"""The steps of an expansion, which the programs of `expansion_programs` are made of.

An expansion is one forward of M rows a sequence: place the forks, run them, draw their first
tokens, and name the bonus tokens of the branches that accept all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.devices.branches import branching
from ssd_jax.devices.branches.branching import Expansion, Forks
from ssd_jax.devices.draft import record
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.draft.record import Record
from ssd_jax.devices.programs import passes
from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray, chain_path
from ssd_jax.kernels.rows import map_row_blocks
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.token_tree import AllBranches, Tree
from ssd_jax.sampling import penalties, prediction
from ssd_jax.sampling.drafting import Draw
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.variants import Parts, when


class StepContext(NamedTuple):
    """What a step draws with.

    Attributes:
      history, sampling, lowered: of every slot, as the programs take them.
      parts: of the variant.
    """

    history: History
    sampling: Sampling
    lowered: Int32[Array, "B K"]
    parts: Parts


class ForkRows(NamedTuple):
    """The rows of the forward of `expand`, one for each branch.

    Attributes:
      forks: the outcomes of the branches.
      bonus: t* of branches with k < L; -1 for all others.
      forked: whether there is such a t*, which the row runs.
      tail: the first branch with k = L, whose row runs the record's last token.
      tokens, positions: what each row runs, and where.
    """

    forks: Forks
    bonus: Int32[Array, "B M"]
    forked: Bool[Array, "B M"]
    tail: Bool[Array, "B M"]
    tokens: Int32[Array, "B M"]
    positions: Int32[Array, "B M"]


class ExpansionSteps:
    """The steps for M branches of each sequence; they are called while tracing.

    Args:
      base: programs of the records.
      branches: M.
    """

    def __init__(self, base: DraftPrograms, branches: int) -> None:
        self._base, self._branches = base, branches
        self._model: FunctionalModel = base.model
        self._k = base.drafting.k
        self._columns = base.model.config.outputs
        self._outputs = base.model.output_ids

    def empty(self, slots: int) -> Expansion:
        """An expansion of `slots` slots without branches."""
        path = jnp.full((slots * self._branches, self._k + 1), -1, jnp.int32)
        return Expansion(self._base.records(slots * self._branches), path)

    def place_forks(
        self,
        parameters: Parameters,
        records: Record,
        counts: Int32[Array, "B F"],
        skip: Int32[Array, "B F"],
        context: StepContext,
    ) -> ForkRows:
        """Step 1: the outcomes (k, t*) to prepare, F_k of them for k accepted tokens."""
        length = records.proposal.length
        forks = branching.place_forks(counts, skip, self._branches)
        forks = forks._replace(k=jnp.where(records.start[:, None] >= 0, forks.k, -1))
        # t* after k < L accepted tokens is one of c_k, which the record has.
        places = jnp.broadcast_to(jnp.arange(self._k), (self._base.local_slots, self._k))
        candidates = self._rank(
            lambda: passes.logits(self._model, parameters, records.hidden),
            records,
            places,
            records.candidates,
            context,
        )
        bonus = branching.early_bonus_tokens(records._replace(candidates=candidates), forks)
        # The first branch of k = L has no t* yet: its row runs s_L (the pending token, if L = 0).
        tail = (forks.k == length[:, None]) & forks.first
        positions = records.start[:, None] + jnp.where(tail, length[:, None], forks.k + 1)
        index = jnp.maximum(length - 1, 0)[:, None]
        last = jnp.take_along_axis(records.proposal.tokens, index, axis=1)
        last = jnp.where(length[:, None] > 0, last, records.pending[:, None])
        forked = bonus >= 0
        return ForkRows(forks, bonus, forked, tail, jnp.where(tail, last, bonus), positions)

    def run_forks(
        self,
        parameters: Parameters,
        pages: PageArray,
        table: kv_pages.PageTable,
        scratch: AllBranches,
        rows: ForkRows,
    ) -> tuple[Float32[Array, "B M hidden"], PageArray, AllBranches]:
        """Step 2: one forward of every t* with k < L, and of s_L in the tail's row."""
        tail, forked, positions = rows.tail, rows.forked, rows.positions
        return self.run(
            parameters,
            pages,
            table,
            scratch,
            tokens=rows.tokens,
            positions=positions,
            # A branch sees the trunk up to its fork; the tail is the trunk's own last token.
            visible=jnp.where(tail, positions + 1, jnp.where(forked, positions, 0)),
            written=jnp.where(tail, positions, -1),
            depth=jnp.where(forked, 0, -1),
        )

    def draw_forks(
        self,
        parameters: Parameters,
        hidden: Float32[Array, "B M hidden"],
        records: Record,
        rows: ForkRows,
        context: StepContext,
    ) -> tuple[Expansion, Float32[Array, "B M outputs"], Int32[Array, "n W"]]:
        """Step 3: the first token of every branch with k < L.

        Returns: the branches, and logits and candidates of all rows, where the tail's are c_L.
        """
        accepted = jnp.arange(self._k) < rows.forks.k[:, :, None]
        tokens = jnp.where(accepted, records.proposal.tokens[:, None], -1)  # s_1..s_k
        path = jnp.concatenate([tokens, rows.bonus[:, :, None]], axis=-1)
        path = path.reshape(-1, self._k + 1)
        branches = self.empty(self._base.local_slots).records._replace(
            start=rows.positions.reshape(-1), pending=rows.bonus.reshape(-1)
        )
        logits = passes.logits(self._model, parameters, hidden)
        expansion = Expansion(branches, path)
        branches, candidates = self.draw(logits, hidden, expansion, rows.forked, context)
        return Expansion(branches, path), logits, candidates

    def name_tail(
        self,
        expansion: Expansion,
        logits: Float32[Array, "B M outputs"],
        candidates: Int32[Array, "n W"],
        records: Record,
        rows: ForkRows,
        context: StepContext,
    ) -> Expansion:
        """Step 4: t* of the branches with k = L, from c_L; their first tokens are `grow`'s."""
        branches, forks, tail = expansion.records, rows.forks, rows.tail
        at_tail = jnp.argmax(tail, axis=1)[:, None, None]
        c_last = self._rank(
            lambda: jnp.take_along_axis(logits, at_tail, axis=1),
            records,
            jnp.asarray(records.proposal.length)[:, None],
            jnp.take_along_axis(candidates.reshape(*tail.shape, -1), at_tail, axis=1),
            context,
        )[:, 0]
        tail_bonus = branching.tail_bonus_tokens(c_last, records, forks)
        bonus = jnp.where(rows.forked, rows.bonus, tail_bonus)
        # Branches of k = L begin after s_L, which the tail has just run.
        start = records.start[:, None] + forks.k + 1
        branches = branches._replace(
            start=jnp.where(bonus >= 0, start, -1).reshape(-1), pending=bonus.reshape(-1)
        )
        return Expansion(branches, expansion.path.at[:, -1].set(bonus.reshape(-1)))

    def run(
        self,
        parameters: Parameters,
        pages: PageArray,
        table: kv_pages.PageTable,
        scratch: AllBranches,
        *,
        tokens: Int32[Array, "B M"],
        positions: Int32[Array, "B M"],
        visible: Int32[Array, "B M"],
        written: Int32[Array, "B M"],
        depth: Int32[Array, "B M"],
    ) -> tuple[Float32[Array, "B M hidden"], PageArray, AllBranches]:
        """Runs M tokens a row.

        A token with a negative `written` is not written to the pages; one with a depth of -1 is no
        branch's.
        """
        size = self._base.capacity
        branch = jnp.broadcast_to(jnp.arange(self._branches), depth.shape)
        tree = Tree(
            scratch,
            jnp.stack([branch, chain_path(depth + 1)], axis=-1),
            jnp.where(written < 0, size, written),
        )
        module = self._model.module(parameters)
        hidden, pages, new_scratch = module.hidden(
            jnp.maximum(tokens, 0),
            jnp.maximum(positions, 0),
            jnp.clip(visible, 0, size),
            pages,
            table,
            tree,
        )
        assert new_scratch is not None
        return hidden, pages, new_scratch

    def _rank(
        self,
        read_logits: Callable[[], Float32[Array, "B n outputs"]],
        records: Record,
        accepted: Int32[Array, "B n"],
        likeliest: Int32[Array, "B n W"],
        context: StepContext,
    ) -> Int32[Array, "B n W"]:
        """Candidates c_k for the bonus token after `accepted` = k proposed ones.

        Args:
          read_logits: returns the logits there.
          likeliest: the likeliest tokens there, which are the result for greedy rows, and, where
            noise does not rank, for all rows.
        """
        if self._base.drafting.predict == "plain":
            return likeliest
        sampling, parts = context.sampling, context.parts
        hot = sampling.temperature > 0
        row = jnp.repeat(jnp.arange(self._base.local_slots), accepted.shape[1])
        k = accepted.reshape(-1)
        tokens = records.proposal.tokens

        def by_noise() -> Int32[Array, "B n W"]:
            ranked = prediction.predict_bonus(
                read_logits().reshape(-1, self._columns),
                sampling_of(sampling, row),
                records.start[row],
                k,
                lambda: penalties.in_flight(
                    context.history, tokens, row, chain_path(k), self._outputs
                ),
                tokens=self._base.tokens,
                count=likeliest.shape[2],
                rule=self._base.drafting.rule,
                outputs=self._outputs,
                parts=parts,
            )
            return jnp.where(hot[:, None, None], ranked.reshape(likeliest.shape), likeliest)

        return when(parts.sampled, jnp.any(hot), by_noise, lambda: likeliest)

    def draw(
        self,
        logits: Float32[Array, "rows M outputs"],
        hidden: Float32[Array, "rows M hidden"],
        expansion: Expansion,
        live: Bool[Array, "rows M"],
        context: StepContext,
    ) -> tuple[Record, Int32[Array, "B W"]]:
        """Draws the next token of every live branch from its logits.

        The logits were read from `hidden`.

        Returns: the records [rows * M], and the candidates of all rows, including the tail's.
        """
        history, sampling, lowered, parts = context
        records, live = expansion.records, live.reshape(-1)
        row = jnp.repeat(jnp.arange(self._base.local_slots), self._branches)
        place = jnp.asarray(records.proposal.length)

        def draw(logits, row, start, place, tokens, path) -> Draw:
            def branch_history() -> History:
                drafted = jnp.where(jnp.arange(self._k) < place[:, None], tokens, -1)
                output = jnp.concatenate([path, drafted], axis=1)
                rows = penalties.history_of(history, row, self._outputs)
                return penalties.add_output(rows, output, self._outputs)

            d = lowered[row, jnp.minimum(place, self._k - 1)]
            settings = sampling_of(sampling, row)
            return self._base.draw(logits, settings, start, place, branch_history, d, parts)

        arrays = row, records.start, place, records.proposal.tokens, expansion.path
        drawn = map_row_blocks(draw, logits.reshape(-1, self._columns), *arrays)
        states = hidden.reshape(-1, hidden.shape[-1])
        records = record.put(records, drawn, states, place, live)
        proposal = records.proposal._replace(length=place + live)
        return records._replace(proposal=proposal), drawn.candidates

    def pack(self, expansion: Expansion) -> Int32[Array, "rows M columns"]:
        """The branches as one array; see the class."""
        records = expansion.records
        head = jnp.stack([expansion.path[:, -1], records.proposal.length], axis=1)
        columns = jnp.concatenate([head, records.proposal.tokens, records.confidence], axis=1)
        return columns.reshape(self._base.local_slots, self._branches, -1)
