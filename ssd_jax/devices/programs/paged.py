"""Compiled programs of a role over pages of its own, and how the pages belong to slots."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ssd_jax.devices.programs.passes import cut, history_structs, logits, over_words
from ssd_jax.devices.programs.program_spec import Name, Program, ProgramSpec, ints, working_memory
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray
from ssd_jax.kernels.tree_attention.xla import STATIC_BLOCK
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.sharding import DATA_AXIS, spans_processes
from ssd_jax.roles.records import ALL
from ssd_jax.sampling import penalties
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.variants import Needed, cheapest_variant
from ssd_jax.system.new_arrays import filled, zeros

_SHORT = 1024
"""Least positions a variant reads: variants that read fewer are not worth compiling."""

_PROMPT = ("tokens", "span")  # host arguments of programs that take a prompt


class Paging(NamedTuple):
    """Pages that slots take from a common stock, with the same numbers for both roles.

    Attributes:
      size: positions a page.
      total: pages of all slots together.
    """

    size: int
    total: int


def page_size(context: int) -> int:
    """Positions of a page that holds a whole context."""
    return -(-context // kv_pages.BLOCK) * kv_pages.BLOCK


class PagedPrograms:
    """Compiled programs of a model over pages of its own: `prefill`, and what its role adds.

    `prefill` of [1, width] tokens -> pages, history, logits, hidden states. `span` is [slot,
    offset, number of tokens that are not padding]; the logits [1, V] are of the last token, the
    hidden states [groups, width, hidden] of all in the slot's group of devices and garbage in
    others; both are None without `with_logits`. `remember`, where slots share pages, and `recall`,
    there and in drafts, run no tokens: they record them as prompt, or count them as output ->
    history. Both have only the widest width.

    Args:
      model: static description.
      slots: rows of a batched forward.
      context: most positions of a sequence.
      paging: pages that slots share; None gives each slot one page.
      dependencies: all else that the programs depend on; their `repr` must tell them apart.

    Attributes:
      cache_key: everything that decides what the programs compute, except their names.
      capacity: positions of a slot's pages.
      reaches: how far attention reads in variants of programs that read all positions up to there,
        visible or not, ascending; the last is the capacity.
      local_slots: slots of a device; programs see only these of a mesh.
      structs: of the programs' arguments, by name; "logits" are those of `prefill`.
    """

    def __init__(
        self,
        model: FunctionalModel,
        slots: int,
        context: int,
        paging: Paging | None = None,
        *dependencies: Any,
    ) -> None:
        parts = type(self).__name__, model.fingerprint, slots, context, paging, *dependencies
        self.cache_key = repr(parts)
        self.model, self.slots, self.context = model, slots, context
        self.local_slots = slots // model.data_shards
        self.paging = paging
        self.capacity = page_size(context)
        pages = Paging(self.capacity, slots)
        if paging is not None:
            pages = paging
            self.capacity = -(-context // paging.size) * paging.size
        self.reaches = (self.capacity,)
        if model.execution.attention == "xla_static":
            self.reaches = _reaches(self.capacity, paging.size if paging else STATIC_BLOCK)
        self.structs: dict[str, Any] = {
            "parameters": model.parameter_structs(),
            "pages": model.page_struct(pages.total, pages.size),
            "logits": cut(
                model,
                jax.ShapeDtypeStruct((1, model.config.outputs), jnp.float32),
                None,
                over_words(model, model.rules.outputs),
            ),
        }
        self.structs |= self.slot_structs()
        self._compiled: dict[Name, Program] = {}

    def slot_structs(self) -> dict[str, Any]:
        """The structs that have the slots in front."""
        model, slots, table = self.model, self.slots, None
        if self.paging is not None:
            table = self.by_slots(ints(slots, self.capacity // self.paging.size))
        return {
            "table": table,
            "history": history_structs(model, slots),
            "sampling": self.by_slots(SamplingRows(slots, model.config.vocab_size).structs()),
        }

    def __getitem__(self, name: Name) -> Program:
        return self._compiled[name]

    @property
    def names(self) -> Collection[Name]:
        """Names of all programs."""
        return self._compiled.keys()

    def with_reach(self, name: Name, reach: int) -> Name:
        """The name of a program's variant that reads `reach` positions of a slot."""
        return name if reach == self.capacity else (*name, reach)

    def select_reach(self, name: Name, end: int) -> Name:
        """The name of the variant that reads least of those that reach `end`, if any reaches it."""
        return self.with_reach(name, next((r for r in self.reaches if r >= end), self.capacity))

    def table(
        self, table: Int32[Array, "B P"] | None, reach: int | None = None
    ) -> Int32[Array, "B reached"] | kv_pages.Contiguous:
        """The page table of all slots, from a program's argument; None if each slot has one page.

        No positions from `reach` on are read or written; None is the capacity.
        """
        if self.paging is None or table is None:
            return kv_pages.Contiguous(reach=reach)
        return table if reach is None else table[:, : reach // self.paging.size]

    def select(self, name: Name, needed: Needed) -> Program:
        """The cheapest variant of a program that has the parts of sampling that its rows need."""
        return self[cheapest_variant(self._compiled, name, needed)]

    def by_slots(self, structs: Any) -> Any:
        """Structs of arrays with the slots in front, on the model's devices."""
        return cut(self.model, structs, DATA_AXIS)

    def spec(
        self,
        function: Callable[..., Any],
        structs: Mapping[str, Any],
        donate: Sequence[str],
        results: Sequence[str],
        *,
        host_args: Sequence[str] = (),
        host_or_device_args: Sequence[str] = (),
        extra_key: Sequence[Any] = (),
        options: tuple[tuple[str, bool], ...] = (),
    ) -> ProgramSpec:
        """A function to compile for the `structs` that its parameters are named after.

        A last parameter that has a default and no struct is none of the program's.

        Args:
          host_args, host_or_device_args: parameters that a call has on the host, and on the host
            or the device, where the platform takes one array; see `Packing`.
          extra_key: what the function depends on beside the programs' `cache_key`.
          options: the compiler's.
          results: what it returns: names of structs, "slots" for anything with the slots in front,
            "read" if the host reads it as well, or "whole" for what every device has whole.
        """
        parameters = inspect.signature(function).parameters.items()
        names = [name for name, p in parameters if name in structs or p.default is p.empty]
        arguments = tuple(structs[name] for name in names)
        shardings = None
        if self.model.mesh is not None:
            by_slots = self.model.slot_sharding
            usual = {"slots": by_slots, "read": by_slots, "whole": self.model.replicated}
            shardings = tuple(
                usual.get(name) or jax.tree.map(lambda struct: struct.sharding, structs[name])
                for name in results
            )
        # A host that shares the slots with other hosts reads the results of all slots.
        shared = spans_processes(self.model.mesh)
        gathered = [i for i, name in enumerate(results) if shared and name == "read"]
        if shared or not self.model.execution.one_array:
            host_args = host_or_device_args = ()
        kinds = donate, host_args, host_or_device_args
        donated, on_host, on_either = (tuple(map(names.index, kind)) for kind in kinds)
        cache_key = f"{self.cache_key} with {extra_key}" if extra_key else self.cache_key
        layout = shardings, gathered, on_host, on_either
        return ProgramSpec(
            function, arguments, donated, *layout, options, cache_key, tuple(results)
        )

    def prompt_specs(self, *, with_logits: bool) -> dict[Name, ProgramSpec]:
        """`prefill` of every width, `remember` and `recall`; drafts' are those without logits."""
        widths = self.model.execution.prefill_chunks
        specs: dict[Name, ProgramSpec] = {
            self.with_reach(("prefill", width), reach): self._prefill_spec(
                width, with_logits, reach
            )
            for width in widths
            for reach in self.reaches
        }
        if self.paging is not None:
            specs["remember", max(widths)] = self._record_spec(max(widths), output=False)
        if self.paging is not None or not with_logits:
            specs["recall", max(widths)] = self._record_spec(max(widths), output=True)
        return specs

    def _prefill_spec(self, width: int, with_logits: bool, reach: int) -> ProgramSpec:
        model, vocab = self.model, self.model.config.vocab_size

        def prefill(parameters, pages, history, table, tokens, span):
            slot, offset, count = span
            slot, owner = self.local_slot(slot)
            index = jnp.arange(width)[None]
            present = (index < count) & owner
            positions = jnp.where(present, offset + index, self.capacity)
            visible = jnp.where(present, positions + 1, 0)
            slot_table = self.table(table, reach)
            if isinstance(slot_table, kv_pages.Contiguous):
                slot_table = dataclasses.replace(slot_table, first=slot)
            else:
                slot_table = jax.lax.dynamic_slice_in_dim(slot_table, slot, 1)
            hidden, pages, _ = model.module(parameters).hidden(
                tokens, positions, visible, pages, slot_table
            )
            real_tokens = jnp.where(present, tokens, vocab)[0]
            history = penalties.add_prompt(history, slot, real_tokens, (offset == 0) & owner)
            if not with_logits:
                return pages, history, None, None
            last = jax.lax.dynamic_slice_in_dim(hidden[0], count - 1, 1)
            return pages, history, self.from_owner(logits(model, parameters, last), owner), hidden

        donated = ("pages", "history")
        results = (*donated, "logits" if with_logits else "whole", "slots")
        structs, options = self._prompt_structs(width), model.execution.chunk_options
        return self.spec(prefill, structs, donated, results, host_args=_PROMPT, options=options)

    def _record_spec(self, width: int, *, output: bool) -> ProgramSpec:
        """`recall` if `output`, else `remember`."""
        vocab = self.model.config.vocab_size

        def note(history, tokens, span):
            slot, offset, count = span
            slot, owner = self.local_slot(slot)
            present = (jnp.arange(width) < count) & owner
            if output:
                return (penalties.recall_output(history, slot, jnp.where(present, tokens[0], -1)),)
            real_tokens = jnp.where(present, tokens[0], vocab)
            return (penalties.add_prompt(history, slot, real_tokens, (offset == 0) & owner),)

        history = ("history",)
        return self.spec(note, self._prompt_structs(width), history, history, host_args=_PROMPT)

    def _prompt_structs(self, width: int) -> dict[str, Any]:
        return self.structs | {"tokens": ints(1, width), "span": ints(3)}

    def local_slot(self, slot: Int32[Array, ""]) -> tuple[Int32[Array, ""], Bool[Array, ""]]:
        """Index of a slot among those of the device, and whether the device has it."""
        if self.model.data_shards == 1:
            return slot, jnp.array(True)
        index = slot - jax.lax.axis_index(DATA_AXIS) * self.local_slots
        return jnp.clip(index, 0, self.local_slots - 1), (index >= 0) & (index < self.local_slots)

    def from_owner(self, tree: Any, owner: Bool[Array, ""]) -> Any:
        """Arrays of the devices that have a slot, on all devices."""
        if self.model.data_shards == 1:
            return tree
        return jax.tree.map(lambda x: jax.lax.psum(jnp.where(owner, x, 0), DATA_AXIS), tree)

    @property
    def working_memory(self) -> int:
        """Most bytes that a program takes while it runs; see `program_spec.working_memory`."""
        return working_memory(self._compiled.values())

    def new_pages(self) -> PageArray:
        """Zeroed pages for every slot."""
        return zeros(self.structs["pages"])

    def any_table(self) -> Int32[np.ndarray, "B P"] | None:
        """A page table with pages for the first slot; other slots may have the same pages."""
        if self.paging is None:
            return None
        per_slot = self.capacity // self.paging.size
        count = self.paging.total // self.model.data_shards
        return np.arange(self.slots * per_slot, dtype=np.int32).reshape(self.slots, -1) % count

    def new_history(self) -> History:
        """History without tokens in any slot."""
        structs: History = self.structs["history"]
        values: Any = jax.tree.map(lambda _: 0, structs)
        return filled(structs, values._replace(recent=-1))

    def prefill(
        self,
        parameters: Parameters,
        pages: PageArray,
        history: History,
        table: Int32[Array, "B P"] | Int32[np.ndarray, "B P"] | None,
        slot: int,
        tokens: Sequence[int],
        offset: int,
        reused: int = 0,
        prompt: int = ALL,
    ) -> tuple[PageArray, History, Any, list[tuple[int, Any]]]:
        """Writes the keys and values of any number of tokens of a slot's text, in chunks.

        Args:
          reused: tokens at positions below this only enter the history.
          prompt: tokens from this position on count as output.

        Returns: pages, history, and, if the programs return any, the logits of the last token and
          each chunk's number of tokens and hidden states.
        """
        execution, logits, chunks = self.model.execution, None, []
        widest = max(execution.prefill_chunks)
        remembered = min(max(reused - offset, 0), len(tokens))
        for begin in range(0, remembered, widest):
            arguments = _padded(
                tokens[begin : min(begin + widest, remembered)], widest, slot, offset + begin
            )
            (history,) = self["remember", widest](history, *arguments)
        begin = remembered
        for width in execution.chunk_sizes(len(tokens) - remembered):
            arguments = _padded(tokens[begin : begin + width], width, slot, offset + begin)
            program = self[self.select_reach(("prefill", width), offset + begin + width)]
            pages, history, logits, hidden = program(parameters, pages, history, table, *arguments)
            chunks.append((min(width, len(tokens) - begin), hidden))
            begin += width
        for begin in range(max(prompt - offset, 0), len(tokens), widest):
            arguments = _padded(tokens[begin : begin + widest], widest, slot, offset + begin)
            (history,) = self["recall", widest](history, *arguments)
        return pages, history, logits, chunks


def _reaches(capacity: int, unit: int) -> tuple[int, ...]:
    """Reaches, each a quarter of the next in whole units, down to `_SHORT`."""
    reaches = [capacity]
    while (quarter := -(-reaches[0] // (4 * unit)) * unit) >= _SHORT and quarter < reaches[0]:
        reaches.insert(0, quarter)
    return tuple(reaches)


def _padded(
    tokens: Sequence[int], width: int, slot: int, offset: int
) -> tuple[Int32[np.ndarray, "1 {width}"], Int32[np.ndarray, "3"]]:
    """Tokens of a slot from a position on, padded, and `span`, as `prefill` takes them."""
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded, np.array([slot, offset, len(tokens)], np.int32)
