"""Experts' weights in groups, and their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.kernels.experts.groups import ExpertGroups, device_form, stored_scales, stored_values
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.kinds import E2M1

FORMS = {
    "mxfp4": GroupForm(FLOAT4, 32),
    "int4": GroupForm("int4", 32),
    "int4, 128, minima": GroupForm("int4", 128, minima=True),
    "int4, a scale a row": GroupForm("int4", 192),
    "int8": GroupForm("int8", 16),
    "float8": GroupForm("float8_e4m3fn", 64),
}


def stored(form: GroupForm, outputs: int, inputs: int, rng: np.random.Generator) -> StoredGroups:
    """A matrix of random numbers and scales."""
    groups = outputs, inputs // form.group
    if form.dtype == FLOAT4:
        codes = rng.integers(0, 16, (outputs, inputs), np.uint8)
        return StoredGroups(codes, rng.integers(121, 126, groups, np.uint8))
    if form.dtype == "float8_e4m3fn":
        numbers = rng.normal(size=(outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    else:
        most = 1 << (form.bits - 1)
        numbers = rng.integers(-most, most, (outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, groups).astype(np.float32) / np.float32(np.abs(numbers).max())
    minima = rng.normal(size=groups).astype(np.float32) if form.minima else None
    return StoredGroups(numbers, scales, minima)


def values(form: GroupForm, matrix: StoredGroups) -> np.ndarray:
    """The values of a matrix [outputs, inputs], rounded to bfloat16."""
    group = matrix.values.shape[1] // matrix.scales.shape[1]

    def spread(array: np.ndarray) -> np.ndarray:
        return np.repeat(array, group, axis=1)

    if form.dtype == FLOAT4:
        scales = 2.0 ** (matrix.scales.astype(np.float64) - 127)
        found = np.asarray(E2M1)[matrix.values] * spread(scales)
    else:
        found = matrix.values.astype(np.float32) * spread(matrix.scales)
        if matrix.minima is not None:
            found = found + spread(matrix.minima)
    return found.astype(ml_dtypes.bfloat16).astype(np.float32)


def made(
    form: GroupForm, experts: int, outputs: int, inputs: int, seed: int = 0
) -> tuple[ExpertGroups, np.ndarray]:
    """A weight of every expert as a device has it, and its values [experts, outputs, inputs]."""
    rng = np.random.default_rng(seed)
    on_device = device_form(form, inputs)
    assert on_device is not None
    matrices = [stored(form.divided(inputs), outputs, inputs, rng) for _ in range(experts)]
    parts = [matrix.in_form(on_device) for matrix in matrices]
    numbers = np.stack([stored_values(on_device, part.values) for part in parts])
    scales = np.stack([stored_scales(on_device, part.scales) for part in parts])
    minima = [stored_scales(on_device, part.minima) for part in parts if part.minima is not None]
    dense = np.stack([values(form, matrix) for matrix in matrices])
    weight = ExpertGroups(
        numbers, scales, np.stack(minima) if minima else None, on_device.group, outputs
    )
    return jax.tree.map(jnp.asarray, weight), dense
