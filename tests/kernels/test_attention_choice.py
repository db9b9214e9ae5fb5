"""Which backend computes attention, and what is said of it."""

import re
import subprocess
import sys
import types

import pytest

from ssd_jax import compat
from ssd_jax.devices.opening.models import execution_for, why_unread
from ssd_jax.errors import InputError
from ssd_jax.kernels.tree_attention import api


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(api, "why_missing", lambda: None)


@pytest.mark.parametrize(
    ("platform", "devices", "asked", "found"),
    [
        ("cpu", 1, "auto", ["cpu", "xla"]),
        ("cpu", 2, "auto", ["xla"]),
        ("tpu", 1, "auto", ["pallas_tpu", "xla_static"]),
        ("tpu", 4, "pallas_tpu", ["pallas_tpu"]),
        ("tpu", 4, "xla", ["xla_static"]),
        ("cuda", 1, "xla", ["xla_static"]),
        ("cpu", 1, "xla", ["xla"]),
    ],
)
def test_the_platform_and_the_user_choose(platform, devices, asked, found):
    assert api.backends(platform, devices=devices, requested=asked) == found


@pytest.mark.parametrize(
    ("platform", "devices", "asked", "message"),
    [
        ("cpu", 1, "pallas_tpu", "it needs a TPU, and JAX has the platform cpu"),
        ("cuda", 1, "pallas_tpu", "it needs a TPU, and JAX has the platform cuda"),
        ("tpu", 1, "cpu", "it needs a processor, and JAX has the platform tpu"),
        ("cpu", 4, "cpu", "it runs on one device, not 4"),
        ("cpu", 1, "pallas_gpu", "it needs a GPU, and JAX has the platform cpu"),
        ("tpu", 1, "pallas_mma", "it needs a GPU, and JAX has the platform tpu"),
    ],
)
def test_what_is_asked_for_by_name_never_falls_back(platform, devices, asked, message):
    with pytest.raises(InputError, match=message):
        api.backends(platform, devices=devices, requested=asked)


def test_a_gpu_has_its_kernel_where_jax_compiles_it(monkeypatch):
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: None)
    assert api.backends("gpu") == ["pallas_gpu", "pallas_mma", "xla_static"]
    assert api.backends("gpu", requested="xla") == ["xla_static"]
    assert "not pallas_gpu: another was asked for" in api.choice_line("xla_static", "gpu")
    assert "not pallas_gpu: another was asked for" in api.choice_line("pallas_mma", "gpu")
    assert "not pallas_mma: pallas_gpu is preferred" in api.choice_line("pallas_gpu", "gpu")
    line = api.choice_line("xla_static", "gpu", unsupported={"pallas_mma": "head_dim = 80"})
    assert line.endswith("not pallas_mma: head_dim = 80")
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: "it needs JAX 0.11")
    assert api.backends("gpu") == ["xla_static"]
    with pytest.raises(InputError, match="attention = 'pallas_gpu' is not possible: it needs JAX"):
        api.backends("gpu", requested="pallas_gpu")
    assert "not pallas_gpu: it needs JAX 0.11" in api.choice_line("xla_static", "gpu")


HOPPER, ADA, TURING = (
    types.SimpleNamespace(device_kind="", compute_capability=capability)
    for capability in ("9.0", "8.9", "7.5")
)


@pytest.mark.parametrize(
    ("device", "head_dim", "dtype", "chosen", "reason"),
    [
        (HOPPER, 128, "bfloat16", "pallas_gpu", None),
        (HOPPER, 64, "int8", "pallas_gpu", None),
        (HOPPER, 256, "bfloat16", "pallas_gpu", None),
        (ADA, 128, "bfloat16", "pallas_mma", r"capability 8\.9: it needs 9\.0"),
        (TURING, 128, "bfloat16", "xla_static", r"capability 7\.5: it needs 9\.0"),
        (HOPPER, 80, "bfloat16", "xla_static", r"head_dim = 80 .*: it needs 64, 128 or 256"),
        (ADA, 64, "float32", "xla_static", r"capability 8\.9: it needs 9\.0"),
        (HOPPER, 64, "float32", "xla_static", "pages of float32: it needs bfloat16"),
    ],
)
def test_a_model_or_gpu_that_the_kernels_lack_has_attention_by_xla(
    device, head_dim, dtype, chosen, reason, monkeypatch
):
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: None)
    execution = execution_for("gpu", dtype, head_dim, device=device)
    assert execution.attention == chosen
    found = why_unread(execution, head_dim, device, attention="pallas_gpu")
    assert found is None if reason is None else re.search(reason, found)
    named = execution_for("gpu", dtype, head_dim, device=device, attention="pallas_gpu")
    assert named.attention == "pallas_gpu"  # which is refused, where it is checked
    assert why_unread(named, head_dim, device) == found


def test_pages_of_a_size_that_the_kernel_lacks_have_attention_by_xla(monkeypatch):
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: None)
    there = {"device": HOPPER, "page_size": 48}
    assert execution_for("gpu", "bfloat16", 64, **there).attention == "xla_static"
    named = execution_for("gpu", "bfloat16", 64, **there, attention="pallas_gpu")
    assert "page_size = 48: it needs" in why_unread(named, 64, HOPPER, size=48)


def test_a_line_says_what_was_chosen_and_why_not_others():
    assert api.choice_line("pallas_tpu", "tpu") == (
        "attention is pallas_tpu; not cpu: it needs a processor, and JAX has the platform tpu; "
        "not pallas_gpu: it needs a GPU, and JAX has the platform tpu; "
        "not pallas_mma: it needs a GPU, and JAX has the platform tpu"
    )
    assert "; not pallas_tpu: another was asked for;" in api.choice_line("xla_static", "tpu")


@pytest.mark.more
def test_processors_do_not_import_pallas():
    script = "import sys, ssd_jax.llm.llm; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
