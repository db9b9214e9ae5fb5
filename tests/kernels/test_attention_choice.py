"""Which backend computes attention, and what is said of it."""

import subprocess
import sys

import pytest

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
    ],
)
def test_what_is_asked_for_by_name_never_falls_back(platform, devices, asked, message):
    with pytest.raises(InputError, match=message):
        api.backend(platform, devices=devices, asked=asked)


def test_a_line_says_what_was_chosen_and_why_not_others():
    assert api.choice_line("pallas_tpu", "tpu") == (
        "attention is pallas_tpu; not cpu: it needs a processor, and JAX has the platform tpu"
    )
    assert api.choice_line("xla_static", "tpu").endswith("; not pallas_tpu: another was asked for")


def test_processors_do_not_import_pallas():
    script = "import sys, ssd_jax.llm; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
