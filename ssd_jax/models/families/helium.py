"""Helium: llama whose heads are rotated by neighbours."""

from ssd_jax.models.families.family import Family, TensorLayout, biases

HELIUM = Family(
    name="helium",
    read=biases,
    defaults={"rope_theta": 100000.0, "head_dim": 128},
    layout=TensorLayout(rotates_neighbours=True),
)
