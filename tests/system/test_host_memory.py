"""Limits of control groups, of either version, their own and those they are in; what is freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from ssd_jax.system.host_memory import memory_limit


def machine(root, groups: str, limits: dict[str, str]):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "which"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "4096\n"}, ("a/b/memory.max", 4096)),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "77\n"}, ("a/memory.max", 77)),
        ("0::/a\n", {"a/memory.max": "9\n", "a/b/memory.max": "1\n"}, ("a/memory.max", 9)),
        ("0::/\n", {"memory.max": "5\n"}, ("memory.max", 5)),
        ("0::/host/only\n", {"memory.max": "5\n"}, ("memory.max", 5)),
        (
            "3:cpu,memory:/a/b\n2:cpu:/c\n",
            {"memory/a/memory.limit_in_bytes": "8\n", "memory.max": "1\n"},
            ("memory/a/memory.limit_in_bytes", 8),
        ),
        (
            "1:name=systemd:/a\n4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "99\n", "memory/memory.limit_in_bytes": "98\n"},
            ("memory/memory.limit_in_bytes", 98),
        ),
    ],
)
def test_the_least_limit_of_memory_counts_and_is_named(tmp_path, groups, limits, which):
    root = machine(tmp_path, groups, limits)
    limit, whose = memory_limit(root)
    assert limit == which[1]
    assert whose == f"the control group of {root / 'sys/fs/cgroup' / which[0]}"


@pytest.mark.parametrize("groups", ["", "0::/\n", "0::/a\n", "5:cpu:/\n"])
def test_without_a_limit_the_memory_is_the_machines(tmp_path, groups):
    root = machine(tmp_path, groups, {"a/memory.max": "max"})
    limit, whose = memory_limit(root)
    assert limit > 2**28
    assert whose == "this machine"
    assert memory_limit(tmp_path / "nowhere") == (limit, whose)


_ROUNDS = """
import resource, sys, threading
import numpy as np
from ssd_jax.system.host_memory import keep_freed_memory

def faults():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(1 << 27, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun

if sys.argv[1] == "kept":
    keep_freed_memory()
counted = []
thread = threading.Thread(target=lambda: counted.extend(faults() for _ in range(3)))
thread.start()
thread.join()
print(counted[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_is_kept_is_not_asked_for_again():
    def last(*arguments):
        command = [sys.executable, "-c", _ROUNDS, *arguments]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert last("kept") < 40 < last("as ever")  # of 32,768 small pages or 64 huge ones


_FREED = """
import threading
from pathlib import Path
from ssd_jax.system.host_memory import give_back_freed_memory

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])

kept = []
def allocate():
    pieces = [b"x" * 100_000 for _ in range(1000)]
    kept.append(b"x" * 100_000)  # behind them

thread = threading.Thread(target=allocate)
thread.start()
thread.join()
before = resident()
give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_a_thread_freed_goes_back():
    command = [sys.executable, "-c", _FREED]
    done = subprocess.run(command, capture_output=True, check=True)
    assert int(done.stdout) > 60_000  # of 100,000 KiB
