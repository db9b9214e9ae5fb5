"""A process ends that cannot go on, whoever reads what it says, or that nobody needs any more."""

from __future__ import annotations

import os
import signal
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


def test_output_is_flushed_before_the_reason_of_an_end():
    with leaving(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.communicate(timeout=300)[0] == "text\nssd-jax: host 1 of 2 is lost\n"
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
            assert process.wait(300) == 3
        finally:
            process.kill()
        assert process.stderr.read() == "ssd-jax: host 1 of 2 is lost\n"
    if full:
        os.close(reader)


@pytest.mark.more
def test_a_process_ends_though_nobody_reads_its_errors_either():
    with leaving("full", stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.wait(300) == 3
        finally:
            process.kill()


ORPHAN = """
import multiprocessing, os, signal, time
from ssd_jax.system.leaving import end_with_parent

def serve(pipe):
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(3600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(there,), daemon=True).start()
    print(here.recv(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_ends_with_its_starter_that_was_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ORPHAN)
    # The pipe of the output is open as long as the child is there.
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout)
