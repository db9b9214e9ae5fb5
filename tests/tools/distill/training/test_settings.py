"""What cannot be trained is refused before anything is read or compiled."""

import dataclasses

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.mechanisms import PLAIN, Mechanisms
from ssd_jax.options.toml_settings import read_section
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.settings import DraftSettings, TrainSettings
from ssd_jax.tools.distill.shards import Sample
from ssd_jax.tools.distill.training.data import columns_of, most_frequent
from ssd_jax.tools.distill.training.model import draft_config

TARGET = ModelConfig.from_hf(tiny.config("llama"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": (0, 2)}, "layers: 2 is out of range, the target has layers 0 to 1"),
        ({"layers": (-1,)}, "layers: -1 is out of range"),
        ({}, "needs layers"),
        ({"layers": (0,), "hidden_size": 16}, "remove hidden_size"),
        ({"num_layers": 1, "hidden_size": 16}, 'embedding = "frozen" needs the target'),
        ({"num_layers": 1, "num_heads": 3}, "no multiple of num_kv_heads = 2"),
        ({"num_layers": 1, "head_dim": 3}, "must be even"),
        ({"layers": (0,), "head": "loose"}, "must be one of frozen, trained"),
        ({"num_layers": 1, "family": "gpt2"}, "must be one of llama, qwen2, qwen3"),
    ],
)
def test_impossible_drafts_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        draft_config(read_section(DraftSettings, settings, "[draft]"), TARGET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps = 0 must be at least 1"),
        ({"batch": 8, "accumulation": 3}, "no multiple of accumulation"),
        ({"kl": 0}, "one must be above 0"),
        ({"kl": -1}, "must not be negative"),
        ({"learning_rate": 0}, "learning_rate = 0 must be above 0"),
        ({"beta2": 1.0}, "below 1"),
        ({"compute": "float16"}, "must be one of bfloat16, float32"),
    ],
)
def test_impossible_training_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        read_section(TrainSettings, {"steps": 10} | settings, "[train]")


def test_a_draft_of_the_targets_layers_has_its_sizes_and_shares_what_is_frozen():
    made = draft_config(DraftSettings(layers=(1,)), TARGET)
    assert made == dataclasses.replace(TARGET, num_layers=1)
    assert made.tie_embeddings
    reduced = draft_config(DraftSettings(layers=(1, 0, 1), output_size=64), TARGET)
    assert (reduced.num_layers, reduced.output_size, reduced.tie_embeddings) == (3, 64, False)


def test_a_draft_from_scratch_may_be_of_another_family_and_width():
    settings = DraftSettings(
        num_layers=1,
        family="qwen3",
        hidden_size=16,
        num_heads=2,
        embedding="trained",
        head="trained",
    )
    made = draft_config(settings, TARGET)
    assert (made.family, made.hidden_size, made.head_dim, made.qk_norm) == ("qwen3", 16, 8, True)
    assert (made.intermediate_size, made.num_kv_heads) == (48, 2)


def test_the_output_vocabulary_is_the_most_frequent_ids_and_the_special_ones():
    text = Sample(tokens=np.array([1, 1, 1, 5, 5, 9, 7, 7, 7], np.int32), prompt_length=3)
    ids = most_frequent([text], count=4, size=20, always=[19])
    np.testing.assert_array_equal(ids, [5, 7, 9, 19])  # what is of the prompt does not count
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(most_frequent([text], count=5, size=20, always=[19])[:1], [0])
    np.testing.assert_array_equal(columns_of(ids[:3], 10), [3, 3, 3, 3, 3, 0, 3, 1, 3, 2])


@pytest.mark.parametrize(
    ("mechanisms", "changes", "message"),
    [
        ({"logit_soft_cap": 30.0}, {}, "caps its logits.*family to one of llama, qwen2, qwen3"),
        ({"rotary_dim": 4}, {"head_dim": 16}, "RoPE is made for heads of 8 dimensions"),
        ({"rotary_dim": 4}, {"family": "qwen3"}, "RoPE is made for heads of 8 dimensions"),
    ],
)
def test_what_drafts_cannot_take_from_a_target_is_named(mechanisms, changes, message):
    target = dataclasses.replace(TARGET, mechanisms=Mechanisms(**mechanisms))
    with pytest.raises(InputError, match=message):
        draft_config(DraftSettings(num_layers=1, **changes), target)


def test_a_draft_from_scratch_has_the_mechanisms_of_its_target_or_those_of_its_family():
    kinds = Mechanisms(layer_kinds=("full", "nope"), output_bias=True)
    target = dataclasses.replace(TARGET, family="smollm3", mechanisms=kinds)
    same = draft_config(DraftSettings(num_layers=3), target)
    assert same.mechanisms == dataclasses.replace(kinds, layer_kinds=("full", "nope", "full"))
    assert draft_config(DraftSettings(num_layers=1, family="llama"), target).mechanisms == PLAIN
