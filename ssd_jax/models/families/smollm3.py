"""SmolLM 3: some layers have no RoPE."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import NEIGHBOURS, Family, GgufArchitecture, biases


def _read(config: ConfigReader) -> dict[str, Any]:
    count, interval = config.count("num_hidden_layers"), config.count("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    if len(rotated) < count:
        raise config.unsupported("no_rope_layers", rotated, f"there are {count} layers")
    kinds = tuple("full" if rope else "nope" for rope in rotated[:count])
    return biases(config) | ({"layer_kinds": kinds} if "nope" in kinds else {})


SMOLLM3 = Family(
    name="smollm3",
    read=_read,
    defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    gguf=GgufArchitecture(name="smollm3", layout=NEIGHBOURS),
)
