"""A decoder as pure functions over a flat list of parameters.

Modules are built abstractly and split once; compiled programs take the flat list, which costs a
fraction of the call overhead of a module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int32

from ssd_jax.compat import keeps_int4
from ssd_jax.kernels.experts.shards import ExpertShards
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import PageArray
from ssd_jax.kernels.linear.blocks import BLOCK, to_blocks
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.groups import GroupQuantized, GroupStructs
from ssd_jax.kernels.linear.packing import pack_bfloat16, pack_int8
from ssd_jax.kernels.linear.quantized import Quantized, quantize
from ssd_jax.kernels.piece import Piece
from ssd_jax.models import bundles
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.decoder import CausalLM
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import Axes, Embedding, ExpertMatrix, Matrix
from ssd_jax.models.sharding import (
    DATA_AXIS,
    PAGES_AXES,
    TENSOR_AXIS,
    ShardingRules,
    put,
    replicated,
)
from ssd_jax.system.compile_cache import store_in_use
from ssd_jax.system.stored_jit import StoredJit

Parameters = Sequence[jax.Array]

_EMBEDDING = "model.embed_tokens."
_SCALE = "_scale"
"""Suffix to a weight's name: the scales of its int8 rows, or of its groups."""
_MINIMUM = "_minimum"
"""Suffix to a weight's name: the minima of its groups."""
_CACHE_BYTES = 2**25  # bytes of weights that stay in the cache shared by cores


class FunctionalModel:
    """Static description of a model; holds no arrays.

    Attributes:
      config: architecture.
      execution: platform choices; its kernels know how the mesh shards heads.
      mesh, rules: where parameters and pages live; `mesh=None` is the default device.
      kv_heads: key/value heads over all devices that share a model, copies included; see
        `ShardingRules.kv_copies`.
      output_ids: [N], token of each row of the output head, ascending; `config.output_size` is N.
        None where row v is token v. They are constants in a draft's programs.
      stored: by tensor name, the kind of each weight that is packed as its checkpoint stores it,
        where weights are packed.
      ungrouped: number of weights that are not in groups of inputs, as `groups` has them: layers
        that run in one loop have them in different ways.
      bundles: parameters that hold several tensors.

    Args:
      expert_parallel: see `ShardingRules.for_mesh`; without a mesh it means nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        execution: Execution,
        *,
        mesh: Mesh | None = None,
        output_ids: Int32[np.ndarray, "N"] | None = None,
        stored: Mapping[str, str] | None = None,
        groups: Mapping[str, GroupForm] | None = None,
        expert_parallel: bool = False,
    ) -> None:
        if output_ids is not None and len(output_ids) != config.output_size:
            raise ValueError(f"{len(output_ids)} ids for output_size = {config.output_size}")
        self.output_ids = output_ids
        self.config = config
        self.mesh = mesh
        self.rules = ShardingRules()
        if mesh is not None:
            self.rules = ShardingRules.for_mesh(config, mesh, expert_parallel=expert_parallel)
        if mesh is not None and execution.kernels is not None:
            shards = HeadShards(TENSOR_AXIS, split=self.rules.kv_heads is not None)
            kernels = execution.kernels._replace(shards=shards)
            execution = dataclasses.replace(execution, kernels=kernels)
        if mesh is not None and config.mechanisms.experts is not None:
            by_expert = self.rules.experts is not None
            if by_expert or self.rules.expert_ffn is not None:
                shares = ExpertShards(TENSOR_AXIS, mesh.shape[TENSOR_AXIS], by_expert, mesh)
                execution = dataclasses.replace(execution, expert_shards=shares)
            else:
                experts = execution.experts._replace(shards=HeadShards(TENSOR_AXIS, split=False))
                execution = dataclasses.replace(execution, experts=experts)
        self.kv_heads = config.num_kv_heads * self.rules.kv_copies
        if execution.scan_layers and not _can_scan(config):
            execution = dataclasses.replace(execution, scan_layers=False)
        self.execution = execution
        self.stored = dict(stored or {})
        sharded_config = dataclasses.replace(config, num_kv_heads=self.kv_heads)
        module = CausalLM(sharded_config, execution)
        self._packed = _pack(module, self.stored) if execution.linear == "cpu" else {}
        grouped = self._group(module, groups or {})
        blocked = self._block(module) if execution.blocks else {}
        for _, matrix in nnx.iter_modules(module):
            if isinstance(matrix, Matrix):
                matrix.digits = execution.digits
                matrix.scaled_sums = execution.scaled_sums
        self._graph, state = nnx.split(module)
        self._flat = {_joined(path): variable for path, variable in nnx.to_flat_state(state)}
        tensors = {name: self._tensors(name) for name in self._flat}
        self._grouped = {
            tensor: matrix for name, matrix in grouped.items() for tensor in tensors[name]
        }
        self.ungrouped = len(groups or {}) - len(self._grouped)
        self._variables = {
            tensor: variable for name, variable in self._flat.items() for tensor in tensors[name]
        }
        self._blocked = {
            tensor: matrix for name, matrix in blocked.items() for tensor in tensors[name]
        }
        self._treedef = jax.tree.structure(state)
        structs = {name: variable.get_value() for name, variable in self._flat.items()}
        axes = {name: variable.axes for name, variable in self._flat.items()}
        if execution.scan_layers:
            self.bundles = bundles.bundle_layers(structs, axes, tensors)
        elif self._packed:
            self.bundles = bundles.bundle_bytes(structs, self._packed)
        elif execution.few_arrays:
            devices = 1 if mesh is None else mesh.shape[TENSOR_AXIS]
            self.bundles = bundles.bundle_rows(structs, axes, self.rules, devices)
        else:
            self.bundles = bundles.Bundles({}, {})

    @functools.cached_property
    def fingerprint(self) -> str:
        """Everything that determines the model's programs, as text; it identifies stored ones."""
        ids = None if self.output_ids is None else self.output_ids.tolist()
        mesh = None
        if self.mesh is not None:
            mesh = self.mesh.axis_names, self.mesh.devices.shape, self.mesh.axis_types
        forms = sorted((name, matrix.form) for name, matrix in self._grouped.items())
        weights = sorted(self.stored.items()), forms
        parts = self.config, self.execution, mesh, weights, ids
        return repr(parts)

    def checkpoint_structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Checkpoint tensor name -> shape, dtype and sharding to load it with."""
        structs = {}
        for name, variable in self._variables.items():
            if name.endswith((_SCALE, _MINIMUM)):
                continue  # made from its weight, or read with it
            value, axes, copies = variable.get_value(), variable.axes, self._copies(variable)
            shape = value.shape[-len(axes) :]  # of one layer
            grouped = self._grouped.get(name)
            if matrix := self._packed.get(name) or self._blocked.get(name) or grouped:
                shape, axes = matrix.shape, matrix.axes
            if copies > 1:
                shape, axes = (shape[0] // copies, *shape[1:]), (None,) * len(shape)
            is_float = grouped or not jnp.issubdtype(value.dtype, jnp.integer)
            dtype = value.dtype if is_float else self.execution.floating
            structs[name] = self._struct(shape, dtype, axes)
        return structs

    def group_structs(self) -> dict[str, GroupStructs]:
        """Structs to load each tensor with whose weight is in groups, as `checkpoint_structs`."""

        def struct(name: str) -> jax.ShapeDtypeStruct:
            variable = self._variables[name]
            value, axes, copies = variable.get_value(), variable.axes, self._copies(variable)
            shape = value.shape[-len(axes) :]
            if copies > 1:
                shape, axes = (*shape[:-1], shape[-1] // copies), (None,) * len(shape)
            return self._struct(shape, value.dtype, axes)

        return {
            name: GroupStructs(
                struct(name),
                struct(f"{name}{_SCALE}"),
                None if matrix.weight_minimum is None else struct(f"{name}{_MINIMUM}"),
            )
            for name, matrix in self._grouped.items()
        }

    def prepare(self, name: str, array: jax.Array | GroupQuantized) -> dict[str, jax.Array]:
        """Converts a checkpoint tensor, loaded as `checkpoint_structs`, to itself, panels, or
        int8 rows and scales. A tensor in `stored` already comes in panels, one of `group_structs`
        in groups.

        Returns: arrays by name, for `assemble`.
        """
        if isinstance(array, GroupQuantized):
            fields = zip((name, f"{name}{_SCALE}", f"{name}{_MINIMUM}"), array, strict=True)
            return {
                field: self._repeat_heads(values, self._variables[field], -1)
                for field, values in fields
                if values is not None
            }
        if name in self._packed:
            pack = _pack_int8 if self.execution.compute == jnp.int8 else _pack_bfloat16
            return {name: array if name in self.stored else pack(array)}
        variable, blocked = self._variables[name], self._blocked.get(name)
        axes, array = (blocked or variable).axes, self._repeat_heads(array, blocked or variable, 0)
        if blocked:
            return {name: _sharded(to_blocks, self._sharding(variable.axes))(array)}
        if variable.get_value().dtype != jnp.int8:
            return {name: array}
        shardings: Any = Quantized(self._sharding(axes), self._sharding(axes[:-1]))  # type: ignore[arg-type]
        rows = _sharded(quantize, shardings)(array)
        return {name: rows.values, f"{name}{_SCALE}": rows.scales}

    def _repeat_heads(
        self, array: jax.Array, variable: nnx.Variable | Matrix, axis: Literal[0, -1]
    ) -> jax.Array:
        """An array with the copies of its heads, along an axis, that several devices have."""
        copies = self._copies(variable)
        if copies == 1:
            return array
        before, after = ((), array.shape[1:]) if axis == 0 else (array.shape[:-1], ())
        heads = array.reshape(*before, self.config.num_kv_heads, -1, *after)
        repeated = _repeat(heads, repeats=copies, axis=len(before)).reshape(*before, -1, *after)
        return jax.device_put(repeated, self._sharding(variable.axes))

    def assemble(self, arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
        """The flat parameter list, from loaded tensors and `bundles` (see `stacks.Stacks`)."""
        return [arrays[name] for name in self._parameters]

    @property
    def replicated(self) -> Sharding | None:
        """Sharding of arrays that are replicated on the mesh; None without one."""
        return None if self.mesh is None else replicated(self.mesh)

    @property
    def slot_sharding(self) -> Sharding | None:
        """Sharding of arrays with the same number of rows for each slot; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(DATA_AXIS))

    @property
    def data_shards(self) -> int:
        """Number of groups of devices that share the slots."""
        return 1 if self.mesh is None else self.mesh.shape[DATA_AXIS]

    def place(self, arrays: Any) -> Any:
        """Puts a tree of arrays, slots leading, on the model's devices; only dispatches."""
        return arrays if self.mesh is None else put(arrays, self.slot_sharding)

    def replicate(self, arrays: Any) -> Any:
        """Replicates a tree of arrays on the model's devices; only dispatches."""
        return arrays if self.mesh is None else put(arrays, self.replicated)

    def parameter_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each entry of the flat parameter list."""
        return list(self._parameters.values())

    def read_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Structs of the parameters that a forward of many tokens reads whole: all except an
        embedding that is not the output head, of which it looks up a few rows."""
        tied = self.config.tie_embeddings
        return [s for n, s in self._parameters.items() if tied or not n.startswith(_EMBEDDING)]

    def expert_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Structs of the weights of experts, of which a forward reads those of chosen experts."""
        matrices = ((name, each) for name, each in self._flat.items() if ".experts." in name)
        return [self._struct_of(each.get_value(), each.axes) for _, each in matrices]

    def bundle_structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Structs of the bundles, by name."""
        return {
            name: self._struct_of(bundle.struct, bundle.axes)
            for name, bundle in self.bundles.arrays.items()
        }

    @property
    def has_groups(self) -> bool:
        """Whether weights are in groups of inputs."""
        return bool(self._grouped)

    @property
    def has_panels(self) -> bool:
        """Whether weights are packed; bundles then have their bytes."""
        return bool(self._packed)

    def page_struct(self, count: int, page_size: int) -> jax.ShapeDtypeStruct:
        """Struct of the pages: `count` a layer, each of `page_size` positions."""
        c, e = self.config, self.execution
        shape = (c.num_layers * count, self.kv_heads, page_size, e.page_width(c.head_dim))
        return self._struct(shape, e.pages, PAGES_AXES)

    def new_pages(self, count: int, page_size: int) -> PageArray:
        """Zeroed pages laid out as `page_struct`."""
        return zeros(self.page_struct(count, page_size))

    def branch_struct(self, rows: int, entries: int, branches: int) -> jax.ShapeDtypeStruct:
        """Struct of `AllBranches` for `entries` tokens of each branch of `rows` rows."""
        c, e = self.config, self.execution
        shape = (c.num_layers, rows, self.kv_heads, entries, branches, e.page_width(c.head_dim))
        return self._struct(shape, e.pages, ("slots", "kv_heads", None, None, None))

    def module(self, parameters: Parameters) -> CausalLM:
        """The module over these parameters; call it while tracing."""
        arrays = dict(zip(self._parameters, parameters, strict=True))
        leaves = []
        for name, variable in self._flat.items():
            bundle, offset = self.bundles.locations.get(name, (None, 0))
            if bundle is None:
                leaves.append(arrays[name])
            elif self.has_panels:
                leaves.append(Piece(arrays[bundle], offset))
            else:
                shape = variable.get_value().shape
                leaves.append(self.bundles.arrays[bundle].tensor(arrays[bundle], offset, shape))
        return nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves))

    @functools.cached_property
    def _parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The entries of the flat parameter list by name; bundles come first."""
        structs = self.bundle_structs()
        for name, variable in self._flat.items():
            if name not in structs and name not in self.bundles.locations:
                structs[name] = self._struct_of(variable.get_value(), variable.axes)
        return structs

    def _struct_of(self, struct: jax.ShapeDtypeStruct, axes: Axes) -> jax.ShapeDtypeStruct:
        return self._struct(struct.shape, struct.dtype, axes)

    def _struct(self, shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes) -> jax.ShapeDtypeStruct:
        stacked = (None,) * (len(shape) - len(axes))  # the leading layer axis is not sharded
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(stacked + axes))

    def _sharding(self, axes: Axes) -> Sharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, self.rules.spec(axes))

    def _copies(self, variable: nnx.Variable | Matrix) -> int:
        """Number of copies of each row of its tensor."""
        return self.rules.kv_copies if "kv_heads" in variable.axes else 1

    def _group(self, module: CausalLM, forms: Mapping[str, GroupForm]) -> dict[str, Matrix]:
        """Turns weights into groups where all tensors of a variable have them; returns them by
        variable. Groups are so small that each device has whole ones."""
        grouped = {}
        for path, matrix in nnx.iter_modules(module):
            name = _joined((*path, "weight"))
            if not isinstance(matrix, Matrix) or isinstance(matrix, ExpertMatrix):
                continue
            form = _joint_form([forms.get(tensor) for tensor in self._tensors(name)])
            if form is not None:
                form = form if keeps_int4() else form.widened()
                matrix.group(form.divided(matrix.shape[1] // self._shares(matrix)))
                grouped[name] = matrix
        return grouped

    def _shares(self, matrix: Matrix) -> int:
        """Number of devices that share the inputs of a weight."""
        sharded = self.mesh is not None and self.rules.spec(matrix.axes)[1] is not None
        return self.mesh.shape[TENSOR_AXIS] if self.mesh is not None and sharded else 1

    def _block(self, module: CausalLM) -> dict[str, Matrix]:
        """Turns weights that products take into blocks, where they divide into them on each device;
        returns them by variable. Those of int8 are not copied anyway."""
        blocked = {}
        for path, matrix in nnx.iter_modules(module):
            if not _takes_products(matrix, self.config):
                continue
            if matrix.weight_scale is not None:
                continue
            if matrix.shape[1] % (BLOCK * self._shares(matrix)) == 0:
                matrix.block()
                blocked[_joined((*path, "weight"))] = matrix
        return blocked

    def _tensors(self, name: str) -> list[str]:
        """Checkpoint tensors of a variable: one, or one for each scanned layer."""
        _, layers, rest = name.partition("model.layers.")
        if not (self.execution.scan_layers and layers) or rest[0].isdigit():
            return [name]
        experts = self.config.mechanisms.experts
        first = len(experts.dense_layers) if experts is not None else 0
        return [f"{layers}{i}.{rest}" for i in range(first, self.config.num_layers)]


def _joint_form(forms: Sequence[GroupForm | None]) -> GroupForm | None:
    """The form that holds weights of all these; None if there is none."""
    joint, *others = forms
    for form in others:
        joint = None if joint is None or form is None else joint.joined(form)
    return joint


def _joined(path: Sequence[Any]) -> str:
    return ".".join(map(str, path)).replace("model.first_layers.", "model.layers.")


def _can_scan(config: ModelConfig) -> bool:
    """Whether all layers behind the first ones without experts have experts."""
    experts = config.mechanisms.experts
    return experts is None or experts.dense_layers == tuple(range(len(experts.dense_layers)))


def _takes_products(module: nnx.Module, config: ModelConfig) -> TypeGuard[Matrix]:
    """Whether a module is a weight of products of all rows."""
    if not isinstance(module, Matrix) or isinstance(module, ExpertMatrix):
        return False
    return not _only_looked_up(module, config)


def _only_looked_up(matrix: Matrix, config: ModelConfig) -> bool:
    """Whether no product takes a weight: an embedding that is not the output head."""
    return isinstance(matrix, Embedding) and not config.tie_embeddings


def _pack(module: CausalLM, stored: Mapping[str, str]) -> dict[str, Matrix]:
    """Turns all weights that take part in products into panels; returns them by name."""
    packed = {}
    for path, matrix in nnx.iter_modules(module):
        name = _joined((*path, "weight"))
        if not isinstance(matrix, Matrix):
            continue
        if name in stored or not _only_looked_up(matrix, module.config):
            matrix.pack(stored.get(name, module.execution.kind))
            packed[name] = matrix
    size = sum(matrix.weight.get_value().size for matrix in packed.values())
    for matrix in packed.values():
        matrix.cache_resident = size <= _CACHE_BYTES
    return packed


_pack_int8 = StoredJit(lambda weight: pack_int8(*quantize(weight)))
_pack_bfloat16 = StoredJit(pack_bfloat16)
_repeat = StoredJit(jnp.repeat, static=("repeats", "axis"))


@functools.cache
def _sharded(function: Callable[..., Any], shardings: Any) -> StoredJit:
    """A function of the module level, with results of these shardings."""
    return StoredJit(function, out_shardings=shardings)


def zeros(structs: Any) -> Any:
    """Zero-filled arrays of these structs."""
    return filled(structs, jax.tree.map(lambda _: 0, structs))


def filled(structs: Any, values: Any) -> Any:
    """Arrays of these structs, each filled with its value; by one program if there is a store."""

    def fill(struct: jax.ShapeDtypeStruct, value: float, device: Sharding | None = None):
        return jnp.full(struct.shape, value, struct.dtype, device=device)

    shardings = jax.tree.map(lambda struct: struct.sharding, structs)
    if store_in_use() is None:
        return jax.tree.map(lambda s, value: fill(s, value, s.sharding), structs, values)
    return StoredJit(lambda: jax.tree.map(fill, structs, values), out_shardings=shardings)()
