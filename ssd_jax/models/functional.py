"""A decoder as pure functions over a flat list of parameters.

Modules are built abstractly and split once; compiled programs take the flat list, which costs a
fraction of the call overhead of a module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int32

from ssd_jax.kernels.experts.groups import ExpertGroupStructs
from ssd_jax.kernels.experts.shards import ExpertShards
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import PageArray
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.groups import GroupStructs
from ssd_jax.kernels.piece import Piece
from ssd_jax.models import bundles
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.decoder import CausalLM
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import Axes, Matrix
from ssd_jax.models.parameter_names import EMBEDDING, can_scan, parameter_name, tensors_of
from ssd_jax.models.sharding import (
    DATA_AXIS,
    PAGES_AXES,
    TENSOR_AXIS,
    MeshLayout,
    ShardingRules,
    put,
    replicated,
)
from ssd_jax.models.tensor_loading import Loaded, TensorLoading
from ssd_jax.models.weight_forms import (
    block_weights,
    group_weights,
    pack_weights,
    widen_weights,
)
from ssd_jax.system.new_arrays import zeros

Parameters = Sequence[jax.Array]
T = TypeVar("T")


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
            has_experts = config.mechanisms.experts is not None
            execution = _on_mesh(execution, mesh, self.rules, has_experts=has_experts)
        self.kv_heads = config.num_kv_heads * self.rules.kv_copies
        if execution.scan_layers and not can_scan(config):
            execution = dataclasses.replace(execution, scan_layers=False)
        self.execution = execution
        self.stored = dict(stored or {})
        sharded_config = dataclasses.replace(config, num_kv_heads=self.kv_heads)
        self._layout = layout = MeshLayout(mesh, self.rules)
        module = CausalLM(sharded_config, execution)
        self._packed = pack_weights(module, self.stored) if execution.linear == "cpu" else {}
        named = functools.partial(tensors_of, config=config, scan_layers=execution.scan_layers)
        grouped = group_weights(module, groups or {}, named, layout)
        blocked = block_weights(module, layout) if execution.blocks else {}
        widened = widen_weights(module) if execution.whole_tiles else {}
        for _, matrix in nnx.iter_modules(module):
            if isinstance(matrix, Matrix):
                matrix.digits = execution.digits
                matrix.scaled_sums = execution.scaled_sums
        self._graph, state = nnx.split(module)
        self._flat = {parameter_name(path): value for path, value in nnx.to_flat_state(state)}
        self._treedef = jax.tree.structure(state)
        tensors = {name: named(name) for name in self._flat}

        def by_tensor(by_name: Mapping[str, T]) -> dict[str, T]:
            return {tensor: x for name, x in by_name.items() for tensor in tensors[name]}

        self._loading = TensorLoading(
            config=config,
            execution=execution,
            layout=layout,
            variables=by_tensor(self._flat),
            stored=self.stored,
            packed=self._packed,
            grouped=by_tensor(grouped),
            blocked=by_tensor(blocked),
            widened=by_tensor(widened),
        )
        self.ungrouped = len(groups or {}) - len(self._loading.grouped)
        self.bundles = self._bundle(tensors)

    def _bundle(self, tensors: Mapping[str, Sequence[str]]) -> bundles.Bundles:
        """The parameters that hold several of these tensors, by parameter."""
        structs = {name: variable.get_value() for name, variable in self._flat.items()}
        axes = {name: variable.axes for name, variable in self._flat.items()}
        if self.execution.scan_layers:
            return bundles.bundle_layers(structs, axes, tensors)
        if self._packed:
            norms = not self.config.mechanisms.layer_norm
            return bundles.bundle_bytes(structs, self._packed, norms=norms)
        if self.execution.few_arrays:
            devices = 1 if self.mesh is None else self.mesh.shape[TENSOR_AXIS]
            return bundles.bundle_rows(structs, axes, self.rules, devices)
        return bundles.Bundles({}, {})

    @functools.cached_property
    def fingerprint(self) -> str:
        """Everything that determines the model's programs, as text; it identifies stored ones."""
        ids = None if self.output_ids is None else self.output_ids.tolist()
        mesh = None
        if self.mesh is not None:
            mesh = self.mesh.axis_names, self.mesh.devices.shape, self.mesh.axis_types
        forms = sorted((name, matrix.form) for name, matrix in self._loading.grouped.items())
        weights = sorted(self.stored.items()), forms
        parts = self.config, self.execution, mesh, weights, ids
        return repr(parts)

    def checkpoint_structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Checkpoint tensor name -> shape, dtype and sharding to load it with."""
        return self._loading.structs()

    def group_structs(self) -> dict[str, GroupStructs | ExpertGroupStructs]:
        """Structs to load each tensor with whose weight is in groups, as `checkpoint_structs`."""
        return self._loading.group_structs()

    def prepare(self, name: str, array: Loaded) -> dict[str, jax.Array]:
        """Arrays for `assemble`, from a loaded tensor; see `TensorLoading.prepare`."""
        return self._loading.prepare(name, array)

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
        return [s for n, s in self._parameters.items() if tied or not n.startswith(EMBEDDING)]

    def expert_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Structs of the weights of experts, of which a forward reads those of chosen experts."""
        matrices = [leaf for name, leaf in self._flat.items() if ".experts." in name]
        return [self._struct_of(leaf.get_value(), leaf.axes) for leaf in matrices]

    def bundle_structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Structs of the bundles, by name."""
        return {
            name: self._struct_of(bundle.struct, bundle.axes)
            for name, bundle in self.bundles.arrays.items()
        }

    @property
    def has_groups(self) -> bool:
        """Whether weights are in groups of inputs."""
        return bool(self._loading.grouped)

    @property
    def has_panels(self) -> bool:
        """Whether weights are packed; bundles then have their bytes."""
        return bool(self._packed)

    def page_struct(self, count: int, page_size: int) -> jax.ShapeDtypeStruct:
        """Struct of the pages: `count` a layer, each of `page_size` positions."""
        c, e = self.config, self.execution
        shape = (c.num_layers * count, self.kv_heads, page_size, e.page_width(c.head_dim))
        return self._layout.struct(shape, e.pages, PAGES_AXES)

    def new_pages(self, count: int, page_size: int) -> PageArray:
        """Zeroed pages laid out as `page_struct`."""
        return zeros(self.page_struct(count, page_size))

    def branch_struct(self, rows: int, entries: int, branches: int) -> jax.ShapeDtypeStruct:
        """Struct of `AllBranches` for `entries` tokens of each branch of `rows` rows."""
        c, e = self.config, self.execution
        shape = (c.num_layers, rows, self.kv_heads, entries, branches, e.page_width(c.head_dim))
        return self._layout.struct(shape, e.pages, ("slots", "kv_heads", None, None, None))

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
        return self._layout.struct(struct.shape, struct.dtype, axes)


def _on_mesh(
    execution: Execution, mesh: Mesh, rules: ShardingRules, *, has_experts: bool
) -> Execution:
    """The execution with how the mesh divides heads and experts."""
    if execution.kernels is not None:
        shards = HeadShards(TENSOR_AXIS, split=rules.kv_heads is not None)
        execution = dataclasses.replace(
            execution, kernels=execution.kernels._replace(shards=shards)
        )
    if not has_experts:
        return execution
    by_expert = rules.experts is not None
    if by_expert or rules.expert_ffn is not None:
        shares = ExpertShards(TENSOR_AXIS, mesh.shape[TENSOR_AXIS], by_expert, mesh)
        return dataclasses.replace(execution, expert_shards=shares)
    experts = execution.experts._replace(shards=HeadShards(TENSOR_AXIS, split=False))
    return dataclasses.replace(execution, experts=experts)
