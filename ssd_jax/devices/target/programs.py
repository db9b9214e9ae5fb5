"""Ahead-of-time compiled programs of a target: pure functions with static shapes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.batch_sizes import BatchPlan, Task
from ssd_jax.devices.programs.first_rows import over_first_rows
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.program_spec import Compiler, Name, Program, ProgramSpec
from ssd_jax.devices.target import tree_programs
from ssd_jax.devices.target.base import TargetBase, Verification
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.sampling import proposal
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import greedy_where_idle
from ssd_jax.sampling.variants import VARIANTS, variant_name
from ssd_jax.sampling.verification import commit, emitted_tokens, verify
from ssd_jax.system.new_arrays import create_arrays

ExtraSpecs = Callable[["Programs", "Programs", int | str], dict[Name, ProgramSpec]]
"""Specifications of a batch size's further programs, from those of all slots and of its own, for a
task."""


class Programs(TargetBase):
    """The target's compiled programs for one model, batch and context.

    With w proposed tokens of a proposal that has room for K:
    `forward`: (parameters, pages, table, pending [B], tokens [B, K], lengths [B]) -> logits
    [B * (w + 1), V], pages; pending and proposed tokens are on the host or on the device. `accept`:
    (logits, proposal, sampling, start [rows], history, slot) -> outcome [rows, w + 2] int32 (k,
    then the emitted tokens), bonus [rows], history. It has variants (`sampling/variants.py`);
    variants that adjust no logits do not update the history, which only rows with penalties need.

    Compilation needs no weights, so it can run while weights load.

    Args:
      model, slots, context, paging: see `PagedPrograms`.
      tokens: number of ids that exist; logits beyond are vocabulary padding.
      verification: proposals and rule.
      batches: of how many slots `forward` and `accept` have programs, besides all.
      progress: see `program_spec.compile_all`.
      compiler: gets the programs instead of `program_spec.compile_all`.

    Attributes:
      widths: numbers of proposed tokens that verifications of chains run with, ascending.
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
        verification: Verification | None = None,
        paging: Paging | None = None,
        batches: BatchPlan | None = None,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(model, slots, context, paging, tokens, verification or Verification())
        self._extra_specs: dict[str, ExtraSpecs] = {}
        self.batches = (batches or BatchPlan()).below(self.local_slots)
        specs: dict[Name, ProgramSpec] = {
            variant_name(("accept", 1, 0), variant): self.accept_spec(1, 0, variant)
            for variant in self.variants(1)
        }
        # With trees, rounds without a proposal alone have chains.
        self.widths = (0,) if self.verification.nodes else self.verification.widths
        for width in self.widths:
            for variant in self.variants(slots):
                accept = self.accept_spec(slots, width, variant)
                specs[variant_name(("accept", slots, width), variant)] = accept
            for reach in self.reaches:
                specs[self.with_reach(("forward", width), reach)] = self._forward_spec(width, reach)
        if self.verification.nodes:
            specs |= tree_programs.specs(self)
        specs |= self.prompt_specs(with_logits=True)
        specs |= self._specs_at_start()
        self._compiler = compiler
        self._compiled = dict((compiler or program_spec.compile_all)(specs, model.mesh, progress))
        self._offer_batches()

    @property
    @override
    def tasks(self) -> tuple[Task, ...]:
        """Chains of each width, then a tree."""
        return (*self.widths, *(("tree",) if self.verification.nodes else ()))

    @override
    def batch_specs(self, size: int, task: Task) -> dict[Name, ProgramSpec]:
        part = self.of_batch(size)
        if isinstance(task, tuple):
            of_round, extra = task
            return self._extra_specs[extra](self, part, of_round)
        if isinstance(task, str):
            return tree_programs.batch_specs(self, part)
        specs: dict[Name, ProgramSpec] = {}
        for reach in self.reaches:
            of_all, of_first = (of._forward_spec(task, reach) for of in (self, part))
            name = self.batch_name(self.with_reach(("forward", task), reach), size)
            specs[name] = over_first_rows(of_all, of_first, passed=["logits"])
        for variant in self.variants(self.slots):
            of_all, of_first = (of.accept_spec(of.slots, task, variant) for of in (self, part))
            name = self.batch_name(("accept", self.slots, task), size)
            specs[variant_name(name, variant)] = over_first_rows(
                of_all, of_first, passed=["logits"]
            )
        return specs

    def with_trees(self, nodes: int, progress: Progress | None = None) -> Programs:
        """These programs with those for trees beside them, for a target that verifies trees.

        Only those of trees are compiled.
        """
        trees = copy.copy(self)
        verification = dataclasses.replace(self.verification, nodes=nodes)
        trees.verification, trees.widths = verification, (0,)
        vars(trees).pop("receive", None)  # of chains
        trees.cache_key = f"{self.cache_key} with {verification}"
        trees.batches = self.batches._replace(sizes=self.batch_sizes.sizes[:-1])
        compiler = self._compiler or program_spec.compile_all
        specs = tree_programs.specs(trees) | trees._specs_at_start()
        specs = {name: spec for name, spec in specs.items() if name not in self._compiled}
        trees._compiled = {**self._compiled, **compiler(specs, self.model.mesh, progress)}
        trees._offer_batches()
        return trees

    def add(self, extra: str, specs: Mapping[Name, ProgramSpec], of_batch: ExtraSpecs) -> None:
        """Compiles further programs, see `logprob_programs`.

        Other threads may run programs meanwhile.

        Args:
          extra: what they are for; see `batch_sizes`.
          of_batch: makes those of batch sizes, once rounds want them.
        """
        self._extra_specs[extra] = of_batch
        self._add((self._compiler or program_spec.compile_all)(specs, self.model.mesh, None))

    def compile_forward(self, proposed: int) -> Program:
        """Compiles `forward` for a number of proposed tokens that is not among the programs."""
        return self._forward_spec(proposed, self.capacity).compile(
            self.model.mesh, ("forward", proposed)
        )

    @functools.cached_property
    def receive(self) -> Program:
        """Program: a proposal of every slot -> (the proposal,), on the device."""
        structs = {"drafted": self.by_slots(jax.eval_shape(self._blank))}

        def receive(drafted):
            return (drafted,)

        spec = self.spec(receive, structs, (), ("slots",), host_args=("drafted",))
        return spec.compile(self.model.mesh, ("receive",))

    def _blank(self) -> Proposal:
        """Room for what rounds propose for every slot, nothing proposed."""
        return self.blank_tree() if self.verification.nodes else self.verification.blank(self.slots)

    def warm_up(self) -> None:
        """Compiles what sends proposals of the host, before rounds do."""
        if self.model.execution.one_array:
            self.to_device(jax.tree.map(np.asarray, create_arrays(self._blank)))

    def to_device(self, drafted: Proposal) -> Proposal:
        """A proposal of every slot as `accept` takes it.

        A proposal on the host is sent to an accelerator in one array.
        """
        if self.model.execution.one_array and isinstance(drafted.q, np.ndarray):
            return self.receive(drafted)[0]
        return drafted

    def _forward_spec(self, proposed: int, reach: int) -> ProgramSpec:
        def forward(parameters, pages, table, pending, tokens, lengths):
            tokens = jnp.concatenate([pending[:, None], tokens[:, :proposed]], axis=1)
            positions = lengths[:, None] + jnp.arange(proposed + 1)
            positions = jnp.where(lengths[:, None] < 0, -1, positions)
            rows = self.table(table, reach)
            hidden, pages = passes.step(
                self.model, parameters, pages, rows, tokens, positions, self.capacity
            )
            logits = passes.logits(self.model, parameters, hidden)
            # Flat: on a TPU arrays of three dimensions have another memory layout.
            return logits.reshape(-1, logits.shape[-1]), pages

        k = max(proposed, self.verification.widths[-1])
        structs = self.structs | {
            **self.by_slots(dict.fromkeys(("pending", "lengths"), program_spec.ints(self.slots))),
            "tokens": self.by_slots(program_spec.ints(self.slots, k)),
            "logits": self.logits_of(proposed),
        }
        results, host_or_device = ("logits", "pages"), ("pending", "tokens")
        return self.spec(
            forward,
            structs,
            ("pages",),
            results,
            host_args=("lengths",),
            host_or_device_args=host_or_device,
        )

    def accept_spec(
        self, rows: int, proposed: int, variant: str, *, masked: bool = False
    ) -> ProgramSpec:
        """`accept` for every slot, or for one slot whose number is an argument."""
        vocab, verification = self.model.config.vocab_size, self.verification
        common = {"tokens": self.ids, "parts": VARIANTS[variant], "rule": verification.rule}
        common["backend"] = self.model.execution.verify
        all_slots = rows == self.slots

        def accept(logits, drafted, sampling, start, history, slot, masks=None):
            logits = logits.reshape(-1, proposed + 1, vocab)
            drafted = proposal.narrow(drafted, proposed)
            sampling = greedy_where_idle(sampling, start >= 0)
            slot, owner = self.local_slot(slot)
            slot_history = history
            if not all_slots:
                slot_history = jax.tree.map(
                    lambda a: jax.lax.dynamic_slice_in_dim(a, slot, 1), history
                )
            outcome = verify(logits, drafted, sampling, start, slot_history, masks=masks, **common)
            new_history = history
            if VARIANTS[variant].adjusted is not False:
                new_history = commit(
                    slot_history, drafted, outcome, (start >= 0) & (all_slots | owner)
                )
                if not all_slots:
                    new_history = history._replace(
                        output=history.output.at[slot].set(new_history.output[0]),
                        recent=history.recent.at[slot].set(new_history.recent[0]),
                    )
            packed = jnp.concatenate(
                [outcome.accepted[:, None], emitted_tokens(drafted, outcome)], axis=1
            )
            results_of_rows = packed, outcome.bonus
            packed, bonus = (
                results_of_rows if all_slots else self.from_owner(results_of_rows, owner)
            )
            return packed, bonus, new_history

        structs = self.accept_structs(rows, proposed, masked=masked)
        results = (*(("read", "slots") if all_slots else ("whole", "whole")), "history")
        return self.spec(accept, structs, ("history",), results, host_args=("start", "slot"))
