"""The C++ under sanitizers, and compiled for processors that have less than this one."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_jax.kernels.handlers import why_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler"),
]

TESTS = ("tests/kernels/test_linear.py", "tests/kernels/test_compiled_attention.py")
SANITIZED = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
LESS = ("skylake-avx512", "haswell", "x86-64-v2")


def run(flags, **environment):
    command = [sys.executable, "-m", "tests.kernels.run_compiled", flags, *TESTS]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


def test_no_bad_address_and_nothing_undefined():
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    libraries = [one.stdout.strip() for one in found]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("g++ has no sanitizers here")
    # jaxlib's own memory is not freed at exit.
    run(SANITIZED, LD_PRELOAD=" ".join(libraries), ASAN_OPTIONS="detect_leaks=0")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of other processors")
@pytest.mark.parametrize("processor", LESS)
def test_processors_that_have_less(processor):
    run(f"-march={processor}")
