"""What a group of devices cuts of a model, and what each device holds whole."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import MODEL_AXIS
from ssd_jax.testing import tiny
from tests.models.golden import FLOAT32

SHAPE = {"num_attention_heads": 8, "intermediate_size": 48, "vocab_size": 320}


@pytest.mark.parametrize(
    ("devices", "changes", "cut"),
    [
        (4, {"num_key_value_heads": 4}, {"attention", "ffn", "vocab", "pages"}),
        (4, {"num_key_value_heads": 2}, {"ffn", "vocab"}),  # heads of one key head stay together
        (4, {"num_key_value_heads": 4, "intermediate_size": 50}, {"attention", "vocab", "pages"}),
        (4, {"num_key_value_heads": 4, "vocab_size": 321}, {"attention", "ffn", "pages"}),
        (3, {"num_key_value_heads": 2}, {"ffn"}),
        (7, {"num_key_value_heads": 2}, set()),
        (1, {"num_key_value_heads": 1}, set()),
    ],
)
def test_what_the_devices_divide_is_cut_and_all_else_is_whole(devices, changes, cut):
    config = ModelConfig.from_hf(tiny.config("qwen3", **SHAPE | changes))
    mesh = Mesh(np.array(jax.devices()[:devices]), (MODEL_AXIS,))
    model = FunctionalModel(config, FLOAT32, mesh=mesh)
    wanted, layer = model.wanted(), "model.layers.0"
    of = {
        "attention": [f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"],
        "ffn": [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")],
        "vocab": ["model.embed_tokens.weight", "lm_head.weight"],
    }
    structs = {part: [wanted[name] for name in names] for part, names in of.items()}
    structs["pages"] = jax.tree.leaves(model.page_structs(2, 128))
    for part, each in structs.items():
        shares = {np.prod(s.shape) / np.prod(s.sharding.shard_shape(s.shape)) for s in each}
        assert shares == {devices if part in cut else 1}, part
    norm = wanted["model.norm.weight"]
    assert norm.sharding.is_fully_replicated
