"""Programs of a role that exist for several batch sizes."""

from __future__ import annotations

import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from jaxtyping import Bool
from typing_extensions import override

from ssd_jax.devices.programs.batch_sizes import BatchPlan, BatchSizes, Task
from ssd_jax.devices.programs.first_rows import over_first_rows
from ssd_jax.devices.programs.paged import PagedPrograms
from ssd_jax.devices.programs.program_spec import Name, Program, ProgramSpec
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import spans_processes
from ssd_jax.sampling.variants import VARIANTS, variant_name

MakeSpec = Callable[..., ProgramSpec]
"""Makes the specification of a program for the slots that its first argument, programs, has."""
LeftOut = Mapping[str, Mapping[str, Callable[[Any], Any]]]
"""By program and by name of a result, what it has of slots that a batch leaves out; see
`over_first_rows`."""


class HasBatches(ABC):
    """Programs of all slots, and the same for the first few slots; see `BatchSizes`.

    Attributes:
      local_slots: of each group of devices.
      batches: sizes that were asked for.
      batch_sizes: which programs rounds run.
    """

    model: FunctionalModel
    local_slots: int
    batch_sizes: BatchSizes
    _compiled: dict[Name, Program]
    batches = BatchPlan()

    def __init__(self) -> None:
        self.batch_sizes = BatchSizes([self.local_slots])
        self._add_lock = threading.Lock()

    @property
    @abstractmethod
    def tasks(self) -> tuple[Task, ...]:
        """What rounds run."""

    @abstractmethod
    def of_batch(self, size: int) -> Self:
        """What makes the specifications of programs for the first `size` slots of each group."""

    def makers(self) -> Iterable[tuple[Name, str, MakeSpec]]:
        """Name and variant of each program, and what makes its specification."""
        return ()

    def left_out(self) -> LeftOut:
        """See `LeftOut`; other results keep what they replace, or are zeros."""
        return {}

    def specs(self) -> dict[Name, ProgramSpec]:
        """Specifications of the programs of all slots."""
        return {variant_name(name, variant): make(self) for name, variant, make in self.makers()}

    def batch_specs(self, size: int, task: Task) -> dict[Name, ProgramSpec]:
        """Specifications of the programs of a batch size for a task."""
        part, left_out = self.of_batch(size), self.left_out()
        return {
            variant_name(self.batch_name(name, size), variant): over_first_rows(
                make(self), make(part), rest=left_out.get(str(name[0]))
            )
            for name, variant, make in self.makers()
        }

    def rows_of(self, live: Bool[np.ndarray, "B"]) -> int:
        """The least batch size that has all `live` slots."""
        return int((np.flatnonzero(live) % self.local_slots).max(initial=0)) + 1

    def choose_size(self, live: Bool[np.ndarray, "B"], *tasks: Task) -> int:
        """The batch size that runs the `live` slots; see `BatchSizes.choose`."""
        return self.batch_sizes.choose(self.rows_of(live), *tasks)

    def batch_name(self, name: Name, size: int) -> Name:
        """The name of a program for batches of a size."""
        return name if size == self.local_slots else (*name, f"batch {size}")

    def compile_batch(self, size: int, task: Task) -> int:
        """Compiles the programs of a batch size for a task; returns their number.

        One after another, since rounds that go on need the processor's cores.
        """
        specs = self.batch_specs(size, task)
        for name, spec in specs.items():
            self._add({name: spec.compile(self.model.mesh, name)})
        return len(specs)

    def _add(self, compiled: Mapping[Name, Program]) -> None:
        """Adds programs; other threads may run some, or add others, meanwhile."""
        with self._add_lock:
            self._compiled = {**self._compiled, **compiled}

    def _specs_at_start(self) -> dict[Name, ProgramSpec]:
        """Specifications of all batch sizes that are compiled with the programs of all slots."""
        specs: dict[Name, ProgramSpec] = {}
        if self.batches.at_start:
            for size, task in itertools.product(self.batches.sizes, self.tasks):
                specs |= self.batch_specs(size, task)
        return specs

    def _offer_batches(self) -> None:
        """Lets rounds choose among batch sizes, once the programs of all slots are compiled."""
        sizes, at_start, together, patience = self.batches
        before, shared = self.batch_sizes, spans_processes(self.model.mesh)
        self.batch_sizes = BatchSizes(
            (*sizes, self.local_slots),
            None if shared else self.compile_batch,  # each process would be done at its own time
            together=self.tasks if together else (),
            patience=patience,
        )
        self.batch_sizes.trials = before.trials
        self.batch_sizes.before_compiling = before.before_compiling
        for size in sizes if at_start else ():
            self.batch_sizes.add(size, self.tasks)


class BatchedPrograms(HasBatches, PagedPrograms):
    """`PagedPrograms` of which some are for several batch sizes."""

    def __init__(self, *arguments: Any) -> None:
        PagedPrograms.__init__(self, *arguments)
        HasBatches.__init__(self)

    @override
    def of_batch(self, size: int) -> Self:
        part = copy.copy(self)
        part.slots, part.local_slots = size * self.model.data_shards, size
        part.structs = self.structs | part.slot_structs()
        return part

    def of_variants(
        self, variants: Sequence[str], makers: Mapping[str, MakeSpec], *sizes: int
    ) -> Iterator[tuple[Name, str, MakeSpec]]:
        """`makers` of each variant and reach, which those that are given also take."""
        for variant, reach in itertools.product(variants, self.reaches):
            for name, make in makers.items():
                of_variant = partial(make, parts=VARIANTS[variant], reach=reach)
                yield self.with_reach((name, *sizes), reach), variant, of_variant
