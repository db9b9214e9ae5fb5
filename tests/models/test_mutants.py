"""Faults in what single families compute show in the logits of stored models."""

import jax
import numpy as np
import pytest

from ssd_jax.checkpoints.weights import layout
from ssd_jax.models import attention, experts, feed_forward, layers
from tests.models.golden import our_logits
from tests.models.golden_logits import GOLDENS, golden
from tests.sampling.edits import Edit, edited

_MEAN = "x - row_sum(x) / x.shape[-1]"
_UP = "(jnp.clip(up, -limit, limit) + 1)"
MUTANTS = {
    "heads that keep their mean": (
        "cohere-norms", layers.LayerNorm, "__call__", _MEAN, f"{_MEAN} if x.ndim < 3 else x",
    ),
    "one weight for all heads": (
        "stablelm-norms", layers.LayerNorm, "__call__",
        "self.weight[...]", "self.weight[...][: 1 if x.ndim > 2 else None]",
    ),
    "keys without a norm": (
        "cohere-norms", attention.Attention, "_normed", "self.k_norm(k)", "k",
    ),
    "weights of heads in the file's order": (
        "cohere-norms", layout._Arranged, "_read_norms", "self._head_order[dims]", "dims",
    ),
    "a late norm left out": (
        "hunyuan", attention.Attention, "__call__", "if self.late_norm:", "if False:",
    ),
    "an early norm beside it": (
        "hunyuan-moe", attention.Attention, "__call__", "if not self.late_norm:", "if True:",
    ),
    "xIELU without its slope": (
        "apertus", layers.XIELU, "__call__", "+ XIELU_SLOPE * x", "",
    ),
    "xIELU with one parameter for both sides": (
        "apertus", layers.XIELU, "__call__", "softplus(self.alpha_n", "softplus(self.alpha_p",
    ),
    "xIELU without the root at 0": (
        "apertus", layers.XIELU, "__call__", "- x)", ")",
    ),
    "a gate without its limit": (
        "gpt-oss", layers, "gated", "jnp.minimum(gate, limit)", "gate",
    ),
    "a gate with a limit below": (
        "gpt-oss", layers, "gated", "jnp.minimum(gate, limit)", "jnp.clip(gate, -limit, limit)",
    ),
    "an up without its limit": ("gpt-oss", layers, "gated", _UP, "(up + 1)"),
    "an up that is not shifted": ("gpt-oss", layers, "gated", _UP, "jnp.clip(up, -limit, limit)"),
    "another activation": (
        "gpt-oss", layers, "gated", "ACTIVATIONS[activation]", 'ACTIVATIONS["silu"]',
    ),
    "sinks ignored": (
        "gpt-oss", attention.Attention, "with_sinks", "if self.sinks is None:", "if True:",
    ),
    "a correction left out": (
        "glm4-moe", experts.Router, "__call__",
        "preference = scores + self.e_score_correction_bias[...]", "preference = scores",
    ),
    "a correction in the weights": (
        "minimax-m2", experts.Router, "__call__",
        "take_along_axis(scores, chosen", "take_along_axis(preference, chosen",
    ),
    "a correction of logits": (
        "ernie-moe", experts.Router, "__call__",
        "_softmax(logits) if softmax else scores", "scores",
    ),
    "a scale left out": (
        "dots1", experts.Router, "__call__", "weights * self.experts.scale", "weights",
    ),
    "a shared expert left out": (
        "glm4-moe", feed_forward.ExpertMLP, "__call__", "return total + shared", "return total",
    ),
    "a shared expert without its gate": (
        "qwen2-moe", experts.SharedGate, "__call__",
        "jax.nn.sigmoid(product_by_rows(x, self.weight[...]))", "jnp.ones((len(x), 1))",
    ),
    "weights normalised that are not": (
        "olmoe", experts.Router, "__call__", "if self.experts.normalized:", "if True:",
    ),
}  # fmt: skip
"""The stored logits, what is edited where, and how."""


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    model, where, function, old, new = MUTANTS[name]
    tokens, expected = golden(model)
    jax.clear_caches()
    with edited([Edit(where, function, old, new)]):
        assert np.abs(our_logits(GOLDENS / model, tokens) - expected).max() > 0.05
    jax.clear_caches()
