"""Logical axis names of parameters and pages, and the one table that maps them to mesh axes."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh, PartitionSpec

from ssd_jax.models.config import ModelConfig

MODEL_AXIS = "model"
"""Mesh axis of tensor parallelism."""

PAGES_AXES = (None, "kv_heads", None, None)
"""Logical axes of a page array [pages, kv_heads, page_size, 2 * head_dim]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Mesh axis of each logical axis; None replicates. The default is tensor parallelism."""

    vocab: str | None = MODEL_AXIS
    outputs: str | None = MODEL_AXIS
    heads: str | None = MODEL_AXIS
    kv_heads: str | None = MODEL_AXIS
    ffn: str | None = MODEL_AXIS
    embed: str | None = None

    @classmethod
    def fitting(cls, config: ModelConfig, mesh: Mesh) -> ShardingRules:
        """Tensor parallelism of what the mesh divides evenly; all else is on every device.

        Attention is cut between key/value heads, each with its query heads, or not at all.
        """
        count = mesh.shape[MODEL_AXIS]

        def cut(size: int) -> str | None:
            return None if size % count else MODEL_AXIS

        heads = cut(config.num_kv_heads)
        return cls(
            vocab=cut(config.vocab_size),
            outputs=cut(config.outputs),
            heads=heads,
            kv_heads=heads,
            ffn=cut(config.intermediate_size),
        )

    @property
    def whole(self) -> tuple[str, ...]:
        """Logical axes that every device has whole though tensor parallelism would cut them."""
        usual = ShardingRules()
        names = [field.name for field in dataclasses.fields(self)]
        return tuple(name for name in names if getattr(usual, name) and not getattr(self, name))

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes.

        Raises:
          ValueError: two of the axes map to one mesh axis.
        """
        mapped = [None if axis is None else getattr(self, axis) for axis in axes]
        used = [axis for axis in mapped if axis is not None]
        if len(set(used)) != len(used):
            raise ValueError(f"logical axes {axes} map one mesh axis twice: {mapped}")
        return PartitionSpec(*mapped)
