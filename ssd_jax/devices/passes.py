"""Passes through a model over its pages, shared by the programs of both roles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices.sampling_rows import SamplingRows
from ssd_jax.kernels import kv_pages
from ssd_jax.models.functional import AllBranches, AllPages, FunctionalModel, Parameters
from ssd_jax.sampling import penalties
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.variants import Needed, fitting
from ssd_jax.system.cores import usable_cores


class ProgramSpec(NamedTuple):
    """A pure function to compile for arguments of known shapes; `donate` are reused in place."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]

    def compile(self, mesh: Mesh | None) -> jax.stages.Compiled:
        """The program, for the default device or for those of a mesh.

        Arguments that name no sharding are whole on every device of the mesh, and so are results;
        but one that takes the place of a donated argument is laid out as that is.
        """
        if mesh is None:
            jitted = jax.jit(self.function, donate_argnums=self.donate)
            return jitted.lower(*self.arguments).compile()
        everywhere = NamedSharding(mesh, PartitionSpec())

        def placed(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = struct.sharding or everywhere
            return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

        arguments = jax.tree.map(placed, self.arguments)
        donated = [arguments[index] for index in self.donate]
        laid_out = {
            _kind(tree): jax.tree.map(lambda struct: struct.sharding, tree) for tree in donated
        }
        results = jax.eval_shape(self.function, *arguments)
        shardings = tuple(laid_out.get(_kind(result), everywhere) for result in results)
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=shardings)
        return jitted.lower(*arguments).compile()


def spec(
    function: Callable[..., Any], structs: Mapping[str, Any], donate: Sequence[str]
) -> ProgramSpec:
    """A function to compile for the `structs` that its parameters are named after."""
    names = list(inspect.signature(function).parameters)
    return ProgramSpec(
        function, tuple(structs[name] for name in names), tuple(map(names.index, donate))
    )


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _kind(tree: Any) -> tuple[Any, ...]:
    """What an argument and a result must share for one to be reused for the other."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)


Name = tuple[str | int, ...]
"""What a program does, for which sizes, and its variant where there is more than one."""


def compile_all(
    specs: Mapping[Name, ProgramSpec], mesh: Mesh | None, progress: Progress | None = None
) -> dict[Name, jax.stages.Compiled]:
    """Tracing holds the interpreter lock, compiling does not: as many threads as cores, two at
    least, overlap them.

    `progress` is called with (programs done, programs in all).
    """
    with ThreadPoolExecutor(max(2, len(usable_cores()))) as pool:
        futures = {name: pool.submit(spec.compile, mesh) for name, spec in specs.items()}
        for done, _ in enumerate(chain((None,), as_completed(futures.values()))):
            if progress is not None:
                progress(done, len(futures))
        return {name: future.result() for name, future in futures.items()}


def page_size(context: int) -> int:
    """Positions of a page that holds a whole context."""
    return -(-context // kv_pages.BLOCK) * kv_pages.BLOCK


def step(
    model: FunctionalModel,
    parameters: Parameters,
    pages: AllPages,
    tokens: jax.Array,
    positions: jax.Array,
    size: int,
) -> tuple[jax.Array, AllPages]:
    """Runs tokens [B, R] at positions [B, R]; negative ones are idle and see nothing.

    Args:
      size: positions of a slot's page; what lies beyond is not written.

    Returns: hidden states [B, R, hidden], pages.
    """
    visible = jnp.clip(positions + 1, 0, size)
    positions = jnp.where(positions < 0, size, positions)
    module = model.module(parameters)
    hidden, pages, _ = module.hidden(tokens, positions, visible, pages, kv_pages.Contiguous())
    return hidden, pages


def promote(
    model: FunctionalModel,
    pages: AllPages,
    scratch: AllBranches,
    winner: jax.Array,
    positions: jax.Array,
) -> AllPages:
    """Copies the keys and values of one branch a row into its page.

    Args:
      scratch: of M branches a row.
      winner: [B] int32, the branch.
      positions: [B, depths] int32, where each of its tokens belongs; outside the page: nowhere.
    """
    rows = jnp.arange(winner.shape[0])

    def copy(array: jax.Array, branches: jax.Array, first: jax.Array | int) -> jax.Array:
        own = branches[rows, :, :, jnp.maximum(winner, 0)].swapaxes(1, 2)  # [B, depths, heads, 2 D]
        table, windows = kv_pages.Contiguous(first), model.execution.window_writes
        return kv_pages.write(array, table, positions, own, windows=windows)

    if isinstance(pages, list):
        return [copy(layer, own, 0) for layer, own in zip(pages, scratch, strict=True)]
    assert not isinstance(scratch, list)
    count = winner.shape[0]  # scanned layers lie one after another

    def body(pages: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, branches = layer
        return copy(pages, branches, index * count), None

    return jax.lax.scan(body, pages, (jnp.arange(scratch.shape[0]), scratch))[0]


def logits(model: FunctionalModel, parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """hidden [B, R, hidden] -> [B, R, outputs] float32, whole on every device: whoever draws from a
    row does so as on one device."""
    flat = model.module(parameters).logits(hidden.reshape(-1, hidden.shape[-1]))
    if model.mesh is not None:
        # Without the first constraint the head itself is gathered.
        for spec in (PartitionSpec(None, model.rules.outputs), PartitionSpec()):
            flat = jax.lax.with_sharding_constraint(flat, NamedSharding(model.mesh, spec))
    return flat.reshape(*hidden.shape[:-1], -1)


class PagedPrograms:
    """Compiled programs of a model over pages of its own: `prefill`, and what its role adds.

    `prefill` of [1, width] tokens -> pages, history, logits. `where` is [slot, offset, number of
    tokens that are not padding]; the logits [1, V] are of the last token, None without
    `with_logits`.

    Args:
      model: static description.
      slots: rows of a batched forward.
      context: most positions a sequence may have.

    Attributes:
      structs: of the programs' arguments, by name.
    """

    def __init__(self, model: FunctionalModel, slots: int, context: int) -> None:
        self.model, self.slots, self.context = model, slots, context
        self.page_size = page_size(context)
        vocab = model.config.vocab_size
        self.structs: dict[str, Any] = {
            "parameters": model.parameter_structs(),
            "pages": model.page_structs(slots, self.page_size),
            "history": jax.eval_shape(self.new_history),
            "sampling": SamplingRows(slots, vocab).structs(),
        }
        self._compiled: dict[Name, jax.stages.Compiled] = {}

    def __getitem__(self, name: Name) -> jax.stages.Compiled:
        return self._compiled[name]

    def fitting(self, name: Name, needed: Needed) -> jax.stages.Compiled:
        """The cheapest variant of a program that has the parts of the law that its rows need."""
        return self[fitting(self._compiled, name, needed)]

    def new_pages(self) -> AllPages:
        """Zeroed pages for every slot."""
        return self.model.new_pages(self.slots, self.page_size)

    def new_history(self) -> History:
        """No tokens in any slot."""
        return penalties.empty(self.slots, self.model.config.vocab_size)

    def prefill(
        self,
        parameters: Parameters,
        pages: AllPages,
        history: History,
        slot: int,
        tokens: Sequence[int],
        offset: int,
    ) -> tuple[AllPages, History, Any]:
        """Writes the keys and values of any number of prompt tokens of a slot, in chunks.

        Returns: pages, history, and the logits of the last token, if the programs give any.
        """
        chunks, logits = self.model.execution.prefill_chunks, None
        most = max(chunks)
        for begin in range(0, len(tokens), most):
            part = tokens[begin : begin + most]
            width = min(chunk for chunk in chunks if chunk >= len(part))
            padded = np.zeros((1, width), np.int32)
            padded[0, : len(part)] = part
            where = np.array([slot, offset + begin, len(part)], np.int32)
            program = self["prefill", width]
            pages, history, logits = program(parameters, pages, history, padded, where)
        return pages, history, logits

    def prefill_specs(self, *, with_logits: bool) -> dict[Name, ProgramSpec]:
        """`prefill` of every width."""
        widths = self.model.execution.prefill_chunks
        return {("prefill", width): self._prefill_spec(width, with_logits) for width in widths}

    def _prefill_spec(self, width: int, with_logits: bool) -> ProgramSpec:
        model, vocab = self.model, self.model.config.vocab_size

        def prefill(parameters, pages, history, tokens, where):
            slot, offset, count = where
            index = jnp.arange(width)[None]
            real = index < count
            positions = jnp.where(real, offset + index, self.page_size)
            visible = jnp.where(real, positions + 1, 0)
            module = model.module(parameters)
            table = kv_pages.Contiguous(slot)
            hidden, pages, _ = module.hidden(tokens, positions, visible, pages, table)
            history = penalties.add_prompt(
                history, slot, jnp.where(real, tokens, vocab)[0], offset == 0
            )
            if not with_logits:
                return pages, history, None
            last = jax.lax.dynamic_slice_in_dim(hidden[0], count - 1, 1)
            return pages, history, module.logits(last)

        structs = self.structs | {"tokens": ints(1, width), "where": ints(3)}
        return spec(prefill, structs, ("pages", "history"))
