"""Products of rows with the weights of experts, and the choice of their backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax import compat
from ssd_jax.kernels.experts import cpu, xla
from ssd_jax.kernels.experts.groups import ExpertGroups
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.linear import xla as linear_xla
from ssd_jax.kernels.linear.cpu import Packed
from ssd_jax.kernels.linear.quantized import Quantized

ExpertWeight = Float[Array, "*layers E _ inputs"] | Quantized | ExpertGroups | Packed
"""One matrix of every expert; int8 values [E, outputs, inputs] have scales [E, outputs]."""


class ExpertBackend(NamedTuple):
    """How products with experts' weights are made.

    Attributes:
      name: "xla", "pallas_tpu" or "pallas_gpu"; packed weights have their own.
      shards: given if several devices have all weights: along which axis they lie.
      interpret: whether, or how, kernels run in an interpreter on a processor.
      integers: whether the kernel has int8 weights with a scale for each output.
    """

    name: str = "xla"
    shards: HeadShards | None = None
    interpret: Any = None
    integers: bool = True


XLA = ExpertBackend()
_WITHOUT_INTEGERS = "TPU v4"
"""Kind of device for which kernels with int8 matrices do not compile."""


def product_by_rows(
    x: Float32[Array, "n inputs"], weight: Float32[Array, "outputs inputs"]
) -> Float32[Array, "n outputs"]:
    """x @ weight^T, a row's bits being its own: on processors as of one expert that has all rows,
    since XLA chooses there how to multiply by their number."""

    def in_blocks(x: jax.Array, weight: jax.Array) -> jax.Array:
        return xla.products(x, jnp.full((1,), x.shape[0], jnp.int32), [weight[None]])[0]

    return jax.lax.platform_dependent(x, weight, cpu=in_blocks, default=linear_xla.product)


def backend_for(platform: str, device: Any) -> ExpertBackend:
    """The backend that a platform has; on GPUs some weights are still multiplied by XLA, see
    `why_looped`.

    Args:
      platform: JAX's name of the platform.
      device: of JAX.
    """
    if platform == "tpu":
        kind = getattr(device, "device_kind", None)
        return ExpertBackend("pallas_tpu", integers=kind != _WITHOUT_INTEGERS)
    if platform in ("gpu", "cuda") and compat.why_no_mosaic_gpu() is None:
        from ssd_jax.kernels.experts.pallas_gpu import CAPABILITIES

        if getattr(device, "compute_capability", None) in CAPABILITIES:
            return ExpertBackend("pallas_gpu")
    return XLA


def why_looped(
    backend: ExpertBackend, platform: str, device: Any, matrices: Sequence[tuple[int, int, Any]]
) -> str | None:
    """Why products on an accelerator are XLA's loop over experts, in one line; None where they are
    not.

    Args:
      platform, device: see `backend_for`.
      matrices: outputs and inputs of an expert's matrices, as a device has them, and the dtype
        or form of the weights.
    """
    if platform == "cpu":
        return None
    if backend.name == "pallas_tpu":
        integers = any(kind == jnp.int8 for _, _, kind in matrices)
        lacking = integers and not backend.integers
        return (
            f"there are no kernels with int8 matrices for {_WITHOUT_INTEGERS}" if lacking else None
        )
    if backend.name == "xla":
        if backend_for(platform, device) != XLA:
            return "attention = 'xla' leaves out all kernels"
        return compat.why_no_mosaic_gpu() or "the kernel is for compute capability 9.0 (Hopper)"
    from ssd_jax.kernels.experts.pallas_gpu import why_not

    reasons = (why_not(*matrix) for matrix in matrices)
    return next((reason for reason in reasons if reason is not None), None)


def expert_products(
    x: Float[Array, "m inputs"],
    group_sizes: Int32[Array, "E"],
    weights: Sequence[ExpertWeight],
    *,
    backend: ExpertBackend = XLA,
    layer: Int32[Array, ""] | None = None,
    used: float | None = None,
    share: float = 1.0,
) -> list[Float32[Array, "m _"]]:
    """x[row] @ weight[e]^T for each weight, e being the expert of the row.

    Activations are rounded as in `linear.api.products`; as there, all weights are packed or none.
    A row's bits depend on that row alone, and weights of experts without rows are not read.

    Args:
      x: rows sorted by expert, those of expert 0 first.
      group_sizes: rows of each expert; where they sum to less than m, the rows beyond give zeros.
      layer: the place of the layer where weights are those of several; None is of one.
      used: number of experts that are expected to have rows, for estimates of costs; None is as
        many as may have.
      share: part of the rows that are expected to have an expert, for estimates of costs.
    """
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if packed:
        return cpu.products(x, group_sizes, packed)
    unpacked = [weight for weight in weights if not isinstance(weight, Packed)]
    if used is None:
        used = min(x.shape[0], group_sizes.shape[0])
    if not backend.integers and any(isinstance(weight, Quantized) for weight in unpacked):
        backend = XLA
    kernel = _kernel(backend, used, share)
    if kernel is None:
        if layer is not None:
            unpacked = [jax.tree.map(lambda array: array[layer], weight) for weight in unpacked]
        return xla.products(x, group_sizes, unpacked)
    layers = () if layer is None else (layer,)
    if backend.shards is not None:
        kernel = _on_every_device(kernel, backend.shards)
    return kernel(x, group_sizes, unpacked, *layers)


Kernel = Callable[..., list[Any]]


def _kernel(backend: ExpertBackend, used: float, share: float) -> Kernel | None:
    """A backend's kernel; None is XLA."""
    if backend.name == "pallas_tpu":
        from ssd_jax.kernels.experts.pallas_tpu import expert_products_pallas_tpu

        def on_tpu(x: Any, sizes: Any, weights: Any, layer: Any = 0) -> list[Any]:
            options: dict[str, Any] = {"layer": layer, "used": used, "share": share}
            interpret = backend.interpret or False
            return expert_products_pallas_tpu(x, sizes, weights, **options, interpret=interpret)

        return on_tpu
    if backend.name == "pallas_gpu":
        from ssd_jax.kernels.experts.pallas_gpu import expert_products_pallas_gpu, takes

        def on_gpu(x: Any, sizes: Any, weights: Any) -> list[Any]:
            if not all(map(takes, weights)):
                return xla.products(x, sizes, weights)
            options = {"used": used, "interpret": backend.interpret}
            return expert_products_pallas_gpu(x, sizes, weights, **options)

        return on_gpu
    return None


def _on_every_device(kernel: Kernel, shards: HeadShards) -> Kernel:
    """The kernel as a call that every device runs with all weights."""
    return jax.shard_map(
        kernel,
        mesh=shards.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names={shards.axis},
        check_vma=False,  # Pallas kernels do not declare it
    )


__all__ = [
    "XLA",
    "ExpertBackend",
    "ExpertWeight",
    "backend_for",
    "expert_products",
    "product_by_rows",
    "why_looped",
]
