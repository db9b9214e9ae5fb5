"""Errors of programs on a device."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ssd_jax.devices
from ssd_jax.devices.programs import device
from ssd_jax.errors import DeviceError

ROLES = ("target/target", "draft/drafter", "branches/draft")


def test_a_buffer_that_was_given_away_is_an_error_of_the_device():
    taken = jnp.arange(3)
    taken.delete()
    with pytest.raises(DeviceError, match="deleted") as caught:
        device.run(jax.jit(lambda x: x + 1), taken)
    assert isinstance(caught.value.__cause__, (RuntimeError, ValueError))
    with pytest.raises(DeviceError, match="deleted"):
        device.read(taken)


@pytest.mark.parametrize("role", ROLES)
def test_roles_run_their_programs_and_read_their_results_through_it(role):
    """A program that fails anywhere else would be taken for an error of the host, and run again."""
    source = (Path(ssd_jax.devices.__path__[0]) / f"{role}.py").read_text()
    assert "device.run(" in source
    assert not re.search(r"(programs|_base)\[[^\]]*\]\(|\.prefill\(\n? *self\._param", source)
    assert not re.search(r"\bnp\.asarray\(self\._", source)
