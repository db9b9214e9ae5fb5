"""Models whose drafts propose trees: a pair of each family, opened with a tree of so many nodes."""

from pathlib import Path

from ssd_jax.llm.llm import LLM
from tests.checkpoints import tiny_pair
from tests.llm.paged import SHAPE

_DEFAULTS = {"context": 320, "slots": 3, "dtype": "float32", "verify": "coupled"}


def write(root: Path) -> dict[str, tuple[str, str]]:
    """(target, draft that agrees with it more often than not) of each family."""
    families = ("llama", "qwen2", "qwen3")
    return {family: tiny_pair.write(root / family, family, **SHAPE) for family in families}


def opened(pair: tuple[str, str], k: int, nodes: int | str, **settings) -> LLM:
    target, draft = pair
    settings = _DEFAULTS | {"compile_cache": "off"} | settings
    return LLM(target, draft=draft, k=k, tree_nodes=nodes, **settings)
