"""Shapes that signatures say: a call with others fails in tests, and nowhere else."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation

from ssd_jax.kernels.linear.quantized import Quantized, quantize, take
from ssd_jax.sampling import keys
from ssd_jax.sampling.probs import likeliest_probs
from tests.sampling.rows import rows

SEEDS, REQUESTS = jnp.zeros((2, 2), jnp.uint32), jnp.zeros(3, jnp.uint32)
PLACES = jnp.zeros(2, jnp.int32)
WEIGHT = Quantized(jnp.ones((4, 3), jnp.int8), jnp.ones(4))


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize(jnp.ones(3)),
        lambda: take(WEIGHT, jnp.ones(2)),
        lambda: take(WEIGHT._replace(scales=jnp.ones(5)), PLACES),
        lambda: keys.derive(SEEDS, REQUESTS, PLACES, PLACES, keys.Purpose.DRAFT),
        lambda: likeliest_probs(jnp.ones((2, 8)), 2, jax.tree.map(jnp.asarray, rows({}, {}, {}))),
    ],
    ids=["rank", "type", "within an argument", "between arguments", "and fields of another"],
)
def test_an_array_of_another_shape_or_type_is_refused(call):
    with pytest.raises(BeartypeCallHintViolation):
        call()


def test_sizes_that_agree_are_taken():
    assert take(WEIGHT, PLACES).shape == (2, 3)


def test_the_module_that_users_import_checks_nothing():
    """Its functions are the plain ones, and their signatures are text."""
    spec = importlib.util.spec_from_file_location("as_users_import_it", keys.__file__)
    assert spec is not None
    assert spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    assert hasattr(keys.derive, "__wrapped__")
    assert not hasattr(plain.derive, "__wrapped__")
    assert isinstance(plain.derive.__annotations__["seed"], str)
