"""The one verification of all targets, and the choice of its implementation."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ssd_jax.compat import why_no_clusters
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.kernels.threshold import Search, threshold
from ssd_jax.kernels.verify.cpu import thresholds
from ssd_jax.kernels.verify.positions import (
    NO_TOKEN,
    Judges,
    Law,
    Outcome,
    Positions,
    SamplingParts,
)
from ssd_jax.kernels.verify.reference import verify_reference
from ssd_jax.kernels.verify.row_kernels import RowKernels, probabilities_by, verify_by
from ssd_jax.kernels.verify.xla import at_once, decided
from ssd_jax.kernels.verify.xla import probabilities as probabilities_xla

BACKENDS = ("reference", "xla", "cpu", "pallas_tpu", "pallas_gpu")
_ROW_KERNELS = ("pallas_tpu", "pallas_gpu")
"""Modules of kernels that measure rows and draw from them."""


def backend_for(platform: str, vocab: int, device: Any, devices: int = 1) -> str:
    """The `backend` for `verify` that a platform has: its own kernel where there is one, or XLA's.

    Args:
      platform: JAX's name of the platform.
      vocab: number of logits of a position.
      device: of JAX, one of those that share a model.
      devices: number of those devices.
    """
    names = "cpu", *_ROW_KERNELS
    usable = (name for name in names if why_not(name, platform, vocab, device, devices) is None)
    return next(usable, "xla")


def why_not(name: str, platform: str, vocab: int, device: Any, devices: int = 1) -> str | None:
    """Why a kernel does not verify, in one line; None if it does. Arguments as in `backend_for`."""
    platforms = {"cpu": "cpu", "pallas_tpu": "tpu", "pallas_gpu": "gpu"}
    if {"cuda": "gpu"}.get(platform, platform) != platforms[name]:
        return f"it needs a {platforms[name].upper()}, and this is {platform}"
    if devices > 1:
        return f"{devices} devices have parts of the logits, and it needs whole rows"
    if name == "cpu":
        return why_missing()
    if name == "pallas_gpu" and (reason := why_no_clusters()) is not None:
        return reason
    return importlib.import_module(f"ssd_jax.kernels.verify.{name}").why_not(vocab, device)


def choice_line(name: str, platform: str, vocab: int, device: Any, devices: int = 1) -> str:
    """A line for the user: which backend verifies, and why the platform's kernel does not."""
    kernel = next((other for other in _ROW_KERNELS if other.endswith(platform)), None)
    if kernel in (None, name):
        return f"verification is {name}"
    reason = why_not(kernel, platform, vocab, device, devices) or "another was asked for"
    return f"verification is {name}; not {kernel}: {reason}"


def verify(
    positions: Positions,
    law: Law,
    judges: Judges,
    *,
    parts: SamplingParts,
    tokens: int,
    backend: str = "xla",
) -> Outcome:
    """Accepts proposed tokens and draws the bonus token.

    Args:
      positions: all positions; the first of a row follows its pending token.
      parts: of sampling, as far as they are known.
      tokens: number of ids that exist; logits beyond are vocabulary padding.
      backend: one of `BACKENDS`.
    """
    if backend == "reference":
        body = verify_reference
    elif backend in _ROW_KERNELS:
        body = functools.partial(verify_by, _row_kernels(backend))
    elif parts.sampled is None:
        body = functools.partial(decided, search=_search(backend))
    else:
        body = at_once
    outcome, sound = body(positions, law, judges, parts, tokens)
    # Tokens after the first position whose logits give no distribution cannot be accepted, and a
    # bonus token that would come from such a position does not exist.
    rows = judges.is_sampled.shape[0]
    is_checked = positions.path & ~outcome.path[positions.row] == 0
    unsound = (is_checked & ~sound).reshape(rows, -1)
    # The path up to its first unsound row.
    cut = outcome.path & chain_path(jnp.argmax(unsound, axis=1))
    any_unsound = unsound.any(axis=1)
    path = jnp.where(any_unsound, cut, outcome.path)
    bonus = jnp.where(any_unsound, NO_TOKEN, outcome.bonus)
    return Outcome(jax.lax.population_count(path), bonus, path)


def probabilities(
    positions: Positions, law: Law, *, parts: SamplingParts, tokens: int, backend: str = "xla"
) -> Float32[Array, "n V"]:
    """The distributions that `verify` draws from, one-hot in greedy rows."""
    if backend in _ROW_KERNELS:
        return probabilities_by(_row_kernels(backend), positions, law, parts, tokens)
    return probabilities_xla(positions, law, parts, _search(backend))


def _row_kernels(backend: str) -> RowKernels:
    return importlib.import_module(f"ssd_jax.kernels.verify.{backend}").KERNELS


def _search(backend: str) -> Search:
    return thresholds if backend == "cpu" else threshold
