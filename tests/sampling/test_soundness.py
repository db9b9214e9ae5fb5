"""How it is found that logits are numbers: the same in one pass with the best as apart."""

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels.rows import argmax
from ssd_jax.kernels.soundness import _in_one_pass, sound, sound_of

TOKENS = 5
INF, NAN = np.inf, np.nan
ROWS = np.array(
    [
        [0.0, 3.0, 3.0, -1.0, 2.0, 9.0],
        [-INF, -INF, -7.0, -INF, -INF, NAN],
        [3e38, -3e38, 0.0, 0.0, 0.0, INF],
        [0.0, NAN, 3.0, 0.0, 0.0, 0.0],
        [NAN, NAN, NAN, NAN, NAN, 0.0],
        [0.0, 5.0, INF, 0.0, 0.0, 0.0],
        [-INF, INF, 0.0, 0.0, 0.0, 0.0],
        [-INF, -INF, -INF, -INF, -INF, 0.0],
    ],
    np.float32,
)
SOUND = np.arange(len(ROWS)) < 3


def test_numbers_are_sound_and_infinities_are_not_but_for_some_that_are_impossible():
    np.testing.assert_array_equal(sound(ROWS, TOKENS), SOUND)
    for looked_at in (SOUND, ~SOUND):
        found = sound_of(looked_at, ROWS, TOKENS)
        np.testing.assert_array_equal(found, SOUND | ~looked_at)


def test_the_pass_that_finds_the_best_finds_the_same():
    allowed = jnp.where(jnp.arange(ROWS.shape[1]) < TOKENS, ROWS, -jnp.inf)
    best, found = jax.jit(_in_one_pass)(allowed, ROWS)
    np.testing.assert_array_equal(found, SOUND)
    np.testing.assert_array_equal(best[SOUND], argmax(allowed)[SOUND])
