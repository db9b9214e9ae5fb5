"""Models whose slots share pages, and where their draft is."""

from __future__ import annotations

import pytest

from ssd_jax import LLM
from tests.models.golden import execution_as

CONTEXT = 512
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2}
ALONE = {"mode": "ar", "draft": None, "draft_placement": None, "k": None, "budget": None}
LONG = "The quick brown fox jumps over the lazy dog. " * 6
# Bytes of a page of both models: two layers, two heads, K beside V of 8, float32.
PAGE = 2 * 2 * 2 * 128 * 2 * 8 * 4
ELSEWHERE = {
    "process": {"draft_placement": "process"},
    "submesh": {"draft_placement": "submesh", "target_devices": "1", "draft_devices": "4"},
    "groups": {"draft_placement": "submesh", "mesh": "data=2", "draft_devices": "4", "slots": 4},
}
"""With groups, the target's devices number their own pages from 0, and the draft's do not."""


def opened(pair, *, there=None, **settings):
    """`there` are fields of `Execution`, as on an accelerator."""
    defaults = {"mode": "ssd", "draft": pair[1], "draft_placement": "inline", "verify": "coupled"}
    defaults |= {"context": CONTEXT, "slots": 3, "k": "3", "budget": "8", "dtype": "float32"}
    with execution_as(**(there or {})):
        return LLM(pair[0], compile_cache="off", **defaults | settings)


def with_new_engines(llm):
    """The same programs and weights; stocks of pages and roles are made anew."""
    llm._engines.clear()
    return llm


def elsewhere(default):
    """Each of them; all but one are slow."""
    slow = pytest.mark.slow
    return [pytest.param(place, marks=() if place == default else slow) for place in ELSEWHERE]
