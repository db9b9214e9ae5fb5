"""Rows sorted by expert, and what products with experts' weights must make of them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels.experts.reference import product

INPUTS, OUTPUTS = 64, 96
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-4}


class Sizes(NamedTuple):
    """Rows of each expert, and rows in all."""

    sizes: tuple[int, ...]
    rows: int


SIZES = {
    "few": Sizes((0, 3, 0, 1, 0, 0, 4, 0), 8),
    "one": Sizes((0, 0, 1, 0), 1),
    "rows that no expert has": Sizes((2, 0, 5, 0), 40),
    "none": Sizes((0, 0), 3),
    "tiles": Sizes((120, 20, 0, 150, 3), 300),
    "whole tiles": Sizes((128, 0, 128), 256),
}


class Case(NamedTuple):
    """Arguments of `expert_products`, with one weight; that of experts without rows is NaN."""

    x: np.ndarray
    sizes: np.ndarray
    weight: np.ndarray


def make(name: str, dtype: str, *, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Case:
    """Normal values, which the type of the weights can hold."""
    sizes, rows = SIZES[name]
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)).astype(jnp.dtype(dtype)).astype(np.float32)
    weight = rng.standard_normal((len(sizes), outputs, inputs)) / np.sqrt(inputs)
    weight[[size == 0 for size in sizes]] = np.nan
    return Case(x, np.asarray(sizes, np.int32), weight.astype(jnp.dtype(dtype)))


def expected(case: Case) -> np.ndarray:
    """In float64: [rows, outputs]."""
    return product(case.x, case.sizes, case.weight.astype(np.float32))


def expert_of(sizes: np.ndarray) -> np.ndarray:
    """The expert of each row that has one."""
    return np.repeat(np.arange(len(sizes)), sizes)
