"""Where texts of trees have the bits of decoding token by token."""

import pytest

from ssd_jax import compat
from ssd_jax.kernels.handlers import why_missing


def skip_unless_bitwise(dtype: str) -> None:
    """Skips a test of bitwise trees where this machine, or its JAX, has none of a dtype."""
    if why_missing() is not None:
        pytest.skip("attention of XLA is not bitwise for trees")
    if dtype == "float32" and not compat.widths_can_agree(dtype):
        pytest.skip(f"this JAX computes rows of {dtype} in another way at other numbers of rows")
