"""How a decoder is executed on a platform: the one place where platforms differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.tree_attention.api import in_xla


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Static choices compiled into every program of a model.

    Attributes:
      compute: dtype of weights and of activations entering a product (float32, bfloat16 or int8);
        norms, softmax, the residual stream and logits are float32 always.
      digits: of an activation in an int8 product, see `kernels/linear/quantized.py`.
      pages: storage dtype of the key/value pages.
      min_rows: products get at least this many rows; fewer are padded with zeros.
      scan_layers: one scanned layer instead of unrolled ones.
      attention: backend of `tree_attention`, see there.
      kernels: how kernels of Pallas are called, where attention is by them.
      window_writes: how keys and values are written, see `kv_pages.write`.
      linear: backend of products with weights, "xla" or "cpu" (packed weights).
      variants: programs of sampling that there are, by names of `sampling/variants.py`.
      prefill_chunks: numbers of prompt tokens that one program takes, ascending; see `chunks_of`.
      one_array: whether a dispatch hands over what is on the host as one array, see
        `devices.packing`.
    """

    compute: jnp.dtype
    pages: jnp.dtype
    digits: int = 2
    min_rows: int = 1
    scan_layers: bool = False
    attention: str = "xla"
    kernels: Kernels | None = None
    window_writes: bool = False
    linear: str = "xla"
    variants: tuple[str, ...] = ("any",)
    prefill_chunks: tuple[int, ...] = (32, 128)
    one_array: bool = False

    @property
    def floating(self) -> jnp.dtype:
        """dtype of what is not quantised: attention's operands, an embedding that is no output
        head, and weights on their way to int8."""
        return _floating(self.compute)

    @property
    def kind(self) -> str:
        """Of packed weights, see `kernels/linear/kinds.py`."""
        return "w8a8" if self.digits == 1 else self.compute.name

    def page_width(self, head_dim: int) -> int:
        """Of a key beside its value, as pages have them."""
        return kv_pages.lanes(head_dim) if self.attention == "pallas_tpu" else 2 * head_dim

    @property
    def writing(self) -> Kernels | None:
        """How the kernel that writes pages is called: on TPUs, whose attention reads them so."""
        return self.kernels if self.attention == "pallas_tpu" else None

    def chunks_of(self, tokens: int) -> Iterator[int]:
        """The programs that prefill so many tokens, in turn. The last one is padded: one that would
        not even be half full gives way to smaller ones, where there are any."""
        chunks = self.prefill_chunks
        while tokens > 0:
            width = min((chunk for chunk in chunks if chunk >= tokens), default=chunks[-1])
            if 2 * tokens <= width:
                width = max((chunk for chunk in chunks if chunk < tokens), default=width)
            yield width
            tokens -= width

    @classmethod
    def for_platform(
        cls, platform: str, dtype: str, *, linear: str = "xla", attention: str | None = None
    ) -> Execution:
        """Measured choices: unrolled layers are up to twice as fast on CPU, and prefill is fastest
        per token at 128. On TPUs a scan keeps compilation short; on GPUs it would copy each layer's
        weights out of the stack before their product with several rows. XLA's bfloat16 product of
        one or two rows takes a path on CPU five times slower than one of three. (An int8 product
        has two rows for one token and needs no more; padded to three tokens it costs the same, and
        other sums then do not depend on the number of tokens.) XLA's product of one row takes a
        quarter longer on an H200 than one of eight. Elsewhere than on CPU a branch on the device
        stops the host, which then chooses among programs itself, and every array of a call is a
        transfer.

        Args:
          platform: JAX's name of it.
          dtype: a floating type, int8, "w8a8" (int8 with one digit) or "native" (see `Config`).
          linear, attention: see above; attention None is Pallas's on TPUs, else XLA's.
        """
        compute = jnp.dtype({"native": "bfloat16", "w8a8": "int8"}.get(dtype, dtype))
        cpu = platform == "cpu"
        attention = attention or ("pallas_tpu" if platform == "tpu" else in_xla(platform))
        padded = cpu and linear == "xla" and compute != jnp.float32
        return cls(
            compute=compute,
            pages=kv_pages.storage_dtype(_floating(compute), platform),
            digits=1 if dtype == "w8a8" else 2,
            min_rows=3 if padded else 8 if platform in ("gpu", "cuda") else 1,
            scan_layers=platform == "tpu",
            attention=attention,
            kernels=Kernels() if attention.startswith("pallas") else None,
            window_writes=not cpu,
            linear=linear,
            variants=("any",) if cpu else ("greedy", "sampled", "truncated", "full"),
            prefill_chunks=(32, 128) if cpu else (64, 512),
            one_array=not cpu,
        )


def _floating(compute: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16) if compute == jnp.int8 else compute
