"""Settings as keyword arguments, by our names or vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from ssd_jax.config import Config
from ssd_jax.errors import InputError
from ssd_jax.system.toml_settings import check_names

VLLM = {
    "max_num_seqs": "slots",
    "max_model_len": "context",
    "num_speculative_tokens": "k",
    "enable_prefix_caching": "prefix_caching",
}
"""Names that vLLM has for settings, which are accepted for them."""


class Settings(TypedDict, total=False):
    """Settings of a `Config` beside its target, as keyword arguments; numbers and paths may be
    given as such."""

    mode: str
    draft: str | Path | None
    k: int | str | None
    dtype: str
    draft_dtype: str | None
    slots: int
    context: int | None
    kv_memory: int | str | None
    page_size: int | None
    prefix_caching: bool | None
    chat_template: bool | None
    generation_config: str
    draft_temperature: float | None
    proposal_support: int | str | None
    draft_placement: str | None
    target_devices: int | str | None
    mesh: str | None
    draft_devices: int | str | None
    hosts: str | None
    host_timeout: float
    draft_cores: int | str | None
    draft_workers: int | None
    draft_split: str | None
    draft_token_file: str | Path | None
    draft_tls_ca: str | Path | None
    draft_tls_cert: str | Path | None
    draft_tls_key: str | Path | None
    target_cores: int | str | None
    budget: int | str | None
    fan_out: str | None
    saguaro_c: float | None
    backup: str | None
    predict: str | None
    verify: str
    exact: str
    attention: str
    logprobs: int | None
    logprobs_of: str
    trace: str | Path | None
    compile_cache: str | Path
    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int
    enable_prefix_caching: bool | None


def config_of(settings: Mapping[str, Any]) -> Config:
    """A `Config` of keyword arguments, by our names or vLLM's.

    Raises:
      InputError: an unknown name, one that is given twice, or a bad value.
    """
    check_names(settings, {*(field.name for field in dataclasses.fields(Config)), *VLLM})
    return Config(**by_our_names(settings))


def by_our_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by our names alone.

    Raises:
      InputError: one that is given by both names.
    """
    for theirs, ours in VLLM.items():
        if theirs in settings and ours in settings:
            raise InputError(f"{theirs} and {ours} are two names of one setting; give one")
    return {VLLM.get(name, name): value for name, value in settings.items()}
