"""Mechanisms of decoders: none of them is without effect, and files keep all of them."""

import dataclasses
import json

import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.mechanisms import PLAIN, Mechanisms
from ssd_jax.testing import tiny
from tests.models.every_mechanism import EVERY_MECHANISM, EXPERTS, OTHER_NORMS, SIDE_BY_SIDE
from tests.models.golden import FLOAT32, Runner
from tests.models.golden_logits import GOLDENS, golden
from tests.selection import cases

WITHOUT = [
    ("llama-biases", "output_bias"),
    ("llama-biases", "mlp_bias"),
    ("smollm3", "layer_kinds"),
    ("granite", "multipliers.embedding"),
    ("granite", "multipliers.residual"),
    ("granite", "multipliers.scores"),
    ("granite", "multipliers.logits"),
    ("phi3", "rotary_dim"),
    ("olmo2", "qk_norm"),
    ("glm4", "norm_placement"),
    ("nemotron", "layer_norm"),
    ("gemma", "activation"),
    ("mistral-window", "layer_kinds"),
    ("olmo3", "window_rope_theta"),
    ("gemma2", "score_soft_cap"),
    ("gemma2", "logit_soft_cap"),
    ("gemma2", "layer_kinds"),
    ("gemma3", "window_rope_theta"),
    ("qwen3-yarn", "rope_scaling.attention_factor"),
    ("qwen3-yarn", "rope_scaling.factor"),
    ("ministral3", "rope_scaling.query_growth"),
    ("qwen3-moe", "experts.normalized"),
    ("cohere2", "layer_kinds"),
    ("cohere2", "multipliers.logits"),
    ("cohere-norms", "qk_norm"),
    ("hunyuan", "late_qk_norm"),
    ("apertus", "activation"),
]
"""Names of stored logits, and a mechanism that they depend on."""


def without(config: ModelConfig, name: str) -> ModelConfig:
    """The configuration with one field neutral."""
    field, _, part = name.partition(".")
    if field == "rope_scaling":
        assert config.rope_scaling is not None
        scaling = dataclasses.replace(config.rope_scaling, **{part: 1.0})
        return dataclasses.replace(config, rope_scaling=scaling)
    if field == "qk_norm":
        return dataclasses.replace(config, qk_norm=False)
    plain = getattr(PLAIN, field)
    if part:
        now = getattr(config.mechanisms, field)
        other = not getattr(now, part) if field == "experts" else getattr(plain, part)
        plain = dataclasses.replace(now, **{part: other})
    if field == "rotary_dim":  # longrope has a factor for each pair
        config = dataclasses.replace(config, rope_scaling=None)
    mechanisms = dataclasses.replace(config.mechanisms, **{field: plain})
    return dataclasses.replace(config, mechanisms=mechanisms)


@pytest.mark.parametrize(("name", "mechanism"), cases(WITHOUT, WITHOUT[2], WITHOUT[5], WITHOUT[9]))
def test_stored_logits_are_not_those_without_a_mechanism(name, mechanism):
    checkpoint, (tokens, expected) = open_checkpoint(str(GOLDENS / name)), golden(name)
    model = FunctionalModel(without(checkpoint.config, mechanism), FLOAT32)
    assert model.config != checkpoint.config
    parameters = load_parameters(checkpoint.tensors, model, where=name)
    got = Runner(model, parameters, slots=len(tokens))(tokens)
    assert np.abs(got - expected).max() > 0.01


@pytest.mark.parametrize("changes", [EVERY_MECHANISM, OTHER_NORMS, SIDE_BY_SIDE, EXPERTS])
def test_a_configuration_is_read_as_it_was_written(changes):
    config = ModelConfig.from_hf(tiny.config("granite", **changes))
    assert config.mechanisms != PLAIN
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_every_mechanism_is_switched_on_somewhere_above():
    switched = {
        field.name
        for changes in (EVERY_MECHANISM, OTHER_NORMS, SIDE_BY_SIDE, EXPERTS)
        for field in dataclasses.fields(Mechanisms)
        if getattr(ModelConfig.from_hf(tiny.config("granite", **changes)).mechanisms, field.name)
        != getattr(PLAIN, field.name)
    }
    assert switched == {field.name for field in dataclasses.fields(Mechanisms)}
