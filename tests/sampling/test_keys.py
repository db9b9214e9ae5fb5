"""Randomness depends on (key, token id) alone, and never changes between versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import noise
from ssd_jax.sampling import keys
from ssd_jax.sampling.keys import Purpose


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # known answers published with the Random123 library
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers(key, counter, expected):
    as_words = [tuple(jnp.uint32(word) for word in pair) for pair in (key, counter)]
    assert tuple(int(word) for word in noise.threefry(*as_words)) == expected


def _derive(seed=7, request=0, start=3, position=4, purpose=Purpose.BONUS):
    return keys.derive(
        jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32),
        jnp.array([request], jnp.uint32),
        jnp.array([start], jnp.int32),
        jnp.array([position], jnp.int32),
        purpose,
    )


def test_every_part_of_a_key_matters():
    variants = [
        _derive(),
        _derive(seed=8),
        _derive(seed=7 + 2**32),
        _derive(request=1),
        _derive(start=4),
        _derive(position=5),
        _derive(purpose=Purpose.ACCEPT),
    ]
    assert len({(int(a[0]), int(b[0])) for a, b in variants}) == len(variants)


def test_start_and_position_do_not_commute():
    assert int(_derive(start=4, position=3)[0][0]) != int(_derive(start=3, position=4)[0][0])


def test_noise_of_a_token_does_not_depend_on_the_array_length():
    short, long = keys.gumbel(_derive(), 10), keys.gumbel(_derive(), 151_936)
    np.testing.assert_array_equal(short, long[:, :10])


# Computed in float64 by an independent implementation of the same definition.
GOLDEN_NOISE = {0: 1.07752591, 1: 0.65141381, 2: -0.15043228, 49_151: 1.08436876}


def test_a_key_is_worked_out_once_a_row():
    """Fused into the loop over all ids it costs 40 rounds an id, and LLVM looks at what depends on
    the row alone for longer than anyone waits (jaxlib 0.12 on CPU, some shapes)."""

    def noise(start):
        words = jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.uint32)
        return keys.gumbel(keys.derive(*words, start, start, Purpose.TOKEN), 320)

    program = jax.jit(noise).lower(jnp.zeros(2, jnp.int32)).as_text()
    assert "optimization_barrier" in program
    lines = [line for line in program.splitlines() if "func.func" not in line]
    places = [number for number, line in enumerate(lines) if "tensor<2x320x" in line]
    assert min(places) > next(n for n, line in enumerate(lines) if "optimization_barrier" in line)


def test_noise_is_golden():
    noise = np.asarray(keys.gumbel(_derive(seed=123, request=5, start=17, position=18), 49_152))[0]
    for token, expected in GOLDEN_NOISE.items():
        np.testing.assert_allclose(noise[token], expected, rtol=1e-5)


def test_noise_is_standard_gumbel():
    noise = np.asarray(keys.gumbel(_derive(), 400_000), np.float64)[0]
    assert np.isfinite(noise).all()
    # Mean, variance and tail of a standard Gumbel; tolerances are 6 standard errors.
    n = noise.size
    assert abs(noise.mean() - np.euler_gamma) < 6 * np.pi / np.sqrt(6 * n)
    assert abs(noise.var() - np.pi**2 / 6) < 6 * np.sqrt(4.4 * (np.pi**2 / 6) ** 2 / n)
    for level in (-1.0, 0.0, 2.0, 6.0):
        expected = np.exp(-np.exp(-level))
        error = np.sqrt(expected * (1 - expected) / n)
        assert abs((noise <= level).mean() - expected) < 6 * error


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_no_bits_give_zero_or_one(bits):
    """Whose logarithms are not finite."""
    assert 0 < float(noise.unit(jnp.uint32(bits), jnp.uint32(bits))) < 1


WIDE = 40_000


def _weights(count):
    """A law over many ids that keeps every so-manieth one."""
    law = np.random.default_rng(count).gamma(0.1, size=(6, WIDE)).astype(np.float32)
    return np.where(np.arange(WIDE) % (WIDE // count) == 0, law + 1e-6, 0)


@pytest.mark.parametrize("count", [1, 40, 2000, WIDE])
def test_the_token_drawn_from_a_truncated_law_is_that_of_the_noise_of_all_ids(count):
    weights = jnp.asarray(_weights(count))
    rows = [_derive(request=row) for row in range(6)]
    key = tuple(jnp.concatenate(words) for words in zip(*rows, strict=True))
    expected = jnp.argmax(jnp.log(weights) + keys.gumbel(key, WIDE), axis=-1)
    np.testing.assert_array_equal(noise.gumbel_max(weights, key), expected)
    assert np.unique(expected).size > (count > 1)


def test_ties_between_equal_scores_go_to_the_lowest_id():
    weights = jnp.zeros((1, WIDE)).at[0, jnp.array([39_000, 150])].set(jnp.inf)
    assert noise.gumbel_max(weights, _derive()).tolist() == [150]
