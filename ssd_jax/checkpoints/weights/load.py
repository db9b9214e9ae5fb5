"""Loads checkpoint tensors onto devices: checks them, then reads, casts (on host), transfers."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from ssd_jax.checkpoints.weights.expert_groups import read_expert_groups
from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.tensors import Index, Progress, TensorSource, bounds
from ssd_jax.errors import InputError
from ssd_jax.kernels.experts.groups import ExpertGroupStructs
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.groups import GroupQuantized, GroupStructs
from ssd_jax.kernels.linear.kinds import BFLOAT16, KINDS, STORED_KINDS, Kind
from ssd_jax.kernels.linear.packing import pack_bfloat16, pack_blocks
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.stacks import Stacks
from ssd_jax.models.tensor_loading import Loaded
from ssd_jax.system.huge_pages import HugePages

_THREADS = 2
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Prepare = Callable[[str, Loaded], dict[str, jax.Array]]
"""(name, array as loaded) -> the arrays to keep of it, by name."""

Memory = Callable[[str, int], UInt8[np.ndarray, "bytes"]]
"""(name, bytes) -> zeros, aligned to 64 bytes, that a tensor is packed in."""


def _as_loaded(name: str, array: Loaded) -> dict[str, jax.Array]:
    assert isinstance(array, jax.Array)
    return {name: array}


def load_parameters(
    tensors: TensorSource, model: FunctionalModel, *, where: str, progress: Progress | None = None
) -> list[jax.Array]:
    """A model's parameters, as its programs take them; see `load_arrays`."""
    pages = HugePages()
    stacks = Stacks(model, pages)
    arrays = load_arrays(
        tensors,
        model.checkpoint_structs(),
        where=where,
        prepare=stacks.prepare,
        memory=stacks.memory,
        native_kinds=model.stored if model.execution.linear == "cpu" else None,
        groups=model.group_structs(),
        progress=progress,
        pages=pages,
    )
    return model.assemble(arrays | stacks.arrays())


def load_arrays(
    tensors: TensorSource,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    where: str,
    prepare: Prepare = _as_loaded,
    memory: Memory | None = None,
    native_kinds: Mapping[str, str] | None = None,
    groups: Mapping[str, GroupStructs | ExpertGroupStructs] | None = None,
    progress: Progress | None = None,
    pages: HugePages | None = None,
) -> dict[str, jax.Array]:
    """Loads the wanted tensors.

    A struct with a `.sharding` is read slice by slice: only what this process's devices hold, each
    slice once. Without one, the array goes to the default device, two tensors at a time as long as
    together they are no larger than the largest. Host memory thus stays about one tensor above the
    result.

    Args:
      structs: shape, dtype and sharding by tensor name; tensors not named are not read.
      where: names the checkpoint in errors.
      prepare: called from loading threads with each array; its result replaces the array, so that a
        model quantised this way is never held whole in its wider dtype.
      memory: of tensors that are packed as they are stored; None is new memory.
      native_kinds: by name, kinds of the tensors that are packed as they are stored; on the default
        device.
      groups: by name, structs of the tensors that stay in groups, for `prepare`.
      progress: called from loading threads, never two at once, in growing order.
      pages: memory for the arrays of processors.

    Raises:
      InputError: a tensor is missing or has another shape; nothing is read in this case.
    """
    check_tensors(tensors, structs, where)
    sizes = {name: math.prod(struct.shape) for name, struct in structs.items()}
    nbytes = {name: sizes[name] * struct.dtype.itemsize for name, struct in structs.items()}
    limit = _LoadLimit(max(sizes.values(), default=0), progress, sum(nbytes.values()))

    pages = pages or HugePages()
    memory = memory or (lambda _, nbytes: pages.allocate(nbytes))

    def load(name: str) -> dict[str, jax.Array]:
        struct, kind = structs[name], (native_kinds or {}).get(name)
        with limit.loading(sizes[name], nbytes[name]):
            if kind in STORED_KINDS:
                return prepare(name, _read_panels(tensors, name, KINDS[kind], memory))
            if kind == BFLOAT16.name:
                array = pack_bfloat16(jnp.asarray(tensors.read(name)))
            elif groups is not None and name in groups:
                of_name = groups[name]
                if isinstance(of_name, ExpertGroupStructs):
                    array = read_expert_groups(tensors, name, of_name)
                else:
                    array = _read_groups(tensors, name, of_name)
            elif struct.sharding is None:
                array = jax.device_put(tensors.read(name).astype(struct.dtype, copy=False))
            else:
                array = _read_sharded(tensors, name, struct)
            prepared = prepare(name, array)
            # Finish before the next tensor is read, so that host memory holds only this one.
            return {
                name: _on_huge_pages(jax.block_until_ready(prepared[name]), pages)
                for name in prepared
            }

    shardings = [struct.sharding for struct in structs.values()]
    # Processes that share a mesh must run programs in the same order.
    spans_processes = any(s is not None and not s.is_fully_addressable for s in shardings)
    with ThreadPoolExecutor(1 if spans_processes else _THREADS) as pool:
        loaded = pool.map(load, structs)  # an error cancels tensors not begun
        return {name: array for arrays in loaded for name, array in arrays.items()}


def _read_panels(tensors: TensorSource, name: str, kind: Kind, memory: Memory) -> jax.Array:
    *experts, outputs, inputs = tensors.shape(name)
    panels, panel_bytes = kind.packed_shape(outputs, inputs)
    packed = memory(name, math.prod(experts) * panels * panel_bytes)
    packed = packed.reshape(-1, panels, panel_bytes)
    if experts:
        for expert, of_expert in enumerate(packed):
            blocks = tensors.read_expert_blocks(name, expert, slice(0, outputs))
            pack_blocks(kind, blocks, of_expert)
    else:
        pack_blocks(kind, tensors.read_blocks(name), packed[0])
    return jax.device_put(packed.reshape(-1, panel_bytes))


def _on_huge_pages(array: jax.Array, pages: HugePages) -> jax.Array:
    """The array, moved to huge pages if it is whole in the memory of processors."""
    devices = array.sharding.device_set
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        return array
    return jax.device_put(pages.copy(np.asarray(array)), array.sharding)  # not copied again


def check_tensors(
    tensors: TensorSource, structs: Mapping[str, jax.ShapeDtypeStruct], where: str
) -> None:
    """Checks names and shapes without reading any data.

    Raises:
      InputError: a tensor is missing or has another shape.
    """
    missing = [name for name in structs if name not in tensors.shapes]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise InputError(
            f"{where}: tensor {missing[0]!r}{more} is missing; expected shape "
            f"{structs[missing[0]].shape}. The file does not hold the model its configuration "
            "describes: get it again, or another one"
        )
    for name, struct in structs.items():
        shape = tensors.shape(name)
        if shape != struct.shape:
            raise InputError(
                f"{where}: tensor {name!r} has shape {shape}, expected {struct.shape} from the "
                "configuration"
            )


def check_size(tensors: TensorSource, config: ModelConfig, where: str) -> None:
    """Checks a configuration's sizes against a few tensors, before modules are built: a billion
    layers would take for ever.

    Raises:
      InputError: there are more or fewer layers than tensors of them, or a tensor is missing or has
        another shape.
    """
    layers = {match[1] for name in tensors.shapes if (match := _LAYER.match(name))}
    if config.num_layers != len(layers):
        raise InputError(
            f"{where}: the configuration has {config.num_layers} layers, the file tensors of "
            f"{len(layers)}; get it again, or another one"
        )
    hidden, size, layer = config.hidden_size, config.head_dim, "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        f"{layer}.self_attn.q_proj.weight": (config.num_heads * size, hidden),
        f"{layer}.self_attn.k_proj.weight": (config.num_kv_heads * size, hidden),
    }
    experts = config.mechanisms.experts
    if experts is not None and config.mechanisms.has_experts(0):
        shapes[f"{layer}.mlp.experts.up_proj.weight"] = experts.count, experts.intermediate, hidden
    else:
        shapes[f"{layer}.mlp.up_proj.weight"] = config.intermediate_size, hidden
    structs = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    check_tensors(tensors, structs, where)


def _read_sharded(tensors: TensorSource, name: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
    slices: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(index: Index | None) -> np.ndarray:
        part = bounds(index, struct.shape)
        key = tuple((axis.start, axis.stop) for axis in part)
        if key not in slices:  # replicas request the same slice again
            slices[key] = tensors.read(name, part).astype(struct.dtype, copy=False)
        return slices[key]

    return jax.make_array_from_callback(struct.shape, struct.sharding, read)


def _read_groups(tensors: TensorSource, name: str, structs: GroupStructs) -> GroupQuantized:
    """A matrix in groups, of which the devices of this process hold some outputs and groups."""
    values = structs.values
    form = GroupForm(values.dtype.name, values.shape[1], minima=structs.minima is not None)
    read: dict[tuple[int, int], StoredGroups] = {}

    def part(index: Index | None, field: int, shape: tuple[int, ...]) -> np.ndarray:
        groups, *_, outputs = bounds(index, shape)
        key = outputs.start, outputs.stop
        if key not in read:  # all groups of these outputs
            read[key] = tensors.read_groups(name, outputs).in_form(form).arranged()
        array = read[key][field]
        assert array is not None
        return np.ascontiguousarray(array[groups])

    def array(field: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
        shape, sharding = struct.shape, struct.sharding
        if sharding is None:
            return jax.device_put(part(None, field, shape))
        return jax.make_array_from_callback(
            shape, sharding, lambda index: part(index, field, shape)
        )

    minima = None if structs.minima is None else array(2, structs.minima)
    return GroupQuantized(array(0, values), array(1, structs.scales), minima)


class _LoadLimit:
    """Lets threads work in parallel as long as their tensors together have at most `limit`
    elements, and reports the loaded bytes, of `total`, in order."""

    def __init__(self, limit: int, progress: Progress | None, total: int) -> None:
        self._limit, self._progress, self._total = limit, progress, total
        self._loading = self._loaded = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def loading(self, elements: int, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._loading + elements <= self._limit)
            self._loading += elements
        try:
            yield
            with self._changed:
                self._loaded += nbytes
                if self._progress is not None:
                    self._progress(self._loaded, self._total)
        finally:
            with self._changed:
                self._loading -= elements
                self._changed.notify_all()
