"""What differs between platforms."""

import jax.numpy as jnp
import pytest

from ssd_jax.models.execution import Execution


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [
        (0, []),
        (1, [32]),
        (32, [32]),
        (33, [32, 32]),
        (64, [32, 32]),
        (65, [128]),
        (128, [128]),
        (129, [128, 32]),
        (200, [128, 128]),
        (300, [128, 128, 32, 32]),
    ],
)
def test_a_prompt_takes_no_program_that_is_half_empty(tokens, widths):
    dtype = jnp.dtype(jnp.float32)
    execution = Execution(compute=dtype, pages=dtype, prefill_chunks=(32, 128))
    assert [*execution.chunk_sizes(tokens)] == widths
