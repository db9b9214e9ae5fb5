"""The demo runs what the processor is good at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ssd_jax.tools.demo import settings
from ssd_jax.tools.demo.settings import fitting_dtype, has_amx


@pytest.mark.parametrize(
    ("platform", "amx", "native", "dtype"),
    [
        ("cpu", False, True, "native"),
        ("cpu", True, True, "bfloat16"),
        ("cpu", False, False, "bfloat16"),
        ("gpu", False, True, "bfloat16"),
    ],
)
def test_without_amx_a_processor_takes_the_weights_as_they_are_stored(
    platform, amx, native, dtype, monkeypatch
):
    monkeypatch.setattr(settings, "has_amx", lambda: amx)
    monkeypatch.setattr(settings, "has_native", lambda tensors: native)
    assert fitting_dtype(SimpleNamespace(tensors=None), platform) == dtype


def test_amx_is_a_flag_of_the_processor(tmp_path):
    info = tmp_path / "cpuinfo"
    assert not has_amx(info)
    info.write_text("model name : x\nflags : fpu avx2 avx512_bf16\n")
    assert not has_amx(info)
    info.write_text("flags : fpu amx_bf16 amx_tile\n")
    assert has_amx(info)
