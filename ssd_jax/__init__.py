"""Speculative speculative decoding in JAX. Public names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ssd_jax.compat import avoid_wrong_sums

if TYPE_CHECKING:
    from ssd_jax.config.config import Config
    from ssd_jax.engine.request import CompletionOutput, RequestOutput, TokenEvent
    from ssd_jax.errors import DeviceError, InputError, SsdError
    from ssd_jax.llm.llm import LLM
    from ssd_jax.sampling.params import SamplingParams
    from ssd_jax.sampling.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Config",
    "DeviceError",
    "InputError",
    "RequestOutput",
    "SamplingParams",
    "SsdError",
    "StructuredOutputsParams",
    "TokenEvent",
    "__version__",
]

avoid_wrong_sums()  # only the import of the package is sure to come before JAX starts

_HOME = {
    "LLM": "ssd_jax.llm.llm",
    "CompletionOutput": "ssd_jax.engine.request",
    "Config": "ssd_jax.config.config",
    "DeviceError": "ssd_jax.errors",
    "InputError": "ssd_jax.errors",
    "SsdError": "ssd_jax.errors",
    "RequestOutput": "ssd_jax.engine.request",
    "SamplingParams": "ssd_jax.sampling.params",
    "StructuredOutputsParams": "ssd_jax.sampling.structured_outputs",
    "TokenEvent": "ssd_jax.engine.request",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
