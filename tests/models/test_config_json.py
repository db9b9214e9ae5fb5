from __future__ import annotations

import json

import pytest

from ssd_jax.models.config import ModelConfig
from tests.checkpoints import tiny_models as tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.5}, LLAMA3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_configuration_survives_json(family, scaling, tied):
    config = ModelConfig.from_hf(
        tiny.hf_config(family, rope_scaling=scaling, tie_word_embeddings=tied, head_dim=96)
    )
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
