"""Ahead-of-time compiled programs that expand a draft's records into branches, and promote one.

They make up a round of speculative speculative decoding (paper, Algorithm 1), for all sequences at
once, while the target verifies the records:

`expand` runs, in one forward of M rows a sequence, the bonus tokens of all branches with k < L, and
in the first row with k = L the record's last token s_L, whose key and value go to the trunk. That
gives c_L, hence the bonus tokens of the branches with k = L; those start one forward later (the
tail rule) and propose K - 1 tokens unless one more forward is run. `grow` runs one more forward of
all branches. `promote` copies the keys and values of the branch whose outcome came true into the
trunk and makes it the record; `follow` runs the tokens of records that the draft did not make.

A branch sees the trunk up to where it forks and its own tokens. Keys and values of branches live in
a scratch of K tokens a branch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices import branching, passes, program_spec, record
from ssd_jax.devices.branching import Expansion, Forks
from ssd_jax.devices.draft_programs import DraftPrograms
from ssd_jax.devices.program_spec import Compiler, Name, Program, ProgramSpec
from ssd_jax.devices.record import Record
from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray
from ssd_jax.kernels.rows import map_row_blocks
from ssd_jax.models.decoder import AllBranches, Tree
from ssd_jax.models.functional import FunctionalModel, Parameters, zeros
from ssd_jax.roles.records import promotion as no_promotion
from ssd_jax.sampling import drafting, penalties, prediction
from ssd_jax.sampling.drafting import Draw
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.proposal import as_point_mass_where
from ssd_jax.sampling.settings import Sampling, greedy_where_idle, sampling_of
from ssd_jax.sampling.variants import (
    ANY,
    VARIANTS,
    Needed,
    Parts,
    cheapest_variant,
    variant_name,
    when,
)

_FOLLOW_VARIANTS = (ANY, "greedy", "full")
"""Variants of `follow`, which draws nothing."""


class _Context(NamedTuple):
    """What a step draws with.

    Attributes:
      history, sampling, lowered: of every slot, as the programs take them.
      parts: of the variant.
    """

    history: History
    sampling: Sampling
    lowered: Int32[Array, "B K"]
    parts: Parts


class _ForkRows(NamedTuple):
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


class ExpansionPrograms:
    """Compiled programs beside those of `DraftPrograms`, for the same rows.

    With B slots, M branches, K tokens:
    `expand` and `grow` -> pages, scratch, expansion, packed. `counts` [B, K + 1] holds the fan-outs
    F_0..F_L, `skip` [B, K + 1] the number of candidates of each k that are left to others,
    `lowered` [B, K] D of Saguaro sampling at each place of the branches' proposals. `packed`
    [B, M, 2 K + 2] int32 holds for every branch its bonus token (-1: no branch), its number of
    tokens, the tokens, and the draft's confidence in them.
    `promote` -> pages, history, record, by a `Promotion`.
    `follow` -> pages, record, of `rows` [B] bool. All but `promote` have variants
    (`sampling/variants.py`).

    Args:
      base: programs of the records.
      branches: M; None is the number that the records have candidates for.
      sibling: programs of another M over the same base, whose `follow` serves these too.
      progress, compiler: see `program_spec.compile_all`; a compiler gets the programs instead.
    """

    def __init__(
        self,
        base: DraftPrograms,
        branches: int | None = None,
        sibling: ExpansionPrograms | None = None,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.base = base
        self.branches = base.drafting.branches if branches is None else branches
        self._model: FunctionalModel = base.model
        self._k = base.drafting.k
        self._columns = base.model.config.outputs
        self._outputs = base.model.output_ids
        self._structs = base.structs | {
            "scratch": self._model.branch_struct(base.slots, self._k, self.branches),
            "expansion": base.by_slots(jax.eval_shape(lambda: self.empty_expansion(base.slots))),
            "counts": base.by_slots(program_spec.ints(base.slots, self._k + 1)),
            "skip": base.by_slots(program_spec.ints(base.slots, self._k + 1)),
            "promotion": base.by_slots(jax.eval_shape(lambda: no_promotion(base.slots, self._k))),
        }
        self._spec = functools.partial(
            base.spec, structs=self._structs, extra_key=("branches", self.branches)
        )
        specs: dict[Name, ProgramSpec] = {("promote", self._k): self._promote_spec()}
        for variant in base.variants:
            parts = VARIANTS[variant]
            for reach in base.reaches:
                expand, grow = (
                    base.with_reach((name, self._k), reach) for name in ("expand", "grow")
                )
                specs[variant_name(expand, variant)] = self._expand_spec(parts, reach)
                specs[variant_name(grow, variant)] = self._grow_spec(parts, reach)
            if sibling is None and variant in _FOLLOW_VARIANTS:
                specs[variant_name(("follow", self._k), variant)] = self._follow_spec(parts)
        compiled = {} if sibling is None else sibling._compiled
        shared = {name: program for name, program in compiled.items() if name[0] == "follow"}
        compiler = compiler or program_spec.compile_all
        self._compiled = dict(compiler(specs, self._model.mesh, progress)) | shared

    def __getitem__(self, name: str) -> Program:
        return self._compiled[name, self._k]

    @property
    def working_memory(self) -> int:
        """As `PagedPrograms.working_memory`, with the programs of the base."""
        return max(self.base.working_memory, program_spec.working_memory(self._compiled.values()))

    def select(self, name: str, position: Int32[np.ndarray, "B"], needed: Needed) -> Program:
        """The cheapest variant with the parts of sampling that are needed.

        It reaches branches of records whose pending tokens are at `position`.
        """
        needed_parts = (lambda: Parts(adjusted=needed().adjusted)) if name == "follow" else needed
        task: Name = (name, self._k)
        if name != "follow":
            task = self.base.select_reach(task, int(position.max()) + self._k + 2)
        return self._compiled[cheapest_variant(self._compiled, task, needed_parts)]

    @classmethod
    def menu(
        cls, base: DraftPrograms, budgets: Sequence[int], progress: Progress | None = None
    ) -> tuple[ExpansionPrograms, ...]:
        """Programs of several M over the same base, ascending by M."""
        programs: list[ExpansionPrograms] = []
        for branches in sorted(budgets):
            programs.append(cls(base, branches, programs[0] if programs else None, progress))
        return tuple(programs)

    def new_scratch(self) -> AllBranches:
        """Zeroed keys and values of all branches."""
        return zeros(self._structs["scratch"])

    def empty_expansion(self, slots: int) -> Expansion:
        """An expansion of `slots` slots without branches."""
        rows = slots * self.branches
        path = jnp.full((rows, self._k + 1), -1, jnp.int32)
        return Expansion(self.base.records(rows), path)

    def _expand_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def expand(
            parameters, pages, history, table, scratch, records, counts, skip, lowered, sampling
        ):
            sampling = greedy_where_idle(sampling, records.start >= 0)
            context = _Context(history, sampling, lowered, parts)
            rows = self._place_forks(parameters, records, counts, skip, context)
            hidden, pages, scratch = self._run_forks(
                parameters, pages, self.base.table(table, reach), scratch, rows
            )
            expansion, logits, candidates = self._draw_forks(
                parameters, hidden, records, rows, context
            )
            expansion = self._name_tail(expansion, logits, candidates, records, rows, context)
            return pages, scratch, expansion, self._pack(expansion)

        results = ("pages", "scratch", "expansion", "slots")
        donated, host_args = ("pages", "scratch"), ("counts", "skip", "lowered")
        return self._spec(expand, donate=donated, results=results, host_args=host_args)

    def _place_forks(
        self,
        parameters: Parameters,
        records: Record,
        counts: Int32[Array, "B F"],
        skip: Int32[Array, "B F"],
        context: _Context,
    ) -> _ForkRows:
        """Step 1: the outcomes (k, t*) to prepare, F_k of them for k accepted tokens."""
        length = records.proposal.length
        forks = branching.place_forks(counts, skip, self.branches)
        forks = forks._replace(k=jnp.where(records.start[:, None] >= 0, forks.k, -1))
        # t* after k < L accepted tokens is one of c_k, which the record has.
        places = jnp.broadcast_to(jnp.arange(self._k), (self.base.local_slots, self._k))
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
        return _ForkRows(forks, bonus, forked, tail, jnp.where(tail, last, bonus), positions)

    def _run_forks(
        self,
        parameters: Parameters,
        pages: PageArray,
        table: kv_pages.PageTable,
        scratch: AllBranches,
        rows: _ForkRows,
    ) -> tuple[Float32[Array, "B M hidden"], PageArray, AllBranches]:
        """Step 2: one forward of every t* with k < L, and of s_L in the tail's row."""
        tail, forked, positions = rows.tail, rows.forked, rows.positions
        return self._forward(
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

    def _draw_forks(
        self,
        parameters: Parameters,
        hidden: Float32[Array, "B M hidden"],
        records: Record,
        rows: _ForkRows,
        context: _Context,
    ) -> tuple[Expansion, Float32[Array, "B M outputs"], Int32[Array, "n W"]]:
        """Step 3: the first token of every branch with k < L.

        Returns: the branches, and logits and candidates of all rows, where the tail's are c_L.
        """
        accepted = jnp.arange(self._k) < rows.forks.k[:, :, None]
        tokens = jnp.where(accepted, records.proposal.tokens[:, None], -1)  # s_1..s_k
        path = jnp.concatenate([tokens, rows.bonus[:, :, None]], axis=-1)
        path = path.reshape(-1, self._k + 1)
        branches = self.empty_expansion(self.base.local_slots).records._replace(
            start=rows.positions.reshape(-1), pending=rows.bonus.reshape(-1)
        )
        logits = passes.logits(self._model, parameters, hidden)
        expansion = Expansion(branches, path)
        branches, candidates = self._draw(logits, hidden, expansion, rows.forked, context)
        return Expansion(branches, path), logits, candidates

    def _name_tail(
        self,
        expansion: Expansion,
        logits: Float32[Array, "B M outputs"],
        candidates: Int32[Array, "n W"],
        records: Record,
        rows: _ForkRows,
        context: _Context,
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

    def _grow_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def grow(parameters, pages, history, table, scratch, expansion, lowered, sampling):
            records, shape = expansion.records, (self.base.local_slots, self.branches)
            length = records.proposal.length
            live = (records.start >= 0) & (length < self._k)
            sampling = greedy_where_idle(sampling, live.reshape(shape).any(axis=1))
            index = jnp.maximum(length - 1, 0)[:, None]
            last = jnp.take_along_axis(records.proposal.tokens, index, axis=1)[:, 0]
            last = jnp.where(length > 0, last, records.pending)
            hidden, pages, scratch = self._forward(
                parameters,
                pages,
                self.base.table(table, reach),
                scratch,
                tokens=last.reshape(shape),
                positions=(records.start + length).reshape(shape),
                visible=jnp.where(live, records.start, 0).reshape(shape),
                written=jnp.full(shape, -1),
                depth=jnp.where(live, length, -1).reshape(shape),
            )
            logits = passes.logits(self._model, parameters, hidden)
            context = _Context(history, sampling, lowered, parts)
            records, _ = self._draw(logits, hidden, expansion, live.reshape(shape), context)
            expansion = expansion._replace(records=records)
            return pages, scratch, expansion, self._pack(expansion)

        donated = ("pages", "scratch", "expansion")
        return self._spec(grow, donate=donated, results=(*donated, "slots"))

    def _promote_spec(self) -> ProgramSpec:
        def promote(pages, history, table, scratch, expansion, promotion):
            history = penalties.add_output(history, promotion.committed)
            winner = promotion.winner
            hit = winner >= 0
            flat = jnp.arange(self.base.local_slots) * self.branches + jnp.maximum(winner, 0)
            winning_records = jax.tree.map(lambda array: array[flat], expansion.records)
            given_records = self.base.records(self.base.local_slots)
            proposal = given_records.proposal._replace(
                tokens=promotion.tokens, length=promotion.limit
            )
            given_records = given_records._replace(
                proposal=as_point_mass_where(proposal, jnp.ones_like(hit))
            )
            records = record.where(hit, winning_records, given_records)
            length = jnp.minimum(records.proposal.length, promotion.limit)
            records = records._replace(
                start=promotion.position,
                pending=promotion.pending,
                proposal=records.proposal._replace(length=length),
            )
            places = jnp.arange(self._k)
            in_branch = hit[:, None] & (places < length[:, None])
            positions = jnp.where(
                in_branch, promotion.position[:, None] + places, self.base.capacity
            )
            pages = passes.promote(
                self._model, pages, self.base.table(table), scratch, winner, positions
            )
            return pages, history, records

        results, host_args = ("pages", "history", "records"), ("promotion",)
        return self._spec(
            promote, donate=("pages", "history"), results=results, host_args=host_args
        )

    def _follow_spec(self, parts: Parts) -> ProgramSpec:
        def follow(parameters, pages, history, table, records, rows, sampling):
            places = jnp.arange(self._k)
            tokens = records.proposal.tokens
            inputs = jnp.concatenate([records.pending[:, None], tokens[:, :-1]], axis=1)
            live = rows[:, None] & (places < records.proposal.length[:, None])
            sampling = greedy_where_idle(sampling, rows)
            positions = jnp.where(live, records.start[:, None] + places, -1)
            size = self.base.capacity
            slot_table = self.base.table(table)
            hidden, pages = passes.step(
                self._model, parameters, pages, slot_table, inputs, positions, size
            )
            row = jnp.repeat(jnp.arange(self.base.local_slots), self._k)
            accepted = jnp.tile(places, self.base.local_slots)
            likeliest = drafting.candidates(
                passes.logits(self._model, parameters, hidden.reshape(-1, hidden.shape[-1])),
                sampling_of(sampling, row),
                records.start[row] + 1 + accepted,
                lambda: penalties.in_flight(history, tokens, row, accepted, self._outputs),
                tokens=self.base.tokens,
                count=self.base.candidates,
                outputs=self._outputs,
                adjusted=parts.adjusted,
            ).reshape(records.candidates.shape)
            live = live[:, :, None]
            candidates = jnp.where(live, likeliest, records.candidates)
            states = jnp.where(live, hidden[..., : records.hidden.shape[2]], records.hidden)
            return pages, records._replace(candidates=candidates, hidden=states)

        return self._spec(follow, donate=("pages",), results=("pages", "records"))

    def _forward(
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
        size = self.base.capacity
        branch = jnp.broadcast_to(jnp.arange(self.branches), depth.shape)
        tree = Tree(
            scratch,
            jnp.stack([branch, depth], axis=-1),
            jnp.where(written < 0, size, written),
        )
        module = self._model.module(parameters)
        hidden, pages, grown = module.hidden(
            jnp.maximum(tokens, 0),
            jnp.maximum(positions, 0),
            jnp.clip(visible, 0, size),
            pages,
            table,
            tree,
        )
        assert grown is not None
        return hidden, pages, grown

    def _rank(
        self,
        read_logits: Callable[[], Float32[Array, "B n outputs"]],
        records: Record,
        accepted: Int32[Array, "B n"],
        likeliest: Int32[Array, "B n W"],
        context: _Context,
    ) -> Int32[Array, "B n W"]:
        """Candidates c_k for the bonus token after `accepted` = k proposed ones.

        Args:
          read_logits: returns the logits there.
          likeliest: the likeliest tokens there, which are the result for greedy rows, and, where
            noise does not rank, for all rows.
        """
        if self.base.drafting.predict == "plain":
            return likeliest
        sampling, parts = context.sampling, context.parts
        hot = sampling.temperature > 0
        row = jnp.repeat(jnp.arange(self.base.local_slots), accepted.shape[1])
        k = accepted.reshape(-1)
        tokens = records.proposal.tokens

        def by_noise() -> Int32[Array, "B n W"]:
            ranked = prediction.predict_bonus(
                read_logits().reshape(-1, self._columns),
                sampling_of(sampling, row),
                records.start[row],
                k,
                lambda: penalties.in_flight(context.history, tokens, row, k, self._outputs),
                tokens=self.base.tokens,
                count=likeliest.shape[2],
                rule=self.base.drafting.rule,
                outputs=self._outputs,
                parts=parts,
            )
            return jnp.where(hot[:, None, None], ranked.reshape(likeliest.shape), likeliest)

        return when(parts.sampled, jnp.any(hot), by_noise, lambda: likeliest)

    def _draw(
        self,
        logits: Float32[Array, "rows M outputs"],
        hidden: Float32[Array, "rows M hidden"],
        expansion: Expansion,
        live: Bool[Array, "rows M"],
        context: _Context,
    ) -> tuple[Record, Int32[Array, "B W"]]:
        """Draws the next token of every live branch from its logits.

        The logits were read from `hidden`.

        Returns: the records [rows * M], and the candidates of all rows, including the tail's.
        """
        history, sampling, lowered, parts = context
        records, live = expansion.records, live.reshape(-1)
        row = jnp.repeat(jnp.arange(self.base.local_slots), self.branches)
        place = jnp.asarray(records.proposal.length)

        def draw(logits, row, start, place, tokens, path) -> Draw:
            def branch_history() -> History:
                drafted = jnp.where(jnp.arange(self._k) < place[:, None], tokens, -1)
                output = jnp.concatenate([path, drafted], axis=1)
                rows = penalties.history_of(history, row, self._outputs)
                return penalties.add_output(rows, output, self._outputs)

            d = lowered[row, jnp.minimum(place, self._k - 1)]
            settings = sampling_of(sampling, row)
            return self.base.draw(logits, settings, start, place, branch_history, d, parts)

        arrays = row, records.start, place, records.proposal.tokens, expansion.path
        drawn = map_row_blocks(draw, logits.reshape(-1, self._columns), *arrays)
        states = hidden.reshape(-1, hidden.shape[-1])
        records = record.put(records, drawn, states, place, live)
        proposal = records.proposal._replace(length=place + live)
        return records._replace(proposal=proposal), drawn.candidates

    def _pack(self, expansion: Expansion) -> Int32[Array, "rows M columns"]:
        """The branches as one array; see the class."""
        records = expansion.records
        head = jnp.stack([expansion.path[:, -1], records.proposal.length], axis=1)
        columns = jnp.concatenate([head, records.proposal.tokens, records.confidence], axis=1)
        return columns.reshape(self.base.local_slots, self.branches, -1)
