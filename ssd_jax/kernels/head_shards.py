"""Kernels that XLA cannot partition, on devices that share the heads of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec


class HeadShards(NamedTuple):
    """How the devices that share a model hold its heads.

    Attributes:
      axis: mesh axis along which these devices lie.
      split: whether a device has only a part of the key/value heads, with their query heads; else
        it has all heads.
      mesh: None is the mesh of the program being traced, which has split all other axes itself.
    """

    axis: str
    split: bool = True
    mesh: Mesh | None = None

    def map(
        self, function: Callable[..., jax.Array], heads: Sequence[int | None], result: int
    ) -> Callable[..., jax.Array]:
        """`function` as a call that every device runs for its own heads.

        Args:
          heads: for each argument, the dimension of its heads; None where it has none.
          result: the dimension of the heads in the result.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(map(self._spec, heads)),
            out_specs=self._spec(result),
            axis_names={self.axis},
            check_vma=False,  # Pallas kernels do not declare it
        )

    def _spec(self, dimension: int | None) -> Any:
        if dimension is None or not self.split:
            return PartitionSpec()
        return PartitionSpec(*[None] * dimension, self.axis)


class Kernels(NamedTuple):
    """How the kernels of attention are called.

    Attributes:
      shards: given if several devices share the heads.
      interpret: whether, or how, those of Pallas run in an interpreter on a processor.
      tiles: whether that for processors may compute with AMX tiles, where there are any.
    """

    shards: HeadShards | None = None
    interpret: Any = False
    tiles: bool = True
