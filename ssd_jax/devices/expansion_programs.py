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

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices import branching, passes, program_spec, record
from ssd_jax.devices.branching import Expansion
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

_FOLLOWING = (ANY, "greedy", "full")
"""Variants of `follow`, which draws nothing."""


class ExpansionPrograms:
    """Compiled programs beside those of `DraftPrograms`, for the same rows.

    With B slots, M branches, K tokens:
    `expand` and `grow` -> pages, scratch, expansion, news. `counts` [B, K + 1] holds the fan-outs
    F_0..F_L, `skip` [B, K + 1] the number of candidates of each k that are left to others,
    `lowered` [B, K] D of Saguaro sampling at each place of the branches' proposals. `news`
    [B, M, 2 K + 2] int32 holds for every branch its bonus token (-1: no branch), its number of
    tokens, the tokens, and the draft's confidence in them.
    `promote` -> pages, history, record, by a `Promotion`.
    `follow` -> pages, record, of `rows` [B] bool. All but `promote` have variants
    (`sampling/variants.py`).

    Args:
      base: programs of the records.
      branches: M; None is the number that the records have candidates for.
      others: programs of another M over the same base, whose `follow` serves these too.
      progress, compiler: see `program_spec.compile_all`; a compiler gets the programs instead.
    """

    def __init__(
        self,
        base: DraftPrograms,
        branches: int | None = None,
        others: ExpansionPrograms | None = None,
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
            "expansion": base.by_slots(jax.eval_shape(lambda: self.nothing(base.slots))),
            "counts": base.by_slots(program_spec.ints(base.slots, self._k + 1)),
            "skip": base.by_slots(program_spec.ints(base.slots, self._k + 1)),
            "promotion": base.by_slots(jax.eval_shape(lambda: no_promotion(base.slots, self._k))),
        }
        self._spec = functools.partial(
            base.spec, structs=self._structs, beside=("branches", self.branches)
        )
        specs: dict[Name, ProgramSpec] = {("promote", self._k): self._promote_spec()}
        for variant in base.variants:
            parts = VARIANTS[variant]
            for reach in base.reaches:
                expand, grow = (base.to((name, self._k), reach) for name in ("expand", "grow"))
                specs[variant_name(expand, variant)] = self._expand_spec(parts, reach)
                specs[variant_name(grow, variant)] = self._grow_spec(parts, reach)
            if others is None and variant in _FOLLOWING:
                specs[variant_name(("follow", self._k), variant)] = self._follow_spec(parts)
        made = {} if others is None else others._compiled
        shared = {name: program for name, program in made.items() if name[0] == "follow"}
        compiler = compiler or program_spec.compile_all
        self._compiled = dict(compiler(specs, self._model.mesh, progress)) | shared

    def __getitem__(self, name: str) -> Program:
        return self._compiled[name, self._k]

    @property
    def room(self) -> int:
        """See `program_spec.room_of`; includes the programs of the base."""
        return max(self.base.room, program_spec.room_of(self._compiled.values()))

    def fitting(self, name: str, position: Int32[np.ndarray, "B"], needed: Needed) -> Program:
        """The variant that fits; see `PagedPrograms.fitting` and `PagedPrograms.reaching`.

        It reaches branches of records whose pending tokens are at `position`.
        """
        asked = (lambda: Parts(adjusted=needed().adjusted)) if name == "follow" else needed
        at: Name = (name, self._k)
        if name != "follow":
            at = self.base.reaching(at, int(position.max()) + self._k + 2)
        return self._compiled[cheapest_variant(self._compiled, at, asked)]

    @classmethod
    def menu(
        cls, base: DraftPrograms, budgets: Sequence[int], progress: Progress | None = None
    ) -> tuple[ExpansionPrograms, ...]:
        """Programs of several M over the same base, ascending by M."""
        found: list[ExpansionPrograms] = []
        for branches in sorted(budgets):
            found.append(cls(base, branches, found[0] if found else None, progress))
        return tuple(found)

    def new_scratch(self) -> AllBranches:
        """Room for the branches' keys and values."""
        return zeros(self._structs["scratch"])

    def nothing(self, slots: int) -> Expansion:
        """An expansion of `slots` slots without branches."""
        rows = slots * self.branches
        path = jnp.full((rows, self._k + 1), -1, jnp.int32)
        return Expansion(self.base.records(rows), path)

    def _expand_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def expand(
            parameters, pages, history, table, scratch, kept, counts, skip, lowered, sampling
        ):
            length = kept.proposal.length
            sampling = greedy_where_idle(sampling, kept.start >= 0)
            forks = branching.forks(counts, skip, self.branches)
            forks = forks._replace(k=jnp.where(kept.start[:, None] >= 0, forks.k, -1))
            places = jnp.broadcast_to(jnp.arange(self._k), (self.base.share, self._k))
            ranked = self._ranked(
                lambda: passes.logits(self._model, parameters, kept.hidden),
                kept,
                places,
                kept.candidates,
                history,
                sampling,
                parts,
            )
            bonus = branching.before_last(kept._replace(candidates=ranked), forks)
            tail = (forks.k == length[:, None]) & forks.first
            position = kept.start[:, None] + jnp.where(tail, length[:, None], forks.k + 1)
            index = jnp.maximum(length - 1, 0)[:, None]
            last = jnp.take_along_axis(kept.proposal.tokens, index, axis=1)
            last = jnp.where(length[:, None] > 0, last, kept.pending[:, None])
            forked = bonus >= 0
            hidden, pages, scratch = self._forward(
                parameters,
                pages,
                self.base.table(table, reach),
                scratch,
                tokens=jnp.where(tail, last, bonus),
                positions=position,
                visible=jnp.where(tail, position + 1, jnp.where(forked, position, 0)),
                written=jnp.where(tail, position, -1),
                depth=jnp.where(forked, 0, -1),
            )
            before = jnp.arange(self._k) < forks.k[:, :, None]
            said = jnp.where(before, kept.proposal.tokens[:, None], -1)
            path = jnp.concatenate([said, bonus[:, :, None]], axis=-1).reshape(-1, self._k + 1)
            grown = self.nothing(self.base.share).records._replace(
                start=position.reshape(-1), pending=bonus.reshape(-1)
            )
            logits = passes.logits(self._model, parameters, hidden)
            grown = Expansion(grown, path)
            grown, c = self._draw(logits, hidden, history, grown, lowered, sampling, forked, parts)
            at_tail = jnp.argmax(tail, axis=1)[:, None, None]
            c_last = self._ranked(
                lambda: jnp.take_along_axis(logits, at_tail, axis=1),
                kept,
                length[:, None],
                jnp.take_along_axis(c.reshape(*tail.shape, -1), at_tail, axis=1),
                history,
                sampling,
                parts,
            )[:, 0]
            bonus = jnp.where(forked, bonus, branching.after_last(c_last, kept, forks))
            # Branches of k = L begin after s_L, which the tail has just run.
            start = kept.start[:, None] + forks.k + 1
            records = grown._replace(
                start=jnp.where(bonus >= 0, start, -1).reshape(-1), pending=bonus.reshape(-1)
            )
            expansion = Expansion(records, path.at[:, -1].set(bonus.reshape(-1)))
            return pages, scratch, expansion, self._news(expansion)

        results = ("pages", "scratch", "expansion", "slots")
        kept, told = ("pages", "scratch"), ("counts", "skip", "lowered")
        return self._spec(expand, donate=kept, results=results, told=told)

    def _grow_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def grow(parameters, pages, history, table, scratch, expansion, lowered, sampling):
            records, shape = expansion.records, (self.base.share, self.branches)
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
            records, _ = self._draw(
                logits, hidden, history, expansion, lowered, sampling, live.reshape(shape), parts
            )
            expansion = expansion._replace(records=records)
            return pages, scratch, expansion, self._news(expansion)

        kept = ("pages", "scratch", "expansion")
        return self._spec(grow, donate=kept, results=(*kept, "slots"))

    def _promote_spec(self) -> ProgramSpec:
        def promote(pages, history, table, scratch, expansion, promotion):
            history = penalties.add_output(history, promotion.committed)
            winner = promotion.winner
            hit = winner >= 0
            flat = jnp.arange(self.base.share) * self.branches + jnp.maximum(winner, 0)
            won = jax.tree.map(lambda array: array[flat], expansion.records)
            given = self.base.records(self.base.share)
            told = given.proposal._replace(tokens=promotion.tokens, length=promotion.limit)
            given = given._replace(proposal=as_point_mass_where(told, jnp.ones_like(hit)))
            new = record.where(hit, won, given)
            length = jnp.minimum(new.proposal.length, promotion.limit)
            new = new._replace(
                start=promotion.position,
                pending=promotion.pending,
                proposal=new.proposal._replace(length=length),
            )
            places = jnp.arange(self._k)
            moved = hit[:, None] & (places < length[:, None])
            positions = jnp.where(moved, promotion.position[:, None] + places, self.base.capacity)
            pages = passes.promote(
                self._model, pages, self.base.table(table), scratch, winner, positions
            )
            return pages, history, new

        results = ("pages", "history", "kept")
        kept, told = ("pages", "history"), ("promotion",)
        return self._spec(promote, donate=kept, results=results, told=told)

    def _follow_spec(self, parts: Parts) -> ProgramSpec:
        def follow(parameters, pages, history, table, kept, rows, sampling):
            places = jnp.arange(self._k)
            tokens = kept.proposal.tokens
            run = jnp.concatenate([kept.pending[:, None], tokens[:, :-1]], axis=1)
            live = rows[:, None] & (places < kept.proposal.length[:, None])
            sampling = greedy_where_idle(sampling, rows)
            positions = jnp.where(live, kept.start[:, None] + places, -1)
            size = self.base.capacity
            rows_of = self.base.table(table)
            hidden, pages = passes.step(
                self._model, parameters, pages, rows_of, run, positions, size
            )
            row = jnp.repeat(jnp.arange(self.base.share), self._k)
            before = jnp.tile(places, self.base.share)
            found = drafting.candidates(
                passes.logits(self._model, parameters, hidden.reshape(-1, hidden.shape[-1])),
                sampling_of(sampling, row),
                kept.start[row] + 1 + before,
                lambda: penalties.in_flight(history, tokens, row, before, self._outputs),
                tokens=self.base.tokens,
                count=self.base.candidates,
                outputs=self._outputs,
                adjusted=parts.adjusted,
            ).reshape(kept.candidates.shape)
            live = live[:, :, None]
            candidates = jnp.where(live, found, kept.candidates)
            states = jnp.where(live, hidden[..., : kept.hidden.shape[2]], kept.hidden)
            return pages, kept._replace(candidates=candidates, hidden=states)

        return self._spec(follow, donate=("pages",), results=("pages", "kept"))

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

    def _ranked(
        self,
        read: Callable[[], Float32[Array, "B n outputs"]],
        kept: Record,
        before: Int32[Array, "B n"],
        plain: Int32[Array, "B n W"],
        history: History,
        sampling: Sampling,
        parts: Parts,
    ) -> Int32[Array, "B n W"]:
        """Candidates for the bonus tokens after `before` proposed ones.

        Args:
          read: returns the logits there.
          plain: likeliest tokens there: the result for greedy rows, and without noise for all rows.
        """
        if self.base.drafting.predict == "plain":
            return plain
        hot = sampling.temperature > 0
        row = jnp.repeat(jnp.arange(self.base.share), before.shape[1])
        count = before.reshape(-1)
        tokens = kept.proposal.tokens

        def by_noise() -> Int32[Array, "B n W"]:
            found = prediction.predict_bonus(
                read().reshape(-1, self._columns),
                sampling_of(sampling, row),
                kept.start[row],
                count,
                lambda: penalties.in_flight(history, tokens, row, count, self._outputs),
                tokens=self.base.tokens,
                count=plain.shape[2],
                rule=self.base.drafting.rule,
                outputs=self._outputs,
                parts=parts,
            )
            return jnp.where(hot[:, None, None], found.reshape(plain.shape), plain)

        return when(parts.sampled, jnp.any(hot), by_noise, lambda: plain)

    def _draw(
        self,
        logits: Float32[Array, "rows M outputs"],
        hidden: Float32[Array, "rows M hidden"],
        history: History,
        expansion: Expansion,
        lowered: Int32[Array, "rows K"],
        sampling: Sampling,
        live: Bool[Array, "rows M"],
        parts: Parts,
    ) -> tuple[Record, Int32[Array, "B W"]]:
        """Draws the next token of every live branch from its logits.

        The logits were read from `hidden`.

        Returns: the records [rows * M], and the candidates of all rows, including the tail's.
        """
        records, live = expansion.records, live.reshape(-1)
        row = jnp.repeat(jnp.arange(self.base.share), self.branches)
        place = jnp.asarray(records.proposal.length)

        def draw(logits, row, start, place, tokens, path) -> Draw:
            def said() -> History:
                own = jnp.where(jnp.arange(self._k) < place[:, None], tokens, -1)
                both = jnp.concatenate([path, own], axis=1)
                rows = penalties.history_of(history, row, self._outputs)
                return penalties.add_output(rows, both, self._outputs)

            drawn_with = lowered[row, jnp.minimum(place, self._k - 1)]
            settings = sampling_of(sampling, row)
            return self.base.draw(logits, settings, start, place, said, drawn_with, parts)

        told = row, records.start, place, records.proposal.tokens, expansion.path
        drawn = map_row_blocks(draw, logits.reshape(-1, self._columns), *told)
        states = hidden.reshape(-1, hidden.shape[-1])
        records = record.put(records, drawn, states, place, live)
        proposal = records.proposal._replace(length=place + live)
        return records._replace(proposal=proposal), drawn.candidates

    def _news(self, expansion: Expansion) -> Int32[Array, "rows M told"]:
        records = expansion.records
        head = jnp.stack([expansion.path[:, -1], records.proposal.length], axis=1)
        told = jnp.concatenate([head, records.proposal.tokens, records.confidence], axis=1)
        return told.reshape(self.base.share, self.branches, -1)
