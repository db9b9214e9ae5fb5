"""Bad words: sequences of tokens of which the last is impossible right after the others."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.sampling.outputs import Outputs, columns_of
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.settings import Sampling


def completions(sampling: Sampling, history: History) -> Int32[Array, "B words"]:
    """The token that would complete each bad word now; -1 where none would.

    A word of one token is always complete with it. Words begin in the output: the prompt's tokens
    complete none.
    """
    prefix, last = sampling.bad_word_ids[..., :-1], sampling.bad_word_ids[..., -1]
    matches = jnp.all((prefix < 0) | (prefix == history.recent[:, None]), axis=-1)
    return jnp.where(matches, last, -1)


def have_any(sampling: Sampling) -> Bool[Array, "B"]:
    """Whether rows have bad words."""
    return jnp.any(sampling.bad_word_ids[..., -1] >= 0, axis=-1)


def ban(
    logits: Float32[Array, "B V"], sampling: Sampling, history: History, outputs: Outputs = None
) -> Float32[Array, "B V"]:
    """-inf at the tokens that would complete a bad word.

    With `outputs`, logits have columns for these ids only.
    """
    ids = completions(sampling, history)
    if outputs is None:
        columns = jnp.where(ids < 0, logits.shape[1], ids)
    else:
        columns = columns_of(outputs, ids)
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")
