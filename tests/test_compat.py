"""XLA's option against wrong sums, and the program that finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

from ssd_jax import LLM, compat
from ssd_jax.errors import SsdError
from ssd_jax.placement.process import loading
from ssd_jax.system.sums import check_sums

OPTION = "--xla_cpu_experimental_ynn_fusion_type"
PRODUCTS = f"{OPTION}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
needed = pytest.mark.skipif(version("jaxlib") != "0.10.2", reason="this version sums rightly")


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (None, PRODUCTS),
        ("", PRODUCTS),
        ("--xla_dump_to=/tmp/x", f"--xla_dump_to=/tmp/x {PRODUCTS}"),
        (f"{OPTION}=", f"{OPTION}="),
        ("/a/file/of/flags", "/a/file/of/flags"),
    ],
)
def test_the_xla_option_is_added_to_the_users_flags(monkeypatch, given, becomes):
    monkeypatch.setattr(compat, "jax_has_started", lambda: False)
    monkeypatch.setattr(jaxlib.version, "__version__", "0.10.2")
    if given is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", given)
    compat.avoid_wrong_sums()
    compat.avoid_wrong_sums()
    assert os.environ["XLA_FLAGS"] == becomes


def test_other_versions_and_a_jax_that_has_started_are_left_alone(monkeypatch):
    assert jax.devices()  # with the flags of tests/conftest.py
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jaxlib.version, "__version__", "0.10.2")
    compat.avoid_wrong_sums()  # what it set now would be in the cache's keys, and not hold
    monkeypatch.setattr(compat, "jax_has_started", lambda: False)
    monkeypatch.setattr(jaxlib.version, "__version__", "0.12.0.1")
    compat.avoid_wrong_sums()
    assert os.environ["XLA_FLAGS"] == ""


def test_jax_sums_rightly_in_this_process():
    check_sums.__wrapped__()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_long_products_do_not_depend_on_how_many_there_are(dtype):
    """Bitwise exactness rests on it; without its library for products XLA fails here."""
    if not compat.widths_can_agree(dtype):
        pytest.skip("this JAX promises it for bfloat16 alone")
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(17, 1536)), dtype)
    weights = jnp.asarray(rng.normal(size=(576, 1536)), dtype)
    product = jax.jit(lambda rows: jnp.dot(rows, weights.T, preferred_element_type=jnp.float32))
    assert np.array_equal(product(rows)[:3], product(rows[:3]))


@pytest.mark.more
@needed
def test_jax_that_was_imported_before_sums_rightly_and_one_that_has_started_is_refused():
    """JAX was imported first in both; in one it has also looked at its devices."""
    check = (
        "from ssd_jax.errors import SsdError\n"
        "from ssd_jax.system.sums import check_sums\n"
        "try: check_sums(); print('right')\n"
        "except SsdError as error: print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def stdout_of(source: str) -> str:
        command = [sys.executable, "-c", source]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert stdout_of("import jax\nimport ssd_jax.compat\n" + check) == "right\n"
    line = stdout_of("import jax\njax.devices()\nimport ssd_jax.compat\n" + check)
    assert "computes wrong sums" in line
    assert f"set XLA_FLAGS={PRODUCTS} " in line


def test_a_wrong_sum_is_refused_before_weights_load_here_and_in_a_worker(
    monkeypatch, tiny_checkpoint
):
    monkeypatch.setattr(np, "array_equal", lambda *_: False)
    monkeypatch.setattr(
        "ssd_jax.devices.opening.models.load_parameters",
        lambda *_args, **_kw: pytest.fail("loaded"),
    )
    check_sums.cache_clear()
    with pytest.raises(SsdError, match="wrong sums"):
        LLM(str(tiny_checkpoint), dtype="float32", compile_cache="off")
    with pytest.raises(SsdError, match="wrong sums"):
        loading.load_sessions(None, type("Resources", (), {"store": None}))
