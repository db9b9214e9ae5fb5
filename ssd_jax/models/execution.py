"""How a decoder runs on a platform: the one place where platforms differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.experts.api import XLA, ExpertBackend
from ssd_jax.kernels.experts.shards import ExpertShards
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.tree_attention.api import xla_backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Static choices compiled into every program of a model.

    Attributes:
      compute: dtype of weights and of activations entering a product (float32, bfloat16 or int8);
        norms, softmax, the residual stream and logits are always float32.
      digits: int8 digits of an activation in an int8 product, see `kernels/linear/quantized.py`.
      scaled_sums: whether products with weights in groups scale the sums of groups, see
        `kernels/linear/groups.py`.
      pages: storage dtype of the key/value pages.
      min_rows: products get at least this many rows; fewer are padded with zeros.
      scan_layers: one scanned layer instead of unrolled ones.
      few_arrays: whether a layer's parameters share arrays, without a scan; see `bundles.of_rows`.
      attention: backend of `tree_attention`, see there.
      kernels: how the kernels of attention are called; None is with defaults.
      expert_shards: how devices that share a model hold its experts; None is whole.
      verify: backend of `verify`, see `kernels/verify/api.py`.
      window_writes: how keys and values are written, see `kv_pages.write`.
      experts: backend of products with experts' weights.
      linear: backend of products with weights, "xla" or "cpu" (packed weights).
      blocks: whether weights lie in blocks of inputs, see `kernels/linear/blocks.py`.
      whole_tiles: whether rows of the embedding and experts' weights fill whole tiles, see
        `kernels/linear/tiles.py`.
      foreign_tokens: whether there are tokens that the model does not embed: those of a target
        with more. They have the embedding of the last one.
      variants: the sampling programs to compile, by their names in `sampling/variants.py`.
      chunk_options: the compiler's for prefill programs.
      prefill_chunks: chunk sizes (in prompt tokens) of the prefill programs, ascending; see
        `chunk_sizes`.
      one_array: whether a dispatch transfers its host arrays as one, see
        `devices/programs/packing.py`.
    """

    compute: jnp.dtype
    pages: jnp.dtype
    digits: int = 2
    scaled_sums: bool = False
    min_rows: int = 1
    scan_layers: bool = False
    few_arrays: bool = False
    attention: str = "xla"
    kernels: Kernels | None = None
    expert_shards: ExpertShards | None = None
    verify: str = "xla"
    window_writes: bool = False
    experts: ExpertBackend = XLA
    linear: str = "xla"
    blocks: bool = False
    whole_tiles: bool = False
    foreign_tokens: bool = False
    variants: tuple[str, ...] = ("any",)
    chunk_options: tuple[tuple[str, bool], ...] = ()
    prefill_chunks: tuple[int, ...] = (32, 128)
    one_array: bool = False

    @property
    def floating(self) -> jnp.dtype:
        """dtype of what is not quantised: attention's operands, an embedding that is not the output
        head, and weights before conversion to int8."""
        return _floating(self.compute)

    @property
    def kind(self) -> str:
        """Kind of packed weights, see `kernels/linear/kinds.py`."""
        return "w8a8" if self.digits == 1 else self.compute.name

    def page_width(self, head_dim: int) -> int:
        """Width of a key and its value in the pages."""
        return kv_pages.lane_width(head_dim) if self.attention == "pallas_tpu" else 2 * head_dim

    @property
    def write_kernels(self) -> Kernels | None:
        """How the kernel that writes pages is called: on TPUs, where a kernel also reads them."""
        return self.kernels if self.attention == "pallas_tpu" else None

    def chunk_sizes(self, tokens: int) -> Iterator[int]:
        """The chunk sizes that prefill `tokens` tokens, in order. The last chunk is padded; if it
        would be at most half full, smaller ones take its place, where there are any."""
        chunks = self.prefill_chunks
        while tokens > 0:
            width = min((chunk for chunk in chunks if chunk >= tokens), default=chunks[-1])
            if 2 * tokens <= width:
                width = max((chunk for chunk in chunks if chunk < tokens), default=width)
            yield width
            tokens -= width

    @classmethod
    def for_platform(
        cls,
        platform: str,
        dtype: str,
        *,
        linear: str = "xla",
        blocks: bool = False,
        attention: str | None = None,
    ) -> Execution:
        """The choices that were measured to be best on a platform.

        On CPU unrolled layers are up to twice as fast, and prefill is fastest per token at 128. On
        TPUs a scan keeps compilation short; on GPUs it would copy each layer's weights out of the
        stack before their product with several rows. On CPU, XLA's bfloat16 product of one or two
        rows takes a path five times slower than that of three. (An int8 product has two rows for
        one token and needs no more; padded to three tokens it costs the same, and other sums then
        do not depend on the number of tokens.) On an H200, XLA's product of one row takes a quarter
        longer than one of eight. Except on CPU, a branch on the device stops the host, so the host
        chooses among programs itself, and every array of a call is a transfer. On TPUs, XLA copies
        all pages for a scatter. On GPUs a call takes two microseconds for each array.

        Args:
          platform: JAX's name of the platform.
          dtype: a floating type, int8, "w8a8" (int8 with one digit) or "native" (see `Config`).
          linear, blocks, attention: see above; attention None is Pallas on TPUs, else XLA.
        """
        compute = jnp.dtype({"native": "bfloat16", "w8a8": "int8"}.get(dtype, dtype))
        cpu, gpu = platform == "cpu", platform in ("gpu", "cuda", "rocm")
        attention = attention or ("pallas_tpu" if platform == "tpu" else xla_backend(platform))
        # From rows of an array, XLA picks slower kernels than cuBLAS has for chunks.
        options = (("xla_gpu_enable_triton_gemm", False),) if gpu else ()
        padded = cpu and linear == "xla" and compute != jnp.float32
        return cls(
            compute=compute,
            pages=kv_pages.storage_dtype(_floating(compute), platform),
            digits=1 if dtype == "w8a8" else 2,
            scaled_sums=gpu,
            min_rows=3 if padded else 8 if gpu else 1,
            scan_layers=platform == "tpu",
            few_arrays=gpu,
            attention=attention,
            kernels=Kernels() if attention.startswith("pallas") else None,
            window_writes=not (cpu or gpu),
            linear=linear,
            blocks=blocks,
            whole_tiles=platform == "tpu",
            variants=("any",) if cpu else ("greedy", "sampled", "truncated", "full"),
            chunk_options=options,
            prefill_chunks=(32, 128) if cpu else (64, 512),
            one_array=not cpu,
        )


def _floating(compute: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16) if compute == jnp.int8 else compute
