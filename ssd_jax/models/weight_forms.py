"""Forms that a decoder's weights take, before there are arrays: panels, groups or blocks of inputs,
or whole tiles.

What is not mentioned stays as checkpoints have it, in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from flax import nnx

from ssd_jax.compat import keeps_int4
from ssd_jax.errors import InputError
from ssd_jax.kernels.experts.groups import LEAST_GROUP, device_form
from ssd_jax.kernels.linear.blocks import BLOCK
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.decoder import CausalLM
from ssd_jax.models.layers import Embedding, ExpertMatrix, Matrix
from ssd_jax.models.parameter_names import parameter_name
from ssd_jax.models.sharding import MeshLayout

_CACHE_BYTES = 2**25  # bytes of weights that stay in the cache shared by cores


def pack_weights(module: CausalLM, stored: Mapping[str, str]) -> dict[str, Matrix]:
    """Turns all weights that take part in products into panels; returns them by name.

    Args:
      stored: by name, the kind of each weight that is packed as its checkpoint stores it.
    """
    packed = {}
    for path, matrix in nnx.iter_modules(module):
        name = parameter_name((*path, "weight"))
        if not isinstance(matrix, Matrix):
            continue
        if name in stored or not _only_looked_up(matrix, module.config):
            matrix.pack(stored.get(name, module.execution.kind))
            packed[name] = matrix
    size = sum(matrix.weight.get_value().size for matrix in packed.values())
    for matrix in packed.values():
        matrix.cache_resident = size <= _CACHE_BYTES
    return packed


def group_weights(
    module: CausalLM,
    forms: Mapping[str, GroupForm],
    tensors: Callable[[str], list[str]],
    layout: MeshLayout,
) -> dict[str, Matrix]:
    """Turns weights into groups where all tensors of a parameter have them; returns them by
    parameter. Groups are so small that each device has whole ones.

    Args:
      forms: of tensors.
      tensors: those of a parameter.

    Raises:
      InputError: a device would have parts of groups of experts' inputs that are too small.
    """
    grouped = {}
    for path, matrix in nnx.iter_modules(module):
        name = parameter_name((*path, "weight"))
        if not isinstance(matrix, Matrix):
            continue
        form = _joint_form([forms.get(tensor) for tensor in tensors(name)])
        if form is None:
            continue
        of_outputs, devices = map(layout.shares, matrix.axes[-2:])
        if isinstance(matrix, ExpertMatrix):
            _group_experts(name, matrix, form, (of_outputs, devices))
        else:
            form = form if keeps_int4() else form.widened()
            matrix.group(form.divided(matrix.shape[1] // devices))
        grouped[name] = matrix
    return grouped


def _group_experts(
    name: str, matrix: ExpertMatrix, form: GroupForm, devices: tuple[int, int]
) -> None:
    inputs = matrix.shape[-1] // devices[1]
    on_device = device_form(form, inputs)
    if on_device is None:
        raise InputError(
            f"{name}: of the inputs of an expert a device has {inputs}, and quantised ones are in "
            f"groups of {form.group}, which divide into them by {LEAST_GROUP} at least; give "
            "expert_parallel = true, another number of devices, or dtype = 'bfloat16'"
        )
    matrix.group_on(on_device, devices)


def block_weights(module: CausalLM, layout: MeshLayout) -> dict[str, Matrix]:
    """Turns weights that products take into blocks, where they divide into them on each device;
    returns them by parameter. Those of int8 are not copied anyway."""
    blocked = {}
    for path, matrix in nnx.iter_modules(module):
        if not _takes_products(matrix, module.config):
            continue
        if matrix.weight_scale is not None:
            continue
        if matrix.shape[1] % (BLOCK * layout.shares(matrix.axes[1])) == 0:
            matrix.block()
            blocked[parameter_name((*path, "weight"))] = matrix
    return blocked


def widen_weights(module: CausalLM) -> dict[str, Matrix]:
    """Stores the embedding and experts' weights in whole tiles where a model's channels fill none;
    returns them by parameter."""
    if module.config.hidden_size % BLOCK == 0:
        return {}
    widened: dict[str, Matrix] = {}
    for path, matrix in nnx.iter_modules(module):
        if isinstance(matrix, (Embedding, ExpertMatrix)) and matrix.form is None:
            matrix.widen()
            widened[parameter_name((*path, "weight"))] = matrix
    return widened


def _joint_form(forms: Sequence[GroupForm | None]) -> GroupForm | None:
    """The form that holds weights of all these; None if there is none."""
    joint, *others = forms
    for form in others:
        joint = None if joint is None or form is None else joint.joined(form)
    return joint


def _takes_products(module: nnx.Module, config: ModelConfig) -> TypeGuard[Matrix]:
    """Whether a module is a weight of products of all rows."""
    if not isinstance(module, Matrix) or isinstance(module, ExpertMatrix):
        return False
    return not _only_looked_up(module, config)


def _only_looked_up(matrix: Matrix, config: ModelConfig) -> bool:
    """Whether no product takes a weight: an embedding that is not the output head."""
    return isinstance(matrix, Embedding) and not config.tie_embeddings
