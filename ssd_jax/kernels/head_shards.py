"""Kernels that XLA cannot cut, on several devices that share the heads of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec


class HeadShards(NamedTuple):
    """How heads lie on the devices that share a model.

    Attributes:
      axis: of the mesh, along which these devices lie.
      cut: whether each has a part of the key/value heads, with its query heads; else all have all.
      mesh: None is that of the program being traced, which has cut all other axes itself.
    """

    axis: str
    cut: bool = True
    mesh: Mesh | None = None

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
            axis_names={self.axis},
            check_vma=False,  # a kernel of Pallas says nothing of it
        )

    def _spec(self, dimension: int | None) -> Any:
        if dimension is None or not self.cut:
            return PartitionSpec()
        return PartitionSpec(*[None] * dimension, self.axis)


class Kernels(NamedTuple):
    """How kernels of Pallas are called.

    Attributes:
      shards: where several devices have the heads.
      interpret: whether, or how, a processor runs them, as an interpreter.
    """

    shards: HeadShards | None = None
    interpret: Any = False
