"""A process that cannot go on ends, whoever reads what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.placement.hosts.processes import environment

LEAVES = """
import sys, threading
from ssd_jax.system.leaving import leave

print("text")
threading.Timer(0.2, leave, ("host 1 of 2 is lost", 3)).start()
if len(sys.argv) > 1:
    sys.stdout.write("x" * 10**6)  # more than a pipe takes
threading.Event().wait()  # for devices that hang
"""


def leaving(*arguments, **pipes):
    command = [sys.executable, "-c", LEAVES, *arguments]
    return subprocess.Popen(command, **pipes, text=True, env=environment(PYTHONUNBUFFERED=""))


def test_what_was_said_comes_before_why_it_ends():
    with leaving(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.communicate(timeout=30)[0] == "text\nssd-jax: host 1 of 2 is lost\n"
    assert process.returncode == 3


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.more)])
def test_a_process_ends_though_nobody_reads_its_output(full):
    """Its reader has ended, or has stopped reading."""
    reader, writer = os.pipe()
    if not full:
        os.close(reader)
    with leaving(*["full"] * full, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        try:
            assert process.wait(30) == 3
        finally:
            process.kill()
        assert process.stderr.read() == "ssd-jax: host 1 of 2 is lost\n"
    if full:
        os.close(reader)


@pytest.mark.more
def test_a_process_ends_though_nobody_reads_its_errors_either():
    with leaving("full", stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.wait(30) == 3
        finally:
            process.kill()
