"""What the attention of some models has besides a plain softmax over all that a query sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.kv_pages import MAX_ENTRIES, Scratch

NOTHING = 2**31 - 1
"""First position of a query that sees nothing."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """How a layer's attention differs from softmax(q k^T / sqrt(head_dim)) v.

    The default differs in nothing. Through `jax.jit`, arrays pass as arguments, all else is static.

    Attributes:
      window: an int, or [] int32; a query at position p sees keys at positions p - window + 1 to p,
        as the `sliding_window` of `transformers`. None sees all. An array makes layers with other
        windows one program; a layer that sees all then has `NOTHING`. Positions count along a
        query's path: it is at visible - 1, and a token further for every entry of its path.
      layer_windows: the windows that an array may be, one for each layer, for estimates of costs.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      scale: that products with keys are multiplied with to be scores; None is head_dim**-0.5.
      sinks: [heads] of any float dtype; a score for each query head, neither scaled nor capped, of
        a key without a value which every query sees. None is no such key.
    """

    window: Any = None  # like `sinks`, whatever `jax.tree.map` makes of it
    layer_windows: tuple[int, ...] = ()
    soft_cap: float | None = None
    scale: float | None = None
    sinks: Any = None

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arrays, and the rest."""
        static = self.window if isinstance(self.window, int) else None
        window = None if static is not None else self.window
        return (window, self.sinks), (static, self.soft_cap, self.scale, self.layer_windows)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], arrays: tuple[Any, ...]) -> AttentionVariant:
        """The inverse."""
        window, sinks = arrays
        return cls(
            window=window if static[0] is None else static[0],
            soft_cap=static[1],
            scale=static[2],
            layer_windows=static[3],
            sinks=sinks,
        )

    def scale_for(self, head_dim: int) -> float:
        """The factor of products of heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def mean_reach(self, capacity: int) -> float:
        """Positions that a query sees behind `capacity` of them, on average over the layers."""
        windows = self.layer_windows
        if isinstance(self.window, int):
            windows = (self.window,)
        sizes = [min(window, capacity) for window in windows]
        return sum(sizes) / len(sizes) if sizes else capacity

    def cap(self, scores: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Scores under the soft cap, if there is one."""
        if self.soft_cap is None:
            return scores
        return self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def first_seen(
        self, visible: Int32[Array, "B R"], scratch: Scratch | None
    ) -> Int32[Array, "B R"] | None:
        """The position of the first token that each query sees; None without a window.

        From `visible` on, it is the position of an entry of the query's path.
        """
        if self.window is None:
            return None
        count = visible
        if scratch is not None:
            count = visible + jax.lax.population_count(scratch.paths[..., 1])
        return jnp.where(count > 0, jnp.maximum(count - self.window, 0), NOTHING)

    def within(self, scratch: Scratch | None) -> Scratch | None:
        """`scratch` with paths of the entries in the window alone: the last ones of each."""
        if scratch is None or self.window is None:
            return scratch
        branch, path = jnp.moveaxis(scratch.paths, -1, 0)
        from_entry = jax.lax.shift_right_logical(
            *jnp.broadcast_arrays(path[..., None], jnp.arange(MAX_ENTRIES + 1, dtype=path.dtype))
        )
        behind = jax.lax.population_count(from_entry) > self.window
        first = jnp.sum(behind, axis=-1, dtype=path.dtype)
        path &= jnp.left_shift(jnp.full_like(path, -1), first)
        return scratch._replace(paths=jnp.stack([branch, path], axis=-1))

    def tiled_sinks(self, kv_heads: int, queries: int) -> Float32[Array, "kv_heads Q"] | None:
        """The sinks of all queries of a key/value head, the heads of a token side by side."""
        if self.sinks is None:
            return None
        by_head = self.sinks.astype(jnp.float32).reshape(kv_heads, -1)
        return jnp.tile(by_head, (1, queries // by_head.shape[1]))


PLAIN = AttentionVariant()
