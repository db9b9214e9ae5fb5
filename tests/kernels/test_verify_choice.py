"""Which backend verifies, and what a user is told of it."""

import types

import pytest

from ssd_jax.devices.opening.models import execution_for
from ssd_jax.kernels.verify import api, pallas_gpu

HOPPER, BLACKWELL, AMPERE = (
    types.SimpleNamespace(device_kind="", compute_capability=capability)
    for capability in ("9.0", "10.0", "8.0")
)
TPU = types.SimpleNamespace(device_kind="TPU v5e")


@pytest.fixture
def clusters(monkeypatch):
    monkeypatch.setattr(api, "why_no_clusters", lambda: None)


def test_gpus_without_clusters_and_rows_that_do_not_fit_are_named():
    assert pallas_gpu.why_not(128_256, HOPPER) is pallas_gpu.why_not(262_144, BLACKWELL) is None
    assert pallas_gpu.why_not(128_256, AMPERE) == (
        "a device of compute capability 8.0: it needs 9.0 (H100, H200), 10.0 or 10.3 (B200)"
    )
    too_long = pallas_gpu.why_not(500_000, HOPPER)
    assert too_long == "rows of 500000 tokens: it needs 248 KiB of 200 for a part"


@pytest.mark.usefixtures("clusters")
def test_a_platforms_kernel_verifies_where_rows_are_on_one_device():
    assert api.backend_for("gpu", 128_256, HOPPER) == "pallas_gpu"
    assert api.backend_for("gpu", 128_256, AMPERE) == "xla"
    assert api.backend_for("tpu", 128_256, TPU) == "pallas_tpu"
    for platform, device in (("gpu", HOPPER), ("tpu", TPU), ("cpu", TPU)):
        assert api.backend_for(platform, 128_256, device, devices=8) == "xla"


def test_kernels_wait_for_a_version_of_jax_that_has_clusters(monkeypatch):
    monkeypatch.setattr(api, "why_no_clusters", lambda: "it needs JAX 0.12")
    assert api.backend_for("gpu", 128_256, HOPPER) == "xla"
    line = api.choice_line("xla", "gpu", 128_256, HOPPER)
    assert line == "verification is xla; not pallas_gpu: it needs JAX 0.12"


@pytest.mark.usefixtures("clusters")
def test_a_line_says_what_verifies_and_why_not_the_kernel():
    assert api.choice_line("pallas_gpu", "gpu", 128_256, HOPPER) == "verification is pallas_gpu"
    assert api.choice_line("xla", "gpu", 128_256, HOPPER, 8) == (
        "verification is xla; not pallas_gpu: 8 devices have parts of the logits, and it needs "
        "whole rows"
    )
    assert api.choice_line("xla", "tpu", 128_256, TPU).endswith("another was asked for")


@pytest.mark.usefixtures("clusters")
def test_plain_xla_for_attention_has_it_for_verification_too():
    place = {"device": HOPPER, "vocab": 128_256}
    assert execution_for("gpu", "bfloat16", 128, **place).verify == "pallas_gpu"
    assert execution_for("gpu", "bfloat16", 128, **place, attention="xla").verify == "xla"
