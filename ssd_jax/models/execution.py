"""How a decoder is executed on a platform: the one place where platforms differ."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ssd_jax.kernels import kv_pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Static choices compiled into every program of a model.

    Attributes:
      compute: dtype of weights and of activations entering a product (float32 or bfloat16);
        norms, softmax, the residual stream and logits are float32 always.
      pages: storage dtype of the key/value pages.
      min_rows: products get at least this many rows; fewer are padded with zeros.
      scan_layers: one scanned layer instead of unrolled ones.
      attention: backend of `tree_attention`.
      prefill_chunks: numbers of prompt tokens that one program takes, ascending; a chunk is padded
        to the next one.
    """

    compute: jnp.dtype
    pages: jnp.dtype
    min_rows: int = 1
    scan_layers: bool = False
    attention: str = "xla"
    prefill_chunks: tuple[int, ...] = (32, 128)

    @classmethod
    def for_platform(cls, platform: str, compute: str) -> Execution:
        """Measured choices: unrolled layers are up to twice as fast on CPU, where a bfloat16
        product of one or two rows takes a path five times slower than one of three, and prefill is
        fastest per token at 128; elsewhere a scan keeps compilation short.
        """
        dtype = jnp.dtype(compute)
        cpu = platform == "cpu"
        return cls(
            compute=dtype,
            pages=kv_pages.storage_dtype(dtype, platform),
            min_rows=3 if cpu and dtype == jnp.bfloat16 else 1,
            scan_layers=not cpu,
            prefill_chunks=(32, 128) if cpu else (64, 512),
        )
