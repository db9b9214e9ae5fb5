"""What products with experts' weights are, written in NumPy for reading."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32


def product(
    x: Float32[np.ndarray, "m inputs"],
    group_sizes: Int32[np.ndarray, "E"],
    weight: Float32[np.ndarray, "E outputs inputs"],
) -> Float32[np.ndarray, "m outputs"]:
    """See `api.expert_products`; sums are in float64."""
    y = np.zeros((len(x), weight.shape[1]), np.float32)
    end = 0
    for size, matrix in zip(group_sizes, weight, strict=True):
        begin, end = end, end + size
        y[begin:end] = x[begin:end].astype(np.float64) @ matrix.astype(np.float64).T
    return y
