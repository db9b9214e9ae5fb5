"""Attention and feed-forward that read the same: faults show in the logits of stored models."""

import jax
import numpy as np
import pytest

from ssd_jax.models import decoder_layer, layers
from tests.models.golden import our_logits
from tests.models.golden_logits import GOLDENS, golden
from tests.sampling.edits import Edit, edited

MUTANTS = {
    "a feed-forward that reads the sum": ("source, norm = x,", "source, norm = added,"),
    "a feed-forward without the norm": ("norm = x, self.input_layernorm", "norm = x, None"),
    "attention left out": ("self._add(added, fed", "self._add(x, fed"),
}


@pytest.mark.parametrize("family", ["cohere", "cohere2"])
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, family):
    old, new = MUTANTS[name]
    assert_seen(family, Edit(decoder_layer.DecoderLayer, "__call__", old, new))


def test_a_norm_that_keeps_the_mean_is_caught():
    assert_seen("cohere", Edit(layers.LayerNorm, "__call__", "x - row_sum(x) / x.shape[-1]", "x"))


def assert_seen(name, edit):
    tokens, expected = golden(name)
    jax.clear_caches()
    with edited([edit]):
        assert np.abs(our_logits(GOLDENS / name, tokens) - expected).max() > 0.05
    jax.clear_caches()
