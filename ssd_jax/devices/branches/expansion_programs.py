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

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.branches.branching import Expansion
from ssd_jax.devices.branches.expansion_steps import ExpansionSteps, StepContext
from ssd_jax.devices.draft import record
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.batch_sizes import BatchPlan, Task
from ssd_jax.devices.programs.batched import HasBatches, LeftOut, MakeSpec
from ssd_jax.devices.programs.program_spec import Compiler, Name, Program, ProgramSpec
from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.models.token_tree import AllBranches
from ssd_jax.roles.records import no_promotion
from ssd_jax.sampling import drafting, penalties
from ssd_jax.sampling.proposal import as_point_mass_where
from ssd_jax.sampling.settings import greedy_where_idle, sampling_of
from ssd_jax.sampling.variants import ANY, VARIANTS, Needed, Parts, cheapest_variant
from ssd_jax.system.new_arrays import create_arrays, zeros

_FOLLOW_VARIANTS = (ANY, "greedy", "full")
"""Variants of `follow`, which draws nothing."""

BRANCHES = "branches"
"""What batch sizes are chosen for; see `BatchSizes`."""


class ExpansionPrograms(HasBatches):
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
      batches: of how many slots there are programs, besides all.
      progress, compiler: see `program_spec.compile_all`; a compiler gets the programs instead.
    """

    def __init__(
        self,
        base: DraftPrograms,
        branches: int | None = None,
        sibling: ExpansionPrograms | None = None,
        batches: BatchPlan | None = None,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.branches = base.drafting.branches if branches is None else branches
        self.model, self._k = base.model, base.drafting.k
        self._use(base)
        super().__init__()
        self.batches = (batches or BatchPlan()).below(self.local_slots)
        compiled = {} if sibling is None else sibling._compiled
        shared = {name: program for name, program in compiled.items() if name[0] == "follow"}
        specs = self.specs() | self._specs_at_start()
        specs = {name: spec for name, spec in specs.items() if name not in shared}
        compiler = compiler or program_spec.compile_all
        self._compiled = dict(compiler(specs, self.model.mesh, progress)) | shared
        self._offer_batches()

    def _use(self, base: DraftPrograms) -> None:
        """Makes specifications for the slots of a base."""
        self.base, self.local_slots, slots = base, base.local_slots, base.slots
        steps = self._steps = ExpansionSteps(base, self.branches)
        self._structs = base.structs | {
            "scratch": self.model.branch_struct(slots, self._k, self.branches),
            "expansion": base.by_slots(jax.eval_shape(lambda: steps.empty(slots))),
            "counts": base.by_slots(program_spec.ints(slots, self._k + 1)),
            "skip": base.by_slots(program_spec.ints(slots, self._k + 1)),
            "promotion": base.by_slots(jax.eval_shape(lambda: no_promotion(slots, self._k))),
        }
        self._spec = functools.partial(
            base.spec, structs=self._structs, extra_key=("branches", self.branches)
        )

    @property
    @override
    def tasks(self) -> tuple[Task, ...]:
        """Branches."""
        return (BRANCHES,)

    @override
    def of_batch(self, size: int) -> Self:
        part = copy.copy(self)
        part._use(self.base.of_batch(size))
        return part

    @override
    def makers(self) -> Iterator[tuple[Name, str, MakeSpec]]:
        kind, base, k = ExpansionPrograms, self.base, self._k
        yield ("promote", k), ANY, kind._promote_spec
        specs = {"expand": kind._expand_spec, "grow": kind._grow_spec}
        yield from base.of_variants(base.variants, specs, k)
        for variant in base.variants:
            if variant in _FOLLOW_VARIANTS:
                follow = functools.partial(kind._follow_spec, parts=VARIANTS[variant])
                yield ("follow", k), variant, follow

    @override
    def left_out(self) -> LeftOut:
        """Slots without records and branches."""
        slots, unused = self.local_slots, {"slots": lambda packed: packed - 1}
        return {
            "promote": {"records": lambda _: self.base.records(slots)},
            "expand": {"expansion": lambda _: self._steps.empty(slots), **unused},
            "grow": unused,
        }

    def promote(self, size: int) -> Program:
        """The program `promote` of a batch size."""
        return self._compiled[self.batch_name(("promote", self._k), size)]

    @property
    def working_memory(self) -> int:
        """As `PagedPrograms.working_memory`, with the programs of the base."""
        return max(self.base.working_memory, program_spec.working_memory(self._compiled.values()))

    def select(
        self, name: str, position: Int32[np.ndarray, "B"], needed: Needed, size: int
    ) -> Program:
        """The cheapest variant with the parts of sampling that are needed, of a batch size.

        It reaches branches of records whose pending tokens are at `position`.
        """
        needed_parts = (lambda: Parts(adjusted=needed().adjusted)) if name == "follow" else needed
        task: Name = (name, self._k)
        if name != "follow":
            task = self.base.select_reach(task, int(position.max()) + self._k + 2)
        task = self.batch_name(task, size)
        return self._compiled[cheapest_variant(self._compiled, task, needed_parts)]

    @classmethod
    def menu(
        cls,
        base: DraftPrograms,
        budgets: Sequence[int],
        progress: Progress | None = None,
        batches: BatchPlan | None = None,
    ) -> tuple[ExpansionPrograms, ...]:
        """Programs of several M over the same base, ascending by M."""
        programs: list[ExpansionPrograms] = []
        for branches in sorted(budgets):
            sibling = programs[0] if programs else None
            made = cls(base, branches, sibling, batches, progress)
            made.batch_sizes.before_compiling = base.batch_sizes.before_compiling
            programs.append(made)
        return tuple(programs)

    def new_scratch(self) -> AllBranches:
        """Zeroed keys and values of all branches."""
        return zeros(self._structs["scratch"])

    def new_expansion(self) -> Expansion:
        """No branches in any slot, on the model's devices."""
        return self.model.place(create_arrays(lambda: self._steps.empty(self.base.slots)))

    def _expand_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def expand(
            parameters, pages, history, table, scratch, records, counts, skip, lowered, sampling
        ):
            steps, sampling = self._steps, greedy_where_idle(sampling, records.start >= 0)
            context = StepContext(history, sampling, lowered, parts)
            rows = steps.place_forks(parameters, records, counts, skip, context)
            hidden, pages, scratch = steps.run_forks(
                parameters, pages, self.base.table(table, reach), scratch, rows
            )
            expansion, logits, candidates = steps.draw_forks(
                parameters, hidden, records, rows, context
            )
            expansion = steps.name_tail(expansion, logits, candidates, records, rows, context)
            return pages, scratch, expansion, self._steps.pack(expansion)

        results = ("pages", "scratch", "expansion", "slots")
        donated, host_args = ("pages", "scratch"), ("counts", "skip", "lowered")
        return self._spec(expand, donate=donated, results=results, host_args=host_args)

    def _grow_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def grow(parameters, pages, history, table, scratch, expansion, lowered, sampling):
            records, shape = expansion.records, (self.base.local_slots, self.branches)
            length = records.proposal.length
            live = (records.start >= 0) & (length < self._k)
            sampling = greedy_where_idle(sampling, live.reshape(shape).any(axis=1))
            index = jnp.maximum(length - 1, 0)[:, None]
            last = jnp.take_along_axis(records.proposal.tokens, index, axis=1)[:, 0]
            last = jnp.where(length > 0, last, records.pending)
            hidden, pages, scratch = self._steps.run(
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
            logits = passes.logits(self.model, parameters, hidden)
            context = StepContext(history, sampling, lowered, parts)
            records, _ = self._steps.draw(logits, hidden, expansion, live.reshape(shape), context)
            expansion = expansion._replace(records=records)
            return pages, scratch, expansion, self._steps.pack(expansion)

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
                self.model, pages, self.base.table(table), scratch, winner, positions
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
                self.model, parameters, pages, slot_table, inputs, positions, size
            )
            row = jnp.repeat(jnp.arange(self.base.local_slots), self._k)
            accepted = jnp.tile(places, self.base.local_slots)
            likeliest = drafting.candidates(
                passes.logits(self.model, parameters, hidden.reshape(-1, hidden.shape[-1])),
                sampling_of(sampling, row),
                records.start[row] + 1 + accepted,
                lambda: penalties.in_flight(
                    history, tokens, row, chain_path(accepted), self.model.output_ids
                ),
                tokens=self.base.tokens,
                count=self.base.candidates,
                outputs=self.model.output_ids,
                adjusted=parts.adjusted,
            ).reshape(records.candidates.shape)
            live = live[:, :, None]
            candidates = jnp.where(live, likeliest, records.candidates)
            states = jnp.where(live, hidden[..., : records.hidden.shape[2]], records.hidden)
            return pages, records._replace(candidates=candidates, hidden=states)

        return self._spec(follow, donate=("pages",), results=("pages", "records"))
