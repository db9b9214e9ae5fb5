"""Matrices of experts in groups, as accelerators hold them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from ssd_jax.checkpoints.weights.tensors import Index, TensorSource, bounds
from ssd_jax.kernels.experts.groups import (
    ExpertGroups,
    ExpertGroupStructs,
    stored_scales,
    stored_values,
)
from ssd_jax.kernels.linear.group_form import GroupForm


class _Part(NamedTuple):
    """The arrays of some experts and outputs, with the inputs of one device."""

    values: Shaped[np.ndarray, "experts rows outputs"]
    scales: Shaped[np.ndarray, "experts groups outputs"]
    minima: Shaped[np.ndarray, "experts groups outputs"] | None


def read_expert_groups(
    tensors: TensorSource, name: str, structs: ExpertGroupStructs
) -> ExpertGroups:
    """A tensor of all experts' matrices, of which the devices of this process hold some experts,
    outputs and inputs."""
    read: dict[tuple[int, ...], list[_Part]] = {}
    _, total, _ = tensors.shape(name)
    _, of_inputs, of_outputs = _devices(structs.values)
    count = total // of_outputs

    def part(index: Index | None, field: int, struct: jax.ShapeDtypeStruct) -> np.ndarray:
        experts, rows, columns = bounds(index, struct.shape)
        device = columns.start * of_outputs // struct.shape[2]
        key = experts.start, experts.stop, device
        if key not in read:  # all inputs of these outputs
            outputs = slice(device * count, (device + 1) * count)
            read[key] = _parts(tensors, name, experts, outputs, structs.form, of_inputs)
        array = read[key][rows.start * of_inputs // struct.shape[1]][field]
        assert array is not None
        return array

    def array(field: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
        if struct.sharding is None:
            return jax.device_put(part(None, field, struct))
        return jax.make_array_from_callback(
            struct.shape, struct.sharding, lambda index: part(index, field, struct)
        )

    minima = None if structs.minima is None else array(2, structs.minima)
    values, scales = array(0, structs.values), array(1, structs.scales)
    return ExpertGroups(values, scales, minima, structs.form.group, count)


def _devices(struct: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Number of devices that have different parts of each axis."""
    if struct.sharding is None:
        return 1, 1, 1
    parts = struct.sharding.shard_shape(struct.shape)
    return tuple(size // part for size, part in zip(struct.shape, parts, strict=True))


def _parts(
    tensors: TensorSource,
    name: str,
    experts: slice,
    outputs: slice,
    form: GroupForm,
    devices: int,
) -> list[_Part]:
    """The parts of each device that has these experts and outputs."""
    found: list[list[_Part]] = [[] for _ in range(devices)]
    for expert in range(experts.start, experts.stop):
        stored = tensors.read_expert_groups(name, expert, outputs).in_form(form)
        for device, of_device in enumerate(found):

            def cut(array: np.ndarray, device: int = device) -> np.ndarray:
                width = array.shape[1] // devices
                return array[:, device * width : (device + 1) * width]

            values, scales, minima = stored.changed(cut)
            minima = None if minima is None else stored_scales(form, minima)
            of_device.append(
                _Part(stored_values(form, values), stored_scales(form, scales), minima)
            )
    return [_stacked(parts) for parts in found]


def _stacked(parts: list[_Part]) -> _Part:
    minima = [part.minima for part in parts if part.minima is not None]
    return _Part(
        np.stack([part.values for part in parts]),
        np.stack([part.scales for part in parts]),
        np.stack(minima) if minima else None,
    )
