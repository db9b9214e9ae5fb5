"""Short forms for tests of the law: settings from dicts, histories left empty."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels import distribution
from ssd_jax.sampling import penalties, proposal, verification
from ssd_jax.sampling import probs as law
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import ON_DEVICE

_DEFAULTS = {
    "temperature": (1.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "repetition_penalty": (1.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "presence_penalty": (0.0, np.float32),
    "bias_ids": ((10**9, 10**9), np.int32),
    "bias": ((0.0, 0.0), np.float32),
    "seed": ((0, 0), np.uint32),
    "request": (0, np.uint32),
    "banned": ((-1, -1), np.int32),
    "ban_before": (0, np.int32),
    "bad_word_ids": (np.full((4, MAX_BAD_WORD_TOKENS), -1), np.int32),
}


def words(*sequences: Sequence[int]) -> np.ndarray:
    """`Sampling.bad_word_ids` of a row; up to four words."""
    ids = np.array(_DEFAULTS["bad_word_ids"][0])
    for place, sequence in enumerate(sequences):
        ids[place, -len(sequence) :] = sequence
    return ids


# Tests compile programs often and run them little.
QUICKLY = {"xla_backend_optimization_level": 0}


def rows(*settings: dict) -> Sampling:
    """A `Sampling` of one row per dict; settings that are missing are off.

    Arrays are NumPy's: whatever JAX does outside of a program, it compiles.
    """
    return Sampling(
        **{
            name: np.array([row.get(name, default) for row in settings], dtype)
            for name, (default, dtype) in _DEFAULTS.items()
        }
    )


def repeated(sampling: Sampling, count: int) -> Sampling:
    """Every row so many times."""
    return jax.tree.map(lambda array: np.repeat(array, count, axis=0), sampling)


def point_mass(tokens, length) -> proposal.Proposal:
    """A proposal of given tokens [B, K], each with probability 1."""
    ones = jnp.ones((*tokens.shape, 1), jnp.float32)
    return proposal.Proposal(tokens, length, tokens[:, :, None], ones)


def empty_history(rows: int, vocab: int) -> penalties.History:
    """`penalties.empty`, compiling nothing."""
    return history_of(np.zeros((rows, vocab), bool), np.zeros((rows, vocab), np.int32))


def history_of(prompt, output, recent=()) -> penalties.History:
    """Histories of rows whose outputs end with `recent` [B, n]."""
    last = np.full((len(prompt), MAX_BAD_WORD_TOKENS - 1), -1, np.int32)
    for row, tokens in zip(last, recent, strict=False):
        row[len(row) - len(tokens) :] = tokens
    return penalties.History(prompt, output, last)


@functools.partial(jax.jit, static_argnums=3, compiler_options=QUICKLY)
def probs(logits, sampling, positions, tokens):
    """The law of rows that have said nothing yet."""
    allowed = law.allowed_logits(
        logits, sampling, positions, lambda: penalties.empty(*logits.shape), tokens
    )
    return distribution.probs(allowed, sampling)


@functools.partial(jax.jit, static_argnames=("tokens", "rule", "parts"), compiler_options=QUICKLY)
def verify(
    logits,
    proposed,
    sampling,
    start,
    history,
    *,
    tokens,
    rule="ratio",
    parts=ON_DEVICE,
    parents=None,
):
    """`verification.verify`, compiled."""
    law = {"tokens": tokens, "rule": rule, "parts": parts, "parents": parents}
    return verification.verify(logits, proposed, sampling, start, history, **law)


@functools.partial(jax.jit, static_argnames=("tokens", "rule"), compiler_options=QUICKLY)
def greedy_and_sampled(logits, sampling, start, *, tokens, rule="ratio"):
    """Tokens drawn without proposals."""
    history = penalties.empty(*logits.shape)
    nothing = proposal.blank(logits.shape[0], 0, 1)
    return verification.verify(
        jnp.asarray(logits)[:, None], nothing, sampling, start, history, tokens=tokens, rule=rule
    ).bonus
