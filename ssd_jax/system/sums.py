"""Checks that sums are right, which some versions of XLA compute wrongly."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jaxlib.version import __version__ as jaxlib_version

from ssd_jax.compat import PRODUCTS
from ssd_jax.errors import SsdError
from ssd_jax.system.stored_jit import StoredJit

_ROWS = 32_769  # fewer are summed rightly


@functools.cache
def check_sums() -> None:
    """Checks, once a process, a sum that some versions of XLA get wrong (jax issue 39103).

    It only checks on processors.

    Raises:
      SsdError: this version sums wrongly.
    """
    if jax.default_backend() != "cpu":
        return
    rows = np.zeros((_ROWS, 3), np.float32)
    rows[:, 0] = np.arange(_ROWS) % 1024  # with squares that float32 holds
    if not np.array_equal(StoredJit(jax.vmap(_squared))(rows), rows[:, 0] ** 2):
        raise SsdError(
            f"jaxlib {jaxlib_version} computes wrong sums on this processor (jax issue 39103): "
            f"import ssd_jax before JAX starts, or set XLA_FLAGS={PRODUCTS} for the process, or "
            "use another jaxlib"
        )


def _squared(row: jax.Array) -> jax.Array:
    return jax.numpy.sum((jax.numpy.eye(3) @ row) ** 2)
