"""`python docs/figures/attention.py`: attention of many branches over one prefix, on a processor.

Milliseconds of a call and how many times as long JAX's own attention takes, each time on the same
numbers: `jax.nn.dot_product_attention` knows no shared prefix, so it gets one row for every branch,
with the prefix beside each. Heads are those of Qwen2.5 0.5B; medians of calls in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.kv_pages import Contiguous, Scratch, chain_path
from ssd_jax.kernels.tree_attention.api import tree_attention

BRANCHES, PREFIX, HEADS, KV_HEADS, HEAD_DIM = 24, 2048, 14, 2, 64
CALLS = 60


def ours(backend: str) -> Callable[..., jax.Array]:
    """Branches of one token each, all of which see the prefix and themselves."""

    def attend(q: jax.Array, pages: jax.Array, new: jax.Array) -> jax.Array:
        branch = jnp.arange(BRANCHES)
        paths = jnp.stack([branch, chain_path(jnp.ones_like(branch))], axis=-1)[None]
        visible = jnp.full((1, BRANCHES), PREFIX, jnp.int32)
        scratch = Scratch(new, paths)
        return tree_attention(q, pages, Contiguous(), visible, scratch, backend=backend)

    return jax.jit(attend)


@jax.jit
def of_jax(q: jax.Array, prefix: jax.Array, new: jax.Array) -> jax.Array:
    """The same by JAX: B x M rows, with the prefix of each."""
    rows = jnp.broadcast_to(prefix, (BRANCHES, *prefix.shape[1:]))
    kv = jnp.concatenate([rows, new], axis=1)
    k, v = jnp.split(kv, 2, axis=-1)
    return jax.nn.dot_product_attention(q.swapaxes(0, 1), k, v).swapaxes(0, 1)


def milliseconds(call: Callable[[], jax.Array]) -> float:
    """Of one call."""
    began = time.perf_counter()
    call().block_until_ready()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """See the module."""
    if reason := why_missing():
        sys.exit(f"there is no kernel: {reason}")
    rng = np.random.default_rng(0)
    shapes = [
        (1, BRANCHES, HEADS, HEAD_DIM),
        (1, PREFIX, KV_HEADS, 2 * HEAD_DIM),
        (BRANCHES, 1, KV_HEADS, 2 * HEAD_DIM),
    ]
    normal = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    for dtype in map(jnp.dtype, ("bfloat16", "float32")):
        stored = kv_pages.storage_dtype(dtype, "cpu")
        q, prefix, new = (array.astype(dtype) for array in normal)
        pages = kv_pages.encode(prefix.swapaxes(1, 2), stored)
        scratch = kv_pages.encode(new.transpose(2, 1, 0, 3)[None], stored)
        calls = {name: partial(ours(name), q, pages, scratch) for name in ("cpu", "xla")}
        calls["jax.nn"] = partial(of_jax, q, prefix, new)
        results = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
        for name, result in results.items():
            np.testing.assert_allclose(result, results["jax.nn"], atol=2e-2, err_msg=name)
        times = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(CALLS)]
        for name in calls:
            taken = statistics.median(time[name] for time in times)
            ratio = statistics.median(time["jax.nn"] / time[name] for time in times)
            print(f"{dtype.name:9} {name:7} {taken:7.2f} ms {ratio:6.2f}x")


if __name__ == "__main__":
    main()
