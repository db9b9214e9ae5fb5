"""A model on some devices: its memory on each, and the cost of one run of its programs."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import jax
from jax.sharding import AbstractMesh, Mesh

from ssd_jax.devices.opening.fallbacks import loop_lines, mesh_lines
from ssd_jax.devices.opening.fit import ModelBytes, Need
from ssd_jax.devices.opening.models import execution_for
from ssd_jax.devices.opening.sizes import bytes_per_device
from ssd_jax.devices.programs.paged import Paging, page_size
from ssd_jax.devices.programs.program_spec import Name, ProgramSpec
from ssd_jax.kernels.experts.estimate import expected_experts
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS, mesh_of
from ssd_jax.sampling.variants import variant_name
from ssd_jax.tools.aot import chips, hlo, programs, traffic
from ssd_jax.tools.aot.chips import AbsentDevice, Chip, Roofline
from ssd_jax.tools.aot.hlo import Module
from ssd_jax.tools.aot.programs import Sizes
from ssd_jax.tools.aot.traffic import ProgramWork
from ssd_jax.tools.bench.table import pluralize

VARIANT = "sampled"
"""The variant of programs that draw: rows at any temperature, no truncation or penalties."""

_RESIDENT = ("parameters", "pages")
"""Arguments of programs that stay on the devices, whatever runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, on one device.

    Attributes:
      work, bounds: of one run.
      other_buffers: bytes of arguments other than weights and pages, and of results that take no
        argument's place.
      temporaries: bytes that it needs besides these while it runs.
      code: bytes of the program itself.
      seconds: core-seconds to trace and compile it.
    """

    work: ProgramWork
    bounds: Roofline
    other_buffers: int
    temporaries: int
    code: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A model on some of the devices of a slice.

    Attributes:
      role: "target" or "draft".
      devices: their places in the slice.
      weights, pages: bytes on each.
      programs: empty where it was refused.
      refused: why it cannot run there; None where it can.
      notes: what its devices do not divide (see `fallbacks.mesh_lines`), `expert_lines`, and why
        there is no kernel for these, if there is none.
    """

    role: str
    devices: tuple[int, ...]
    weights: int
    pages: int
    programs: Mapping[Name, Compiled] = dataclasses.field(default_factory=dict)
    refused: str | None = None
    notes: tuple[str, ...] = ()

    def seconds(self, *name: str | int) -> float:
        """Lower bound of one run of a program, in seconds, in the variant that was compiled."""
        programs = self.programs
        return programs[name if name in programs else variant_name(name, VARIANT)].bounds.seconds


def expert_lines(model: FunctionalModel, sizes: Sizes) -> list[str]:
    """How many experts the rows of a verification use, if the model has any: what it costs more
    than a forward of one token a slot."""
    experts, shards = model.config.mechanisms.experts, model.execution.expert_shards
    if experts is None:
        return []
    devices = shards.devices if shards is not None and shards.by_expert else 1
    slots = sizes.slots // model.data_shards
    parts = []
    for rows in (slots, slots * (sizes.k + 1)):
        used = expected_experts(experts.count, rows, experts.chosen)
        most = expected_experts(experts.count, rows, experts.chosen, devices)
        busiest = f" ({most:.1f} of one device's {experts.count // devices})"
        use = "use" if rows > 1 else "uses"
        parts.append(f"{pluralize(rows, 'row')} {use} {used:.0f}{busiest * (devices > 1)}")
    return [f"of {experts.count} experts of a layer {', '.join(parts)}, if all are chosen alike"]


def target_names(sizes: Sizes, model: FunctionalModel) -> list[Name]:
    """Programs of a target: those of AR, which proposes nothing, and those that verify K tokens,
    or trees."""
    widths = (0, sizes.k)
    accepts = [variant_name(("accept", sizes.slots, width), VARIANT) for width in widths]
    prefill = "prefill", max(model.execution.prefill_chunks)
    names: list[Name] = [*(("forward", width) for width in widths), *accepts]
    if sizes.nodes:
        names += [("forward_tree",), variant_name(("accept_tree",), VARIANT)]
    return [*names, prefill]


def draft_names(sizes: Sizes, *, branches: bool) -> list[Name]:
    """Programs of a draft: those that SD runs or, with `branches`, all that SSD does."""
    names: list[Name] = [variant_name((name, sizes.k), VARIANT) for name in ("start", "step")]
    if sizes.nodes:
        names += [variant_name((name,), VARIANT) for name in ("begin_tree", "grow_tree")]
    if branches:
        names += [variant_name((name, sizes.k), VARIANT) for name in ("expand", "grow")]
        names.append(("promote", sizes.k))
    if sizes.nodes and branches:
        names += [variant_name((name,), VARIANT) for name in ("expand_tree", "grow_branches")]
        names += [("promote_tree",), ("adopt_tree",)]
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipSlice:
    """Devices that are not there, of a chip of this name; see `chips.devices`, `absent_devices`."""

    name: str
    devices: Sequence[object]

    @property
    def chip(self) -> Chip:
        """What one device can do."""
        return chips.chip_named(self.name)

    @property
    def compiles(self) -> bool:
        """Whether programs can be compiled for the devices; else only sizes are known."""
        return not isinstance(self.devices[0], AbsentDevice)

    def model(
        self,
        config: ModelConfig,
        dtype: str,
        places: Sequence[int],
        data: int = 1,
        weights: GroupForm | None = None,
        *,
        expert_parallel: bool = False,
    ) -> FunctionalModel:
        """A model sharded over some of the devices, in `data` groups that share the slots.

        Args:
          weights: form of the matrices of layers, of floats of four bits of experts alone; None is
            the dtype.
          expert_parallel: see `ShardingRules.for_mesh`.

        Raises:
          InputError: nothing of it can be sharded.
        """
        devices = [self.devices[place] for place in places]
        if self.compiles:
            mesh = mesh_of(devices, data)
        else:
            sizes = data, len(devices) // data
            mesh = cast("Mesh", AbstractMesh(sizes, (DATA_AXIS, TENSOR_AXIS)))
        execution = execution_for(
            self.chip.platform,
            dtype,
            config.head_dim,
            device=devices[0],
            devices=len(devices),
            vocab=config.vocab_size,
        )
        make = partial(
            FunctionalModel, config, execution, mesh=mesh, expert_parallel=expert_parallel
        )
        model = make()
        if weights is None:
            return model
        structs = model.checkpoint_structs()
        ranks = (3,) if weights.dtype == FLOAT4 else (2, 3)
        names = [name for name, struct in structs.items() if len(struct.shape) in ranks]
        forms = {name: weights for name in names if ".layers." in name}
        return make(groups=forms)


def build(
    role: str,
    model: FunctionalModel,
    names: Sequence[Name],
    *,
    chip: Chip,
    places: tuple[int, ...],
    sizes: Sizes,
    on_compiled: Callable[[Name], None] = lambda name: None,
) -> ModelPart:
    """Compiles programs of a model, if its weights and pages leave them any room.

    Args:
      role: "target" or "draft".
      places: of its devices in the slice.
      on_compiled: called with the name of each compiled program.
    """
    paging = Paging(page_size(sizes.context), sizes.slots)
    resident = ModelBytes(model=model, slots=sizes.slots, paging=paging, size_of=bytes_per_device)
    part = ModelPart(
        role=role,
        devices=places,
        weights=resident.weights,
        pages=resident.pages,
        notes=(
            *(mesh_lines(role, model) if len(places) > 1 else ()),
            *(expert_lines(model, sizes) if role == "target" else ()),
            *(loop_lines(role, model, chip.platform) if names else ()),
        ),
    )
    need = Need({"weights": part.weights, "pages": part.pages}, chip.memory, role)
    if not need.fits:
        too_large = (
            f"weights and pages are {need.total / 2**30:.1f} GiB a device, which has "
            f"{chip.memory / 2**30:.2f}"
        )
        return dataclasses.replace(part, refused=too_large)
    if not names:
        return part
    specs = (programs.of_target if role == "target" else programs.of_draft)(model, sizes)
    # bfloat16 products that a product takes.
    passes = 6 if model.execution.compute.name == "float32" else 1
    compiled = {}
    for name in names:
        try:
            compiled[name], _ = compile_program(specs[name], model, chip, passes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            message = " ".join(str(error).split("\n", 1)[0].split())
            return dataclasses.replace(part, refused=f"{' '.join(map(str, name))}: {message}")
        on_compiled(name)
    return dataclasses.replace(part, programs=compiled)


def compile_program(
    spec: ProgramSpec, model: FunctionalModel, chip: Chip, passes: int = 1
) -> tuple[Compiled, Module]:
    """Compiles a program for its model's devices and reads the compiler's output.

    Args:
      passes: in bfloat16, that a product takes; see `chips.roofline`.

    Raises:
      JaxRuntimeError: the compiler refuses it.
    """
    assert model.mesh is not None
    began = time.process_time()
    # Mosaic compiles for the default device's generation of GPUs.
    default_device = model.mesh.devices.flat[0] if chip.platform == "gpu" else None
    with jax.default_device(default_device):
        program = spec.compile(model.mesh)
    seconds = time.process_time() - began
    count = model.mesh.size
    names = inspect.signature(spec.function).parameters
    arguments = zip(names, spec.arguments, strict=False)  # a last parameter may be left out
    resident = bytes_per_device([struct for name, struct in arguments if name in _RESIDENT])
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    module = hlo.read(text)
    work = traffic.count(module, count)
    compiled = Compiled(
        work=work,
        bounds=chips.roofline(chip, work, passes),
        other_buffers=memory.argument_size_in_bytes - resident + unaliased,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        seconds=seconds,
    )
    return compiled, module
