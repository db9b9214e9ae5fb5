"""Kernels that XLA cannot cut, on several devices that share the heads of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec


class HeadShards(NamedTuple):
    """How heads lie on devices.

    Attributes:
      axis: of the mesh, which cuts key/value heads, each with its query heads; None where every
        device has all of them.
    """

    mesh: Mesh
    axis: str | None

    def map(
        self, function: Callable[..., jax.Array], heads: Sequence[int | None], result: int
    ) -> Callable[..., jax.Array]:
        """`function` on every device, for the heads that it has.

        Args:
          heads: which dimension of each argument they are; None where an argument has none.
          result: which dimension of the result.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(map(self._spec, heads)),
            out_specs=self._spec(result),
            check_vma=False,  # a kernel of Pallas says nothing of it
        )

    def _spec(self, dimension: int | None) -> Any:
        if dimension is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * dimension, self.axis)
