"""The one attention call of all models, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax import compat
from ssd_jax.errors import InputError
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch
from ssd_jax.kernels.tree_attention.bounds import check_shapes
from ssd_jax.kernels.tree_attention.cpu import tree_attention_cpu
from ssd_jax.kernels.tree_attention.reference import tree_attention_reference
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant
from ssd_jax.kernels.tree_attention.xla import tree_attention_xla, tree_attention_xla_static

BACKENDS = {
    "reference": tree_attention_reference,
    "xla": tree_attention_xla,
    "xla_static": tree_attention_xla_static,
    "cpu": tree_attention_cpu,
}

GPU_BACKENDS = ("pallas_gpu", "pallas_mma")

KERNEL_BACKENDS = ("cpu", "pallas_tpu", *GPU_BACKENDS)
"""Kernels of this package, the preferred one of a platform first."""


def xla_backend(platform: str) -> str:
    """The backend in plain XLA: it stops at the longest row where a loop of unknown length costs
    little."""
    return "xla" if platform == "cpu" else "xla_static"


def why_not(name: str, platform: str, devices: int = 1) -> str | None:
    """Why a backend cannot be used here, in one line, or None; see `backends`."""
    if name == "pallas_tpu" and platform != "tpu":
        return f"it needs a TPU, and JAX has the platform {platform}"
    if name in GPU_BACKENDS:
        if platform not in ("gpu", "cuda"):
            return f"it needs a GPU, and JAX has the platform {platform}"
        return compat.why_no_mosaic_gpu()
    if name == "cpu":
        if platform != "cpu":
            return f"it needs a processor, and JAX has the platform {platform}"
        return f"it runs on one device, not {devices}" if devices > 1 else why_missing()
    return None


def backends(platform: str, *, devices: int = 1, requested: str = "auto") -> list[str]:
    """The `backend`s for `tree_attention` that a platform has, the preferred one first: its own
    kernels, unless `why_not` gives a reason against them, and XLA's. One that is asked for by name
    is the only one.

    Args:
      platform: JAX's name of the platform.
      devices: number of devices that share the heads of a model.
      requested: see `Config.attention`.

    Raises:
      InputError: the backend asked for by name is not available.
    """
    if requested == "auto":
        kernels = [name for name in KERNEL_BACKENDS if why_not(name, platform, devices) is None]
        return [*kernels, xla_backend(platform)]
    reason = why_not(requested, platform, devices)
    if reason is not None:
        raise InputError(
            f"attention = {requested!r} is not possible: {reason}; give auto, or leave it out"
        )
    return [xla_backend(platform) if requested == "xla" else requested]


def why_unsupported(
    name: str, head_dim: int, pages: jax.ShapeDtypeStruct, device: Any
) -> str | None:
    """Why a backend cannot compute a model's attention, in one line, or None.

    Args:
      pages: struct of the pages, see `PageArray`.
      device: the JAX device that runs it.
    """
    if name not in GPU_BACKENDS:
        return None
    from ssd_jax.kernels.tree_attention import pallas_gpu

    return pallas_gpu.why_not_on(device, name) or pallas_gpu.why_not(head_dim, pages)


def choice_line(
    name: str, platform: str, devices: int = 1, unsupported: Mapping[str, str | None] | None = None
) -> str:
    """A line for the user: which backend computes attention, and why others do not.

    Args:
      unsupported: results of `why_unsupported` by backend.
    """
    names = KERNEL_BACKENDS if name in KERNEL_BACKENDS else (*KERNEL_BACKENDS, name)

    def why(other: str) -> str:
        reason = why_not(other, platform, devices) or (unsupported or {}).get(other)
        preferred = names.index(other) > names.index(name)
        return reason or (f"{name} is preferred" if preferred else "another was asked for")

    others = [f"not {other}: {why(other)}" for other in KERNEL_BACKENDS if other != name]
    return "; ".join([f"attention is {name}", *others])


def tree_attention(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    *,
    variant: AttentionVariant = PLAIN,
    backend: str = "xla",
    kernels: Kernels | None = None,
) -> Float32[Array, "B R heads head_dim"]:
    """Softmax attention of R query tokens per row, RoPE already applied, grouped-query heads.

    A query attends to positions [0, visible) of its row's pages (the trunk, which forks at
    different depths share) and, if `scratch` is given, to the tokens on its path in its branch.
    Verification and prefill have no scratch and visible = length + i + 1: a token sees itself, as
    its key has been written before. A query that sees nothing gets zeros; a query that would see a
    page or an entry of the scratch that does not exist gets NaN.

    `variant` may have a window, a soft cap, a scale and sinks. Pages before the windows of all
    queries of a row are not seen, so they need not exist; what they hold in a block with positions
    that some query sees must be finite.

    `backend` is one of `BACKENDS`, or "pallas_tpu" or one of `GPU_BACKENDS`; those of
    `KERNEL_BACKENDS` are called as `kernels` specifies.

    Raises:
      ValueError: the shapes do not fit each other, the backend does not support them, or a number
        of the variant is not above 0.
    """
    check_shapes(q, kv_pages, page_table, visible, scratch, variant)
    shards, interpret, tiles = kernels or Kernels()
    if backend in GPU_BACKENDS:
        from ssd_jax.kernels.tree_attention.pallas_gpu import Launch, tree_attention_pallas_gpu

        launch = Launch(backend, interpret=interpret or None)
        return tree_attention_pallas_gpu(
            q, kv_pages, page_table, visible, scratch, variant, launch=launch, shards=shards
        )
    if backend == "pallas_tpu":
        from ssd_jax.kernels.tree_attention.pallas_tpu import tree_attention_pallas_tpu

        return tree_attention_pallas_tpu(
            q, kv_pages, page_table, visible, scratch, variant, shards=shards, interpret=interpret
        )
    if backend == "cpu":
        return tree_attention_cpu(q, kv_pages, page_table, visible, scratch, variant, tiles=tiles)
    return BACKENDS[backend](q, kv_pages, page_table, visible, scratch, variant)
