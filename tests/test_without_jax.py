"""What runs on the host alone imports no JAX, and the enumeration not even the package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOST = """
import ssd_jax.speculation.controller, ssd_jax.engine.engine, tests.speculation.enumeration.host
from ssd_jax.config.config import Config
Config(mode='ssd', draft='x', draft_placement='submesh', target_devices='0')
"""
ENUMERATION = """
import tests.speculation.enumeration.flaws, tests.speculation.enumeration.laws
import tests.speculation.enumeration.ssd_flaws
"""


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [(HOST, {"jax"}), (ENUMERATION, {"jax", "ssd_jax"})],
    ids=["engine, controller, settings", "enumeration"],
)
def test_host_modules_import_without_jax(code, unwanted):
    code += f"import sys; sys.exit(', '.join({unwanted!r} & sys.modules.keys()) or None)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
