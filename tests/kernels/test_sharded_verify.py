"""Devices that share the vocabulary accept and draw the tokens that one device does."""

from __future__ import annotations

import functools

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS, mesh_of
from ssd_jax.sampling import verification
from ssd_jax.sampling.variants import ON_DEVICE, VARIANTS
from tests.kernels.verify_cases import KINDS, arguments, outcomes, verify
from tests.sampling.rows import QUICKLY

WIDTH, ROWS = 3, 4
PROGRAMS = {"decided": ON_DEVICE, "at once": VARIANTS["full"]}
kinds_of_rows = st.lists(st.sampled_from(KINDS), min_size=WIDTH * ROWS, max_size=WIDTH * ROWS)


@functools.cache
def compiled(devices: int, tokens: int, rule: str, program: str):
    """`verify` of logits of which each device has some columns, as programs of a mesh have them."""
    mesh = mesh_of(jax.devices()[:devices])
    law = {"tokens": tokens, "rule": rule, "parts": PROGRAMS[program], "backend": "xla"}
    replicated = PartitionSpec()
    per_group = jax.shard_map(
        functools.partial(verification.verify, **law),
        mesh=mesh,
        in_specs=replicated,
        out_specs=replicated,
        axis_names={DATA_AXIS},
        check_vma=False,
    )
    columns = NamedSharding(mesh, PartitionSpec(None, None, TENSOR_AXIS))
    jitted = jax.jit(per_group, compiler_options=QUICKLY)
    return lambda logits, *others: jitted(jax.device_put(logits, columns), *others)


def assert_tokens_are_those_of_one_device(case, devices, tokens, rule, program):
    law = {"tokens": tokens, "rule": rule, "parts": PROGRAMS[program]}
    expected = outcomes(verify(*case, backend="xla", **law))
    assert outcomes(compiled(devices, tokens, rule, program)(*case)) == expected


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        ("at once", "ratio"),
        pytest.param("at once", "coupled", marks=pytest.mark.more),
        pytest.param("decided", "ratio", marks=pytest.mark.more),
    ],
)
@settings(max_examples=25, deadline=None)
@given(kinds_of_rows, st.integers(0, 10**6))
def test_tokens_are_those_of_one_device(program, rule, kinds, seed):
    case = arguments(kinds, 132, seed, width=WIDTH)
    assert_tokens_are_those_of_one_device(case, 4, 127, rule, program)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("vocab", [49_152, 128_256, 151_936])
def test_tokens_of_real_vocabularies_are_those_of_one_device(vocab, program):
    kinds = [kind for kind in KINDS for _ in range(2)]
    case = arguments(kinds, vocab, vocab, width=2, support=64)
    assert_tokens_are_those_of_one_device(case, 8, vocab - 5, "ratio", program)
