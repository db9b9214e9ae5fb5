"""The C++ under sanitizers, and compiled for processors that have less than this one."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ssd_jax.kernels import handlers
from tests.kernels.processor import flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(handlers.why_missing() is not None, reason="no C++ compiler"),
]

TESTS = (
    "tests/kernels/test_linear.py",
    "tests/kernels/test_packed_experts.py",
    "tests/kernels/test_compiled_attention.py",
)
SANITIZED = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
CLANG = shutil.which("clang++")

only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of its processors")
AVX512 = pytest.param(
    "-march=skylake-avx512",
    marks=[only_x86, pytest.mark.skipif("avx512vl" not in flags(), reason="no AVX-512")],
)
LESS = (AVX512, "-march=haswell", "-march=x86-64-v2", "-march=x86-64-v3 -mtune=znver3")


def run(options, **environment):
    command = [sys.executable, "-m", "tests.kernels.run_compiled", options, *TESTS]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("processor", ["", AVX512])
def test_no_bad_address_and_nothing_undefined(processor):
    """With tiles, where there are some, and without."""
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    libraries = [one.stdout.strip() for one in found]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("g++ has no sanitizers here")
    # jaxlib's own memory is not freed at exit.
    run(f"{SANITIZED} {processor}", LD_PRELOAD=" ".join(libraries), ASAN_OPTIONS="detect_leaks=0")


def test_threads_run_every_part_of_a_loop_once(tmp_path):
    """Under the thread sanitizer, which sees a race whether or not it does harm."""
    here, kernels = Path(__file__).parent, Path(handlers.__file__).parent
    headers = f"-isystem{jax.ffi.include_dir()}", f"-I{kernels}"
    flags = ["-std=c++17", "-O2", "-g", "-w", "-fsanitize=thread", "-pthread"]
    program = tmp_path / "parallel_test"
    source = str(here / "parallel_test.cc")
    subprocess.run(["g++", *flags, *headers, source, "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "right\n"


@only_x86
@pytest.mark.parametrize("processor", LESS)
def test_kernels_run_on_processors_with_fewer_instructions(processor):
    run(processor)


@pytest.mark.skipif(CLANG is None, reason="no clang++")
@pytest.mark.parametrize("source", handlers.SOURCES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    "processor",
    [
        *(
            pytest.param(f"-march={name}", marks=only_x86)
            for name in ("x86-64-v2", "x86-64-v3", "znver4", "sapphirerapids")
        ),
        "--target=aarch64-linux-gnu",
    ],
)
def test_clang_compiles_the_kernels(processor, source, tmp_path):
    headers = f"-isystem{jax.ffi.include_dir()}"
    command = [str(CLANG), processor, "-std=c++17", "-O1", "-fPIC", "-w", headers, "-c"]
    made = str(tmp_path / "made.o")
    (tmp_path / "none.cc").write_text("#include <vector>\n")
    if subprocess.run([*command, str(tmp_path / "none.cc"), "-o", made], check=False).returncode:
        pytest.skip("clang++ has no headers for this processor")
    done = subprocess.run(
        [*command, str(source), "-o", made], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
