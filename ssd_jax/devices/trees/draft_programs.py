"""Ahead-of-time compiled programs of a draft model that proposes token trees.

A tree of depth K takes K forwards: `begin_tree` runs the pending token, `grow_tree` the best nodes
at each depth but the last. Keys and values of nodes lie apart from the pages, where siblings would
have the same positions, until `begin_tree` of the next round moves those of the accepted path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.batch_sizes import BatchPlan, Task
from ssd_jax.devices.programs.batched import BatchedPrograms, LeftOut, MakeSpec
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.program_spec import Compiler, Name, ProgramSpec
from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.devices.trees.continuations import continuations, places, support_of
from ssd_jax.devices.trees.growth import Frontier, Growth, TreeProposal
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.token_tree import Tree
from ssd_jax.roles.drafting import GAP_CLASSES, Drafting, TreeShape
from ssd_jax.sampling import penalties, topology
from ssd_jax.sampling.settings import greedy_where_idle, sampling_of
from ssd_jax.sampling.variants import Parts
from ssd_jax.system.new_arrays import zeros

Array = Any
"""On the host where a program is called, traced in it."""


class TreeRequest(NamedTuple):
    """Trees that B rows of a draft are to propose.

    Attributes:
      committed: output tokens since the last tree, the pending one last, padded with -1.
      last: the token before the pending one.
      pending: the pending token.
      start: its position; -1 is an idle row, whose tree is empty.
      node: where in the last tree its round ended; see `roles.Outcomes`.
      begins: whether there was no last tree, and the pages hold all positions below `start`.
      limit: most tokens of a path.
      log_rates: see `tree_growth.add_run`.
    """

    committed: Int32[Array, "B committed"]
    last: Int32[Array, "B"]
    pending: Int32[Array, "B"]
    start: Int32[Array, "B"]
    node: Int32[Array, "B"]
    begins: Int32[Array, "B"]
    limit: Int32[Array, "B"]
    log_rates: Float32[Array, "B depths classes ranks"]


def _without_nodes(trees: TreeProposal) -> TreeProposal:
    """Trees of slots that a batch leaves out; their last ones were judged already."""
    length = jnp.zeros_like(trees.proposal.length)
    return trees._replace(proposal=trees.proposal._replace(length=length))


TREES = "trees"
"""What batch sizes are chosen for; see `BatchSizes`."""


class TreeDraftPrograms(BatchedPrograms):
    """The compiled programs of a draft that proposes trees, for one model, batch and context.

    `begin_tree`: (parameters, pages, history, table, growth, proposal, branches, request, sampling)
    -> pages, history, growth, proposal, learnable. `grow_tree`: (parameters, pages, history, table,
    growth, branches, depth [], log_rates, sampling) -> pages, branches, growth, proposal,
    learnable (see `tree_growth`). Both have variants (`sampling/variants.py`).

    Args:
      shape: of the trees.
      drafting: its rule and support; the rest is for chains.
      batches: of how many slots there are programs, besides all.
      others: see `PagedPrograms`, `DraftPrograms`.
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
        drafting: Drafting,
        shape: TreeShape,
        paging: Paging | None = None,
        batches: BatchPlan | None = None,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.shape, self.drafting, self.tokens = shape, drafting, tokens
        super().__init__(model, slots, context, paging, tokens, drafting, shape)
        self.batches = (batches or BatchPlan()).below(self.local_slots)
        self.variants = model.execution.variants
        self.structs["depth"] = program_spec.ints()
        specs = self.specs() | self._specs_at_start()
        specs |= self.prompt_specs(with_logits=False)
        compiler = compiler or program_spec.compile_all
        self._compiled = dict(compiler(specs, model.mesh, progress))
        self._offer_batches()

    @override
    def slot_structs(self) -> dict[str, Any]:
        slots, shape = self.slots, self.shape
        rates = (slots, shape.depth, GAP_CLASSES, shape.ranks)
        committed, one = program_spec.ints(slots, shape.depth + 1), program_spec.ints(slots)
        log_rates = jax.ShapeDtypeStruct(rates, jnp.float32)
        structs = {
            "growth": jax.eval_shape(lambda: self.empty_growth(slots)),
            "proposal": jax.eval_shape(lambda: self.empty_proposal(slots)),
            "request": TreeRequest(committed, one, one, one, one, one, one, log_rates),
            "log_rates": log_rates,
        }
        branches = self.model.branch_struct(slots, max(shape.runs, 1), 1)
        return super().slot_structs() | self.by_slots(structs) | {"branches": branches}

    @property
    @override
    def tasks(self) -> tuple[Task, ...]:
        """Trees."""
        return (TREES,)

    @override
    def makers(self) -> Iterator[tuple[Name, str, MakeSpec]]:
        kind = TreeDraftPrograms
        specs = {"begin_tree": kind._begin_spec, "grow_tree": kind._grow_spec}
        return self.of_variants(self.variants, specs)

    @override
    def left_out(self) -> LeftOut:
        return {name: {"proposal": _without_nodes} for name in ("begin_tree", "grow_tree")}

    def empty_growth(self, rows: int) -> Growth:
        """Idle rows."""
        support = support_of(self.drafting, self.model.config.outputs)
        return tree_growth.empty(rows, self.shape, support)

    def empty_proposal(self, rows: int) -> TreeProposal:
        """Trees without nodes."""
        return tree_growth.propose(self.empty_growth(rows), self.shape)

    def new_branches(self) -> Any:
        """Zeroed keys and values of all nodes."""
        return zeros(self.structs["branches"])

    def _begin_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        shape = self.shape

        def begin_tree(
            parameters, pages, history, table, growth, proposal, branches, request, sampling
        ):
            if parts.adjusted is not False:
                history = penalties.add_output(history, request.committed)
            live, begins = request.start >= 0, request.begins > 0
            path, was_run = tree_growth.accepted_runs(growth, proposal, request.node)
            place = jnp.arange(shape.depth)
            moves = (live & ~begins)[:, None] & (place < topology.depth_of(path)[:, None])
            entries = topology.rows_of(path, shape.depth, max(shape.runs, 1))[:, 1:] - 1
            slot_table = self.table(table, reach)
            pages = passes.promote(
                self.model,
                pages,
                slot_table,
                branches,
                jnp.zeros_like(request.start),
                jnp.where(moves, growth.start[:, None] + 1 + place, self.capacity),
                entries=jnp.maximum(entries, 0),
            )
            # The last accepted token runs with the pending one if it was a leaf.
            present = jnp.stack([live & ~begins & ~was_run, live], axis=1)
            positions = request.start[:, None] + jnp.array([-1, 0])
            inputs = jnp.stack([request.last, request.pending], axis=1)
            hidden, pages = passes.step(
                self.model,
                parameters,
                pages,
                slot_table,
                inputs,
                jnp.where(present, positions, -1),
                self.capacity,
            )
            growth = self.empty_growth(self.local_slots)
            growth = growth._replace(start=request.start, limit=jnp.where(live, request.limit, 0))
            root = Frontier(
                request.pending[:, None],
                jnp.full((self.local_slots, 1), -1),
                jnp.zeros((self.local_slots, 1), jnp.int32),
            )
            growth, proposal = self._add_runs(
                parameters, hidden[:, 1:], growth, root, 0, request.log_rates, history, sampling,
                parts,
            )  # fmt: skip
            return pages, history, growth, proposal, tree_growth.learnable(proposal)

        results = ("pages", "history", "growth", "proposal", "read")
        return self.spec(
            begin_tree, self.structs, ("pages", "history"), results, host_args=("request",)
        )

    def _grow_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def grow_tree(
            parameters, pages, history, table, growth, branches, depth, log_rates, sampling
        ):
            nodes = tree_growth.frontier(growth, depth, self.shape)
            live = nodes.path > 0
            paths = jnp.stack([jnp.zeros_like(nodes.path), nodes.path], axis=-1)
            start = growth.start[:, None]
            nowhere = jnp.full(nodes.path.shape, self.capacity, jnp.int32)
            hidden, pages, branches = self.model.module(parameters).hidden(
                jnp.maximum(nodes.tokens, 0),
                jnp.where(live, start + depth, 0),
                jnp.where(live, jnp.clip(start + 1, 0, self.capacity), 0),
                pages,
                self.table(table, reach),
                Tree(branches, paths, nowhere),
            )
            growth, proposal = self._add_runs(
                parameters, hidden, growth, nodes, depth, log_rates, history, sampling, parts
            )
            return pages, branches, growth, proposal, tree_growth.learnable(proposal)

        # Pages come back unchanged: those of another call would be a copy.
        donated, host_args = ("pages", "branches", "growth"), ("depth", "log_rates")
        results = (*donated, "proposal", "read")
        return self.spec(grow_tree, self.structs, donated, results, host_args=host_args)

    def _add_runs(
        self,
        parameters: Parameters,
        hidden: Float32[jax.Array, "B w hidden"],
        growth: Growth,
        ran: Frontier,
        depth: Int32[jax.Array, ""] | int,
        log_rates: jax.Array,
        history: penalties.History,
        sampling: Any,
        parts: Parts,
    ) -> tuple[Growth, TreeProposal]:
        """Ranks the continuations of nodes that have just been run, and adds them."""
        depth = jnp.asarray(depth)
        sampling = greedy_where_idle(sampling, growth.start >= 0)
        row = jnp.repeat(jnp.arange(self.local_slots), ran.tokens.shape[1])
        drafted = tree_growth.tokens_of_runs(growth, ran, depth, self.shape)
        path, outputs = ran.path.reshape(-1), self.model.output_ids
        behind = continuations(
            passes.logits(self.model, parameters, hidden).reshape(row.shape[0], -1),
            sampling_of(sampling, row),
            places(growth.start, depth, ran.tokens.shape[1], self.shape),
            lambda: penalties.in_flight(history, drafted, row, path, outputs),
            drafting=self.drafting,
            count=self.shape.ranks,
            tokens=self.tokens,
            outputs=outputs,
            parts=parts,
        )
        growth = tree_growth.add_run(growth, ran, behind, depth, log_rates, self.shape)
        return growth, tree_growth.propose(growth, self.shape)


def as_log_rates(rates: Float32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Rates as the programs take them: a node is always less likely than its parent, and there is
    none whose rate is 0."""
    logs = np.log(np.clip(rates, 1e-6, 0.999))
    return np.where(rates > 0, logs, -np.inf).astype(np.float32)
