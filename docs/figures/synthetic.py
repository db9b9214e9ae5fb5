"""`python docs/figures/synthetic.py SHAPE DIRECTORY`: a checkpoint with weights that mean nothing.

What a forward costs depends on shapes alone, so speed can be measured without a download. SHAPE is
a name that `ssd-jax aot` knows, such as llama-3.1-8b, or a config.json. Every such model says after
byte b the byte b + 1, since its layers add next to nothing and its output head has the embedding's
rows one further on: two of them always agree, which is what hits need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.testing.tiny import write_tokenizer
from ssd_jax.tools.aot.configurations import known_models

HEAD = "lm_head.weight"
BYTES, BLOCK = 256, (1 << 25) - 39  # no whole number of rows


def write(shape: str, directory: Path) -> None:
    """See the module."""
    table = known_models()
    about = dict(table[shape]) if shape in table else json.loads(Path(shape).read_text())
    about |= {"tie_word_embeddings": False, "eos_token_id": BYTES}
    model = FunctionalModel(ModelConfig.from_hf(about), Execution.for_platform("gpu", "bfloat16"))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(about))
    write_tokenizer(directory)
    sizes = {name: struct.shape for name, struct in model.checkpoint_structs().items()}
    offsets = np.cumsum([0, *(2 * int(np.prod(size)) for size in sizes.values())]).tolist()
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": size, "data_offsets": offsets[place : place + 2]}
            for place, (name, size) in enumerate(sizes.items())
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32).astype(ml_dtypes.bfloat16)
    faint = noise * np.asarray(2.0**-30, noise.dtype)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, size in sizes.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            values = np.resize(faint if adds else noise, size)
            if name.endswith("norm.weight"):
                values[:] = 1
            elif name == HEAD:
                values[:BYTES] = np.roll(values[:BYTES], 1, axis=0)
            file.write(values.view(np.uint8).data)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
