"""Ahead-of-time compiled programs of a draft that prepares for the outcomes of token trees.

A round of speculative speculative decoding with trees, for all sequences at once, while the target
verifies the records:

`expand_tree` runs the nodes that no forward has run yet, most of them leaves, which gives their
continuations. The M likeliest continuations outside the tree are the bonus tokens of its branches,
which a second forward runs. `grow_branches` adds a depth to the trees of all branches.
`promote_tree` moves keys and values of the accepted path, and of the bonus token of the branch
whose outcome came true, into the pages, and makes its tree the record. After a miss `adopt_tree`
makes the tree the record that the programs of the base have drafted just in time.

Keys and values of nodes lie apart from the pages, where siblings would have the same positions: as
M branches, and the record as one more. A branch begins with copies of the record's path to it, its
stem, so that its nodes see the pages up to the record's pending token, and its own entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.batch_sizes import BatchPlan, Task
from ssd_jax.devices.programs.batched import BatchedPrograms, LeftOut, MakeSpec
from ssd_jax.devices.programs.program_spec import Compiler, Name, ProgramSpec
from ssd_jax.devices.trees import branching
from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.devices.trees import record as tree_record
from ssd_jax.devices.trees.branching import TreeExpansion
from ssd_jax.devices.trees.continuations import support_of
from ssd_jax.devices.trees.draft_programs import TREES, TreeDraftPrograms
from ssd_jax.devices.trees.expansion_steps import Keys, TreeContext, TreeExpansionSteps
from ssd_jax.devices.trees.growth import Frontier
from ssd_jax.devices.trees.record import TreeRecord
from ssd_jax.models.token_tree import AllBranches
from ssd_jax.roles.drafting import GAP_CLASSES, Drafting, TreeShape
from ssd_jax.roles.records import no_promotion
from ssd_jax.sampling import penalties, topology
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import greedy_where_idle
from ssd_jax.sampling.variants import ANY, Parts
from ssd_jax.system.new_arrays import create_arrays, zeros


class TreeExpansionPrograms(BatchedPrograms):
    """The compiled programs of a draft that branches off trees, beside those that draft one.

    With B slots, M branches, m nodes, paths of K tokens:
    `promote_tree`: (pages, history, table, scratch, record, expansion, promotion) -> pages,
    history, scratch, record, proposal.
    `expand_tree`: (parameters, pages, history, table, scratch, record, counts, share, log_rates,
    sampling) -> pages, scratch, record, expansion, packed; `counts` [B, K + 1], `share` [B, 2], the
    same in each row, and `log_rates` as `tree_growth.add_run` has them.
    `grow_branches`: (parameters, pages, history, table, scratch, record, expansion, depth [],
    log_rates, sampling) -> pages, scratch, expansion, packed.
    `adopt_tree`: (scratch, record, growth, proposal, branches, drafts [B]) -> scratch, record, what
    all slots propose, and its parents: the base's trees are adopted where `drafts` is not 0.
    The first and the last have no variants (`sampling/variants.py`). `packed` is `unpack`'s.

    Args:
      base: programs for the same slots and pages, whose trees have the same size.
      drafting: its trees, its rule, whose noise is of the position, its support, and M.
      batches: of how many slots there are programs, besides all.
      progress, compiler: see `DraftPrograms`.

    Attributes:
      shape: of the trees.
      support: N, number of ids that a proposal's q is kept for; 1 where its rule needs none.
    """

    def __init__(
        self,
        base: TreeDraftPrograms,
        drafting: Drafting,
        *,
        batches: BatchPlan | None = None,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        model, slots, tokens = base.model, base.slots, base.tokens
        self.base, shape = base, drafting.tree
        assert shape is not None
        self.shape: TreeShape
        self.shape, self.drafting, self.tokens = shape, drafting, tokens
        self.branches = drafting.branches
        self.support = support_of(drafting, model.config.outputs)
        super().__init__(model, slots, base.context, base.paging, tokens, drafting)
        self.batches = (batches or BatchPlan()).below(self.local_slots)
        self.variants = model.execution.variants
        self._steps = TreeExpansionSteps(self, drafting, shape, tokens)
        self.structs["depth"] = program_spec.ints()
        compiler, specs = compiler or program_spec.compile_all, self.specs()
        self._compiled = dict(compiler(specs | self._specs_at_start(), model.mesh, progress))
        self._offer_batches()

    @override
    def slot_structs(self) -> dict[str, Any]:
        slots, shape = self.slots, self.shape
        rates = (slots, shape.depth + 1, GAP_CLASSES, shape.ranks)
        structs = {
            "record": jax.eval_shape(lambda: tree_record.no_record(slots, shape)),
            "expansion": jax.eval_shape(
                lambda: branching.no_expansion(slots, self.branches, shape, self.support)
            ),
            "counts": program_spec.ints(slots, shape.depth + 1),
            "share": program_spec.ints(slots, 2),
            "drafts": program_spec.ints(slots),
            "served": jax.eval_shape(
                lambda: (
                    tree_growth.propose(
                        tree_growth.empty(slots, shape, self.support), shape
                    ).proposal
                )
            ),
            "log_rates": jax.ShapeDtypeStruct(rates, jnp.float32),
            "promotion": jax.eval_shape(
                lambda: no_promotion(slots, shape.depth, nodes=shape.nodes)
            ),
        }
        scratch = self.model.branch_struct(slots, shape.entries, self.branches + 1)
        of_base = {name: self.base.structs[name] for name in ("growth", "proposal", "branches")}
        return super().slot_structs() | self.by_slots(structs) | {"scratch": scratch} | of_base

    @override
    def of_batch(self, size: int) -> Self:
        part = super().of_batch(size)
        part.structs |= {
            name: self.base.of_batch(size).structs[name]
            for name in ("growth", "proposal", "branches")
        }
        part._steps = TreeExpansionSteps(part, self.drafting, self.shape, self.tokens)
        return part

    @property
    @override
    def tasks(self) -> tuple[Task, ...]:
        """Branches, the records that they become, and trees for these."""
        return (TREES,)

    @override
    def makers(self) -> Iterator[tuple[Name, str, MakeSpec]]:
        kind = TreeExpansionPrograms
        yield ("promote_tree",), ANY, kind._promote_spec
        yield ("adopt_tree",), ANY, kind._adopt_spec
        specs = {"expand_tree": kind._expand_spec, "grow_branches": kind._grow_spec}
        yield from self.of_variants(self.variants, specs)

    @override
    def left_out(self) -> LeftOut:
        """Slots without records and branches."""
        slots, shape = self.local_slots, self.shape
        sizes = slots, self.branches, shape, self.support

        def no_branches(packed: Int32[Array, "B M+1 columns"]) -> Int32[Array, "B M+1 columns"]:
            return packed.at[:, :, : shape.nodes + 4].set(-1)  # as `pack` has them

        return {
            "promote_tree": {"record": lambda _: tree_record.no_record(slots, shape)},
            "expand_tree": {
                "expansion": lambda _: branching.no_expansion(*sizes),
                "slots": no_branches,
            },
            "grow_branches": {"slots": no_branches},
        }

    @property
    @override
    def working_memory(self) -> int:
        """That of the base's programs, too."""
        return max(super().working_memory, self.base.working_memory)

    def new_record(self) -> TreeRecord:
        """Idle slots, on the model's devices."""
        shape = self.shape
        return self.model.place(create_arrays(lambda: tree_record.no_record(self.slots, shape)))

    def new_expansion(self) -> TreeExpansion:
        """No branches in any slot, on the model's devices."""
        sizes = self.slots, self.branches, self.shape, self.support
        return self.model.place(create_arrays(lambda: branching.no_expansion(*sizes)))

    def new_scratch(self) -> AllBranches:
        """Zeroed keys and values of all nodes."""
        return zeros(self.structs["scratch"])

    def _promote_spec(self) -> ProgramSpec:
        shape = self.shape

        def promote_tree(pages, history, table, scratch, record, expansion, promotion):
            history = penalties.add_output(history, promotion.committed)
            hit = promotion.winner >= 0
            source = jnp.where(hit, promotion.winner, self.branches)
            path = jnp.take_along_axis(
                topology.paths(record.parents), promotion.node[:, None], axis=1
            )[:, 0]
            depth, place = topology.depth_of(path), jnp.arange(shape.depth + 1)
            nodes = topology.rows_of(path, shape.depth, shape.nodes)[:, 1:] - 1
            entries = jnp.where(hit[:, None], place[:-1], jnp.maximum(nodes, 0))
            entries = jnp.pad(entries, ((0, 0), (0, 1)), constant_values=shape.ancestors)
            # A promotion may come again, after a round that failed.
            live = (record.start >= 0) & (promotion.position == record.start + 1 + depth)
            is_accepted = live[:, None] & (place < depth[:, None])
            is_pending = (live & hit)[:, None] & (place == shape.ancestors)
            positions = jnp.where(is_accepted, record.start[:, None] + 1 + place, self.capacity)
            positions = jnp.where(is_pending, promotion.position[:, None], positions)
            pages = passes.promote(
                self.model, pages, self.table(table), scratch, source, positions, entries
            )
            record, run, proposal = branching.promote(expansion, promotion, shape)
            won = jnp.take_along_axis(scratch, _column(source), axis=4)
            entry_of_node = jnp.broadcast_to(jnp.arange(shape.nodes), run.shape)
            entry = jnp.where(run > 0, shape.stem + run - 1, entry_of_node)
            nodes_kv = jnp.take_along_axis(won, _column(entry, axis=3), axis=3)
            scratch = scratch.at[:, :, :, : shape.nodes, self.branches].set(nodes_kv[..., 0, :])
            return pages, history, scratch, record, proposal

        donated = ("pages", "history", "scratch")
        return self.spec(
            promote_tree,
            self.structs,
            donated,
            (*donated, "record", "slots"),
            host_args=("promotion",),
        )

    def _adopt_spec(self) -> ProgramSpec:
        shape, of_record = self.shape, self.branches

        def adopt_tree(scratch, record, growth, proposal, branches, served, drafts):
            slots = drafts > 0
            record = branching.with_trees(record, growth, proposal, slots, shape)
            run = proposal.run[:, 1:]
            entry = _column(jnp.maximum(run - 1, 0), axis=3)
            of_runs = jnp.take_along_axis(branches, entry, axis=3)[..., 0, :]
            before = scratch[:, :, :, : shape.nodes, of_record]
            is_new = (slots[:, None] & (run > 0))[None, :, None, :, None]
            nodes_kv = jnp.where(is_new, of_runs, before)
            scratch = scratch.at[:, :, :, : shape.nodes, of_record].set(nodes_kv)
            drafted, is_drafted = proposal.proposal, slots[:, None, None]
            proposed = Proposal(
                record.tokens,
                record.length,
                jnp.where(is_drafted, drafted.support, served.support),
                jnp.where(is_drafted, drafted.q, served.q),
            )
            return scratch, record, proposed, record.parents

        donated = ("scratch", "record")
        results = (*donated, "slots", "slots")
        return self.spec(adopt_tree, self.structs, donated, results, host_args=("drafts",))

    def _expand_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        steps, shape = self._steps, self.shape

        def expand_tree(
            parameters, pages, history, table, scratch, record, counts, share, log_rates, sampling
        ):
            live = (record.start >= 0) & jnp.any(counts > 0, axis=1)
            sampling = greedy_where_idle(sampling, live)
            context = TreeContext(
                parameters, self.table(table, reach), history, sampling, log_rates, parts
            )
            record, keys = steps.run_nodes(context, Keys(pages, scratch), record, live)
            counts = jnp.where(live[:, None], counts, 0)
            outcomes = steps.outcomes(context, record, counts, share[0])
            forks = branching.forks_of(record, outcomes, shape)
            keys = steps.copy_stems(keys, forks)
            expansion = branching.begin_branches(record, outcomes, forks, shape, self.support)
            bonus = outcomes.bonus.reshape(-1, 1)
            root = Frontier(bonus, jnp.full_like(bonus, -1), jnp.zeros_like(bonus))
            expansion, keys = steps.run_branches(
                context, keys, record, expansion, root, jnp.zeros((), jnp.int32)
            )
            return *keys, record, expansion, steps.pack(record, expansion)

        donated, host_args = ("pages", "scratch", "record"), ("counts", "share", "log_rates")
        results = (*donated, "expansion", "slots")
        return self.spec(expand_tree, self.structs, donated, results, host_args=host_args)

    def _grow_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        steps = self._steps

        def grow_branches(
            parameters, pages, history, table, scratch, record, expansion, depth, log_rates,
            sampling,
        ):  # fmt: skip
            live = (expansion.outcomes.row >= 0).any(axis=1)
            sampling = greedy_where_idle(sampling, live)
            context = TreeContext(
                parameters, self.table(table, reach), history, sampling, log_rates, parts
            )
            nodes = tree_growth.frontier(expansion.growth, depth, self.shape)
            expansion, keys = steps.run_branches(
                context, Keys(pages, scratch), record, expansion, nodes, depth
            )
            return *keys, record, expansion, steps.pack(record, expansion)

        donated, host_args = ("pages", "scratch", "record", "expansion"), ("depth", "log_rates")
        results = (*donated, "slots")
        return self.spec(grow_branches, self.structs, donated, results, host_args=host_args)


def _column(index: Int32[Array, "*rows"], axis: int = 4) -> Int32[Array, "_ B _ n _ _"]:
    """An index [B] or [B, n] for an axis of `AllBranches`."""
    index = index.reshape(index.shape[0], -1)
    return jnp.expand_dims(index, [other for other in (0, 2, 3, 4, 5) if other != axis])
