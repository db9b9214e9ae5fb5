"""AFM: llama with a squared ReLU."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import NEIGHBOURS, Family, GgufArchitecture, biases
from ssd_jax.models.families.gguf_rope import FREQUENCIES


def _read(config: ConfigReader) -> dict[str, Any]:
    activation = config.get("hidden_act")
    if activation != "relu2":
        raise config.unsupported("hidden_act", activation)
    return biases(config) | {"activation": "relu2", "gated": False}


ARCEE = Family(
    name="arcee",
    read=_read,
    defaults={"hidden_act": "relu2"},
    gguf=GgufArchitecture(name="arcee", layout=NEIGHBOURS, divisors=(FREQUENCIES,)),
)
