"""Draft workers that are started by themselves, as a user would on another host."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from typing import NamedTuple

from ssd_jax.llm.llm import LLM
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair


class Started(NamedTuple):
    process: subprocess.Popen
    address: str
    """HOST:PORT."""

    @property
    def port(self):
        return self.address.rpartition(":")[2]


def checkpoints(root):
    """A directory of a target and a draft that often agree, and of two other drafts: another
    model, and the same one with other weights."""
    tiny_pair.write(root, "qwen3")
    tiny.write_checkpoint(root / "other", "llama")
    tiny.write_checkpoint(root / "other weights", "qwen3", noise=0.05)
    return root


def command(listen, root, *flags):
    draft = f"--draft={root / 'draft'}"
    start = [sys.executable, "-m", "ssd_jax", "draft-worker", f"--listen={listen}", draft]
    return [*start, *flags]


def start(root, *flags, listen="127.0.0.1:0", where=()):
    """`where` begins the command."""
    return listening([*where, *command(listen, root, *flags)])


def listening(command):
    """A worker that has said where it listens."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving \S+ at (\S+) ", line):
            return Started(process, found[1])
    raise AssertionError("".join(lines))


@contextlib.contextmanager
def started(root, *flags, listen="127.0.0.1:0", where=()):
    worker = start(root, *flags, listen=listen, where=where)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def opened(root, address, **settings):
    """A model with its draft at an address."""
    defaults = {"context": 320, "dtype": "float32", "k": "3", "budget": "8", "slots": 4}
    defaults |= {"mode": "ssd", "draft": str(root / "draft"), "verify": "coupled"}
    llm = LLM(
        str(root / "target"),
        draft_placement=f"remote:{address}",
        compile_cache="off",
        **defaults | settings,
    )
    llm.loaded.worker.patience = 120.0  # no answer is late here, however busy the machine is
    return llm


def hits(found):
    return sum(output.metrics["hit_rate"] or 0 for output in found)


def secret(path, text="0123456789abcdef"):
    path.write_text(text)
    path.chmod(0o600)
    return str(path)
