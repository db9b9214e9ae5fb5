"""`dtype = auto`: the compute dtype that a checkpoint's own weights call for."""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.native import has_groups, has_native
from ssd_jax.checkpoints.weights.tensors import Progress, TensorSource
from ssd_jax.kernels.linear import api as products


def auto_dtype(source: str, mesh: Mesh | None, *, progress: Progress | None = None) -> str:
    """The dtype of a target in which nothing is lost that its checkpoint has, where there is one.

    It is `native` where quantised matrices are multiplied as they are here, float32 for matrices
    stored in float32, and else bfloat16.

    Args:
      source: see `Config.target`.
      mesh: devices of the model; None is the default one.
      progress: called while weights are downloaded.

    Raises:
      InputError: see `open_checkpoint`; of the weights, one row is read.
    """
    tensors = open_checkpoint(source, progress=progress).tensors
    platform, devices = jax.default_backend(), 1 if mesh is None else mesh.size
    packed = products.backend(platform, "native", devices=devices) == "cpu"
    if has_native(tensors) if packed else platform == "tpu" and has_groups(tensors):
        return "native"
    return "float32" if _is_float32(tensors) else "bfloat16"


def _is_float32(tensors: TensorSource) -> bool:
    """Whether the smallest matrix, as one of all, is stored in float32."""
    matrices = [name for name, shape in tensors.shapes.items() if len(shape) == 2]
    name = min(matrices, key=lambda name: math.prod(tensors.shapes[name]))
    stored = tensors.stored_type(name)
    if stored is not None:
        return stored == "F32"
    return tensors.read(name, (slice(0, 1),)).dtype.name == "float32"
