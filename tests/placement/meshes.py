"""Models on meshes."""

from __future__ import annotations

from ssd_jax.llm.llm import LLM
from tests.models.golden import execution_as

SHAPE = {"intermediate_size": 48, "vocab_size": 320}


def opened(pair, mesh, *, there, **settings):
    """Any mode of a pair; `there` are fields of `Execution`, as on an accelerator."""
    defaults = {"mode": "ssd", "draft": pair[1], "draft_placement": "inline", "verify": "coupled"}
    defaults |= {"context": 320, "slots": 4, "k": "3", "budget": "8", "dtype": "float32"}
    with execution_as(**there):
        return LLM(pair[0], mesh=mesh, compile_cache="off", **defaults | settings)
