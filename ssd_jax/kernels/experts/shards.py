"""Products with experts on devices that share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec


class ExpertShards(NamedTuple):
    """How the devices that share a model hold its experts.

    Attributes:
      axis: mesh axis along which these devices lie.
      devices: their number.
      by_expert: whether a device has some of the experts, or else some of the channels of all.
      mesh: of the model. A program that has split its other axes itself has one of its own.
    """

    axis: str
    devices: int
    by_expert: bool
    mesh: Mesh | AbstractMesh

    @property
    def device(self) -> jax.Array:
        """Number of the device, within what `add` calls."""
        return jax.lax.axis_index(self.axis)

    def add(
        self,
        function: Callable[..., jax.Array],
        weights: Sequence[jax.Array],
        axes: Sequence[tuple[str | None, ...]],
        *arrays: jax.Array,
    ) -> jax.Array:
        """The sum over devices of `function` of a device's parts of weights, and of arrays.

        Args:
          axes: logical names of the axes of each weight.
        """
        cut = "experts" if self.by_expert else "expert_ffn"
        specs: Any = [
            PartitionSpec(*(self.axis if name == cut else None for name in names)) for names in axes
        ]

        def of_device(weights: list[jax.Array], *arrays: jax.Array) -> jax.Array:
            return jax.lax.psum(function(weights, *arrays), self.axis)

        mapped = jax.shard_map(
            of_device,
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=(specs, *(PartitionSpec() for _ in arrays)),
            out_specs=PartitionSpec(),
            axis_names={self.axis},
            check_vma=False,  # kernels do not declare it
        )
        return mapped([*weights], *arrays)
