"""Ahead-of-time compiled programs of a draft that prepares for the outcomes of token trees.

A round of speculative speculative decoding with trees, for all sequences at once, while the target
verifies the records:

`expand_tree` runs the nodes that no forward has run yet, most of them leaves, which gives their
continuations. The M likeliest continuations outside the tree are the bonus tokens of its branches,
which a second forward runs. `grow_branches` adds a depth to the trees of all branches.
`promote_tree` moves keys and values of the accepted path, and of the bonus token of the branch
whose outcome came true, into the pages, and makes its tree the record.

Keys and values of nodes lie apart from the pages, where siblings would have the same positions: as
M branches, and the record as one more. A branch begins with copies of the record's path to it, its
stem, so that its nodes see the pages up to the record's pending token, and its own entries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices import passes, program_spec, tree_branching, tree_growth
from ssd_jax.devices.paged_programs import PagedPrograms, Paging
from ssd_jax.devices.program_spec import Compiler, Name, ProgramSpec
from ssd_jax.devices.tree_branching import Forks, TreeExpansion, TreeRecord
from ssd_jax.devices.tree_growth import Continuations, Frontier
from ssd_jax.kernels.kv_pages import PageArray, chain_path
from ssd_jax.models.decoder import AllBranches, Tree
from ssd_jax.models.functional import FunctionalModel, Parameters, zeros
from ssd_jax.roles.drafting import GAP_CLASSES, Drafting, TreeShape
from ssd_jax.roles.records import no_promotion
from ssd_jax.sampling import penalties, topology
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.ranking import Ranking, rank
from ssd_jax.sampling.settings import Sampling, greedy_where_idle, sampling_of
from ssd_jax.sampling.variants import VARIANTS, Parts, variant_name
from ssd_jax.system.stored_jit import create_arrays


class TreeExpansionPrograms(PagedPrograms):
    """The compiled programs of a draft that branches off trees, for one model, batch and context.

    With B slots, M branches, m nodes, paths of K tokens:
    `promote_tree`: (pages, history, table, scratch, record, expansion, promotion) -> pages,
    history, scratch, record.
    `expand_tree`: (parameters, pages, history, table, scratch, record, counts, log_rates, sampling)
    -> pages, scratch, record, expansion, packed; `counts` [B, K + 1] and `log_rates` as
    `tree_branching.likeliest_outcomes` has them.
    `grow_branches`: (parameters, pages, history, table, scratch, record, expansion, depth [],
    log_rates, sampling) -> pages, scratch, expansion, packed.
    All but `promote_tree` have variants (`sampling/variants.py`). `packed` is `unpack`'s.

    Args:
      drafting: its trees, its rule, whose noise is of the position, its support, and M.
      others: see `PagedPrograms`, `DraftPrograms`.

    Attributes:
      shape: of the trees.
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
        drafting: Drafting,
        paging: Paging | None = None,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(model, slots, context, paging, tokens, drafting)
        shape = drafting.tree
        assert shape is not None
        self.shape: TreeShape
        self.shape, self.drafting, self.tokens = shape, drafting, tokens
        self.branches = drafting.branches
        self.variants = model.execution.variants
        rates = (slots, shape.depth + 1, GAP_CLASSES, shape.ranks)
        self.structs |= self.by_slots(
            {
                "record": jax.eval_shape(lambda: tree_branching.no_record(slots, shape)),
                "expansion": jax.eval_shape(
                    lambda: tree_branching.no_expansion(slots, self.branches, shape)
                ),
                "counts": program_spec.ints(slots, shape.depth + 1),
                "log_rates": jax.ShapeDtypeStruct(rates, jnp.float32),
                "promotion": jax.eval_shape(
                    lambda: no_promotion(slots, shape.depth, nodes=shape.nodes)
                ),
            }
        )
        self.structs |= {
            "scratch": model.branch_struct(slots, shape.entries, self.branches + 1),
            "depth": program_spec.ints(),
        }
        specs: dict[Name, ProgramSpec] = {("promote_tree",): self._promote_spec()}
        for variant in self.variants:
            parts = VARIANTS[variant]
            for reach in self.reaches:
                expand, grow = (
                    self.with_reach((name,), reach) for name in ("expand_tree", "grow_branches")
                )
                specs[variant_name(expand, variant)] = self._expand_spec(parts, reach)
                specs[variant_name(grow, variant)] = self._grow_spec(parts, reach)
        specs |= self.prompt_specs(with_logits=False)
        compiler = compiler or program_spec.compile_all
        self._compiled = dict(compiler(specs, model.mesh, progress))

    def new_record(self) -> TreeRecord:
        """Idle slots, on the model's devices."""
        shape = self.shape
        return self.model.place(create_arrays(lambda: tree_branching.no_record(self.slots, shape)))

    def new_expansion(self) -> TreeExpansion:
        """No branches in any slot, on the model's devices."""
        sizes = self.slots, self.branches, self.shape
        return self.model.place(create_arrays(lambda: tree_branching.no_expansion(*sizes)))

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
            record, run = tree_branching.promoted(expansion, promotion, shape)
            won = jnp.take_along_axis(scratch, _column(source), axis=4)
            own_entry = jnp.broadcast_to(jnp.arange(shape.nodes), run.shape)
            entry = jnp.where(run > 0, shape.stem + run - 1, own_entry)
            nodes_kv = jnp.take_along_axis(won, _column(entry, axis=3), axis=3)
            scratch = scratch.at[:, :, :, : shape.nodes, self.branches].set(nodes_kv[..., 0, :])
            return pages, history, scratch, record

        donated = ("pages", "history", "scratch")
        return self.spec(
            promote_tree,
            self.structs,
            donated,
            (*donated, "record"),
            host_args=("promotion",),
        )

    def _expand_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def expand_tree(
            parameters, pages, history, table, scratch, record, counts, log_rates, sampling
        ):
            live = (record.start >= 0) & jnp.any(counts > 0, axis=1)
            sampling = greedy_where_idle(sampling, live)
            slot_table = self.table(table, reach)
            record, pages, scratch = self._run_nodes(
                parameters, pages, slot_table, scratch, record, live, history, sampling, parts
            )
            outcomes = tree_branching.likeliest_outcomes(
                record, log_rates, jnp.where(live[:, None], counts, 0), self.branches
            )
            forks = tree_branching.forks_of(record, outcomes, self.shape)
            scratch = self._copy_stems(scratch, forks)
            growth = tree_growth.empty(forks.depth.shape[0], self.shape)
            exists = outcomes.bonus.reshape(-1) >= 0
            slot = self._slot_of_branches()
            growth = growth._replace(
                start=jnp.where(exists, record.start[slot] + 1 + forks.depth, -1),
                limit=jnp.where(exists, self.shape.depth, 0),
            )
            root = Frontier(
                outcomes.bonus.reshape(-1, 1),
                jnp.full((exists.shape[0], 1), -1),
                jnp.zeros((exists.shape[0], 1), jnp.int32),
            )
            expansion = TreeExpansion(outcomes, forks.path, growth)
            return self._run_branches(
                parameters, pages, slot_table, scratch, record, expansion, root,
                jnp.zeros((), jnp.int32), log_rates, history, sampling, parts,
            )  # fmt: skip

        donated, host_args = ("pages", "scratch", "record"), ("counts", "log_rates")
        results = (*donated, "expansion", "slots")
        return self.spec(expand_tree, self.structs, donated, results, host_args=host_args)

    def _grow_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def grow_branches(
            parameters, pages, history, table, scratch, record, expansion, depth, log_rates,
            sampling,
        ):  # fmt: skip
            live = (expansion.outcomes.row >= 0).any(axis=1)
            nodes = tree_growth.frontier(expansion.growth, depth, self.shape)
            return self._run_branches(
                parameters, pages, self.table(table, reach), scratch, record, expansion, nodes,
                depth, log_rates, history, greedy_where_idle(sampling, live), parts,
            )  # fmt: skip

        donated, host_args = ("pages", "scratch", "record", "expansion"), ("depth", "log_rates")
        results = (*donated, "slots")
        return self.spec(grow_branches, self.structs, donated, results, host_args=host_args)

    def _slot_of_branches(self) -> Int32[Array, "branches"]:
        return jnp.repeat(jnp.arange(self.local_slots), self.branches)

    def _run_nodes(
        self,
        parameters: Parameters,
        pages: PageArray,
        table: Any,
        scratch: AllBranches,
        record: TreeRecord,
        live: Bool[Array, "B"],
        history: History,
        sampling: Sampling,
        parts: Parts,
    ) -> tuple[TreeRecord, PageArray, AllBranches]:
        """Runs the rows of the records that have not run, and ranks their continuations."""
        run = record.exists & ~record.has_run & live[:, None]
        path, start = topology.paths(record.parents), record.start[:, None]
        is_root = jnp.arange(path.shape[1]) == 0
        nowhere = jnp.full(path.shape, self.capacity, jnp.int32)
        positions = jnp.where(run, start + topology.depth_of(path), self.capacity)
        branch = jnp.full_like(path, self.branches)
        hidden, pages, scratch = self._run(
            parameters,
            pages,
            table,
            jnp.concatenate([record.pending[:, None], record.tokens], axis=1),
            positions,
            jnp.where(run, jnp.clip(start + 1, 0, self.capacity), 0),
            Tree(
                scratch,
                jnp.stack([branch, jnp.where(run, path, 0)], axis=-1),
                jnp.where(is_root, positions, nowhere),
            ),
        )
        slot = jnp.repeat(jnp.arange(self.local_slots), path.shape[1])
        flat = path.reshape(-1)
        ranking = self._rank(
            parameters,
            hidden,
            sampling_of(sampling, slot),
            record.start[slot] + 1 + topology.depth_of(flat),
            lambda: penalties.in_flight(history, record.tokens, slot, flat, self.model.output_ids),
            parts,
        )
        return tree_branching.add_ranking(record, ranking, run), pages, scratch

    def _copy_stems(self, scratch: AllBranches, forks: Forks) -> AllBranches:
        """Copies keys and values of the record's paths to the front of the branches."""
        of_record = scratch[..., self.branches, :]  # [layers, B, heads, entries, width]
        nodes = forks.nodes.reshape(self.local_slots, -1)
        stems = jnp.take_along_axis(of_record, nodes[None, :, None, :, None], axis=3)
        shape = (*stems.shape[:3], self.branches, self.shape.ancestors, stems.shape[-1])
        stems = stems.reshape(shape).swapaxes(3, 4)
        return scratch.at[:, :, :, : self.shape.ancestors, : self.branches].set(stems)

    def _run_branches(
        self,
        parameters: Parameters,
        pages: PageArray,
        table: Any,
        scratch: AllBranches,
        record: TreeRecord,
        expansion: TreeExpansion,
        nodes: Frontier,
        depth: Int32[Array, ""],
        log_rates: Float32[Array, "B depths classes ranks"],
        history: History,
        sampling: Sampling,
        parts: Parts,
    ) -> tuple[PageArray, AllBranches, TreeRecord, TreeExpansion, Int32[Array, "B M+1 columns"]]:
        """Runs nodes of the branches' trees, at one depth, and ranks their continuations."""
        shape, growth = self.shape, expansion.growth
        live = (growth.start >= 0)[:, None] & ((depth == 0) | (nodes.path > 0))
        accepted = (expansion.path[:, :-1] >= 0).sum(axis=1, dtype=jnp.int32)
        stem = chain_path(accepted) | 1 << shape.ancestors
        path = stem[:, None] | nodes.path << shape.stem
        by_slot = (self.local_slots, -1)
        branch = jnp.tile(jnp.arange(self.branches), self.local_slots)
        branch = jnp.broadcast_to(branch[:, None], path.shape)
        positions = jnp.where(live, growth.start[:, None] + depth, self.capacity)
        slot = jnp.repeat(self._slot_of_branches(), path.shape[1])
        visible = (record.start[slot] + 1).reshape(live.shape)
        hidden, pages, scratch = self._run(
            parameters,
            pages,
            table,
            jnp.maximum(nodes.tokens, 0).reshape(by_slot),
            positions.reshape(by_slot),
            jnp.where(live, jnp.clip(visible, 0, self.capacity), 0).reshape(by_slot),
            Tree(
                scratch,
                jnp.stack([branch, jnp.where(live, path, 0)], axis=-1).reshape(*by_slot, 2),
                jnp.full((self.local_slots, path.size // self.local_slots), self.capacity),
            ),
        )
        row = jnp.repeat(jnp.arange(growth.start.shape[0]), path.shape[1])

        def branch_history() -> History:
            outputs = self.model.output_ids
            runs = growth.runs.token[:, 1:]
            if shape.runs:
                begin = jnp.maximum(depth - 1, 0) * shape.width
                added = jax.lax.dynamic_update_slice_in_dim(runs, nodes.tokens, begin, axis=1)
                runs = jnp.where(depth > 0, added, runs)
            drafted = jnp.concatenate([expansion.path, runs], axis=1)
            precedes = topology.on_path(path.reshape(-1), drafted.shape[1])
            committed = penalties.history_of(history, slot, outputs)
            return penalties.add_output(committed, jnp.where(precedes, drafted[row], -1), outputs)

        ranking = self._rank(
            parameters,
            hidden,
            sampling_of(sampling, slot),
            growth.start[row] + 1 + depth,
            branch_history,
            parts,
        )
        token = ranking.tokens[:, :1]
        continuations = Continuations(ranking, token, jnp.ones(token.shape, jnp.float32))
        growth = tree_growth.add_run(
            growth, nodes, continuations, depth, log_rates[self._slot_of_branches()], shape
        )
        expansion = expansion._replace(growth=growth)
        return pages, scratch, record, expansion, self._pack(record, expansion)

    def _run(
        self,
        parameters: Parameters,
        pages: PageArray,
        table: Any,
        tokens: Int32[Array, "B R"],
        positions: Int32[Array, "B R"],
        visible: Int32[Array, "B R"],
        tree: Tree,
    ) -> tuple[Float32[Array, "B R hidden"], PageArray, AllBranches]:
        module = self.model.module(parameters)
        hidden, pages, scratch = module.hidden(tokens, positions, visible, pages, table, tree)
        assert scratch is not None
        return hidden, pages, scratch

    def _rank(
        self,
        parameters: Parameters,
        hidden: Float32[Array, "B R hidden"],
        sampling: Sampling,
        position: Int32[Array, "n"],
        get_history: penalties.GetHistory,
        parts: Parts,
    ) -> Ranking:
        """Ranks the continuations of n = B * R rows."""
        logits = passes.logits(self.model, parameters, hidden).reshape(position.shape[0], -1)
        return rank(
            logits,
            sampling,
            position,
            get_history,
            tokens=self.tokens,
            count=self.shape.ranks,
            support=min(self.drafting.support, logits.shape[1]),
            outputs=self.model.output_ids,
            parts=parts,
        )

    def _pack(self, record: TreeRecord, expansion: TreeExpansion) -> Int32[Array, "B M+1 columns"]:
        """All that the host reads of branches, and the gap classes of the record behind them."""
        slots, outcomes, growth = self.local_slots, expansion.outcomes, expansion.growth
        tree = tree_growth.propose(growth, self.shape)
        head = jnp.stack([*(array.reshape(-1) for array in outcomes), tree.proposal.length], axis=1)
        columns = jnp.concatenate(
            [tree.gap_class, head, tree.proposal.tokens, tree.parents, tree.rank], axis=1
        ).reshape(slots, self.branches, -1)
        of_record = jnp.pad(
            record.gap_class[:, None],
            ((0, 0), (0, 0), (0, columns.shape[2] - record.gap_class.shape[1])),
        )
        return jnp.concatenate([columns, of_record], axis=1)


def _column(index: Int32[Array, "*rows"], axis: int = 4) -> Int32[Array, "_ B _ n _ _"]:
    """An index [B] or [B, n] for an axis of `AllBranches`."""
    index = index.reshape(index.shape[0], -1)
    return jnp.expand_dims(index, [other for other in (0, 2, 3, 4, 5) if other != axis])
