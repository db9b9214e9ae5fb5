"""The settings of the demo: what suits the target and this processor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssd_jax.checkpoints.drafts.shipped import DEFAULT, find_draft
from ssd_jax.checkpoints.weights.native import has_native
from ssd_jax.config.config import Config

if TYPE_CHECKING:
    from ssd_jax.checkpoints.checkpoint import Checkpoint

_K, _BUDGET = 4, "16"
_SLOW_K, _SLOW_BUDGET = 3, "4"  # of a draft that is nearly always right, but expensive
_SMALL_KS = (1, 2)
"""Values of K that sd is measured with, too: without AMX a verification of few tokens is cheaper by
more than they lose."""


class DemoSettings(NamedTuple):
    """Configuration of mode ssd, values of K that sd is measured with, and the draft in words."""

    config: Config
    ks: tuple[int, ...]
    draft: str


def choose_settings(base: Config, source: Checkpoint, trace: Path) -> DemoSettings:
    """Settings of mode ssd, with the package's draft or, for want of it, the target's own weights.

    Args:
      trace: where the rounds are recorded, unless the configuration says where.
    """
    common = {"mode": "ssd", "draft_placement": "process", "trace": base.trace or str(trace)}
    if find_draft(source) is not None:
        k, description = _K, "the package's draft"
        draft: dict[str, Any] = {"draft": DEFAULT, "budget": _BUDGET}
    else:
        k = _SLOW_K
        description = "the target's own weights in int8 as the draft, for want of a small one"
        draft = {"draft": base.target, "draft_dtype": "int8", "budget": _SLOW_BUDGET}
    config = dataclasses.replace(base, k=str(k), **common | draft)
    return DemoSettings(config, (*_SMALL_KS, k), description)


def fitting_dtype(source: Checkpoint, platform: str) -> str:
    """The dtype that decodes fastest: on a processor without AMX, that of a GGUF file's weights."""
    if platform == "cpu" and not has_amx() and has_native(source.tensors):
        return "native"
    return Config().dtype


def has_amx(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies tiles of bfloat16."""
    return info.is_file() and "amx_bf16" in info.read_text(errors="replace").split()
