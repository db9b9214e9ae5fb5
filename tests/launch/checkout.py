"""Commands that run beside a checkout, and the processes that they leave."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FILES = ("cmdline", "stat")


def furnished(root, lines):
    """A directory with `ssd-jax` for the path, and a file of prompts."""
    (root / "bin").mkdir()
    command = root / "bin" / "ssd-jax"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ssd_jax "$@"\n')
    command.chmod(0o755)
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def environment(root):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
    }


def texts(output):
    found = [json.loads(line) for line in output.splitlines()]
    return [
        output["token_ids"] for output in sorted(found, key=lambda output: output["prompt_index"])
    ]


def children(pid):
    """Every process that one has started, and those have."""
    found = []
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = task.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(task.parent.name)
            found += [child, *children(child)]
    return found


def gone(pids):
    end = time.monotonic() + 120
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > end:
            facts = [Path(f"/proc/{pid}/{file}").read_text() for pid in left for file in _FILES]
            raise AssertionError(f"a process was left: {facts}")
        time.sleep(0.1)
