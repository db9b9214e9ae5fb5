"""Connects the devices of all processes, before decoding begins."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS, put, replicated


def connect(mesh: Mesh) -> None:
    """Runs a sum over each mesh axis and over both; all processes of the mesh must call it.

    Raises:
      jax.errors.JaxRuntimeError: devices do not reach each other.
    """
    for axes in ((TENSOR_AXIS,), (DATA_AXIS,), (DATA_AXIS, TENSOR_AXIS)):
        summed = jax.shard_map(
            lambda array, axes=axes: jax.lax.psum(array, axes),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        with _output_to_standard_error():
            jax.block_until_ready(jax.jit(summed)(put(np.ones(1, np.int32), replicated(mesh))))


@contextlib.contextmanager
def _output_to_standard_error() -> Iterator[None]:
    """Sends what the library that connects processors prints to standard error: standard output is
    the user's."""
    if jax.default_backend() != "cpu":
        yield
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    saved_output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved_output, 1)
        os.close(saved_output)
