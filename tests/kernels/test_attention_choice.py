"""Which backend computes attention, and what is said of it."""

import subprocess
import sys
import types

import jax
import pytest

from ssd_jax import compat
from ssd_jax.errors import InputError
from ssd_jax.kernels.tree_attention import api


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(api, "why_missing", lambda: None)


@pytest.mark.parametrize(
    ("platform", "devices", "asked", "chosen"),
    [
        ("cpu", 1, "auto", "cpu"),
        ("cpu", 2, "auto", "xla"),
        ("tpu", 1, "auto", "pallas_tpu"),
        ("tpu", 4, "pallas_tpu", "pallas_tpu"),
        ("tpu", 4, "xla", "xla_static"),
        ("cuda", 1, "auto", "xla_static"),
        ("cpu", 1, "xla", "xla"),
    ],
)
def test_the_platform_and_the_user_choose(platform, devices, asked, chosen):
    assert api.backend(platform, devices=devices, asked=asked) == chosen


@pytest.mark.parametrize(
    ("platform", "devices", "asked", "message"),
    [
        ("cpu", 1, "pallas_tpu", "it needs a TPU, and JAX has the platform cpu"),
        ("cuda", 1, "pallas_tpu", "it needs a TPU, and JAX has the platform cuda"),
        ("tpu", 1, "cpu", "it needs a processor, and JAX has the platform tpu"),
        ("cpu", 4, "cpu", "it runs on one device, not 4"),
        ("cpu", 1, "pallas_gpu", "it needs a GPU, and JAX has the platform cpu"),
        ("gpu", 2, "pallas_gpu", "it runs on one device, not 2"),
    ],
)
def test_what_is_asked_for_by_name_never_falls_back(platform, devices, asked, message):
    with pytest.raises(InputError, match=message):
        api.backend(platform, devices=devices, asked=asked)


def test_a_kernel_that_no_gpu_has_run_is_taken_by_name_alone(monkeypatch):
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: None)
    assert api.backend("gpu") == "xla_static"
    assert api.backend("gpu", asked="pallas_gpu") == "pallas_gpu"
    assert "not pallas_gpu: no GPU has run it; --atten" in api.choice_line("xla_static", "gpu")
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: "it needs JAX 0.12")
    with pytest.raises(InputError, match="attention = 'pallas_gpu' is not possible: it needs JAX"):
        api.backend("gpu", asked="pallas_gpu")
    assert "not pallas_gpu: it needs JAX 0.12" in api.choice_line("xla_static", "gpu")


@pytest.mark.skipif(compat.why_no_mosaic_gpu() is not None, reason="JAX before 0.12")
def test_a_model_or_gpu_that_the_kernel_lacks_is_refused():
    hopper, ada = (types.SimpleNamespace(compute_capability=c) for c in ("9.0", "8.9"))

    def check(head_dim, dtype, device, size=128):
        page = jax.ShapeDtypeStruct((1, 1, size, 2 * head_dim), dtype)
        api.check_pages("pallas_gpu", head_dim, page, device)

    check(128, "bfloat16", hopper)
    with pytest.raises(InputError, match=r"capability 8\.9: it needs 9\.0"):
        check(128, "bfloat16", ada)
    with pytest.raises(InputError, match=r"head_dim = 80 .*: it needs 64 or 128"):
        check(80, "bfloat16", hopper)
    with pytest.raises(InputError, match="pages of float32: it needs bfloat16; give xla"):
        check(64, "float32", hopper)
    with pytest.raises(InputError, match="page_size = 48: it needs a multiple of 64"):
        check(64, "bfloat16", hopper, 48)


def test_a_line_says_what_was_chosen_and_why_not_others():
    assert api.choice_line("pallas_tpu", "tpu") == (
        "attention is pallas_tpu; not cpu: it needs a processor, and JAX has the platform tpu"
    )
    assert api.choice_line("xla_static", "tpu").endswith("; not pallas_tpu: another was asked for")


@pytest.mark.more
def test_processors_do_not_import_pallas():
    script = "import sys, ssd_jax.llm; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
