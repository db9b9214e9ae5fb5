"""`launch/local.sh` on tiny models: what two processes and a remote draft say, and leave."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from tests.launch.checkout import ROOT, children, environment, furnished, gone, texts
from tests.placement.remote.workers import checkpoints

FLAGS = [
    *("--json", "--max_tokens=40", "--ignore_eos", "--context=128", "--dtype=float32"),
    *("--slots=2", "--compile_cache=off", "--verify=coupled"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Checkpoints, prompts, and `ssd-jax` on the path."""
    lines = [{"prompt": "to be or not"}, {"prompt": "one two", "temperature": 0.8, "seed": 3}]
    return furnished(checkpoints(tmp_path_factory.mktemp("local")), lines)


def flags(root, *more):
    return [
        *("generate", f"--target={root / 'target'}", f"--prompt_file={root / 'prompts.jsonl'}"),
        *FLAGS,
        *more,
    ]


def started(root, *of_script, more=()):
    return subprocess.Popen(
        [ROOT / "launch/local.sh", *of_script, *flags(root, *more)],
        env=environment(root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize(
    ("processes", "devices", "shared"),
    [
        (2, 1, []),
        pytest.param(2, 2, ["--draft_devices=cpu:0-1"], marks=pytest.mark.slow),
        pytest.param(4, 2, ["--draft_devices=cpu:0-1"], marks=pytest.mark.slow),
    ],
)
def test_processes_and_a_remote_draft_say_what_one_process_says(root, processes, devices, shared):
    alone = subprocess.run(
        [root / "bin/ssd-jax", *flags(root)],
        env=environment(root), capture_output=True, text=True, check=True,
    )  # fmt: skip
    more = ["--mode=ssd", "--k=3", "--budget=8"]
    asked = f"--processes={processes}", f"--devices={devices}", f"--draft={root / 'draft'}"
    local = started(root, *asked, *shared, more=more)
    while len(pids := children(local.pid)) < processes + 1:
        assert local.poll() is None, local.communicate()
        time.sleep(0.1)
    stdout, err = local.communicate(timeout=300)
    assert local.returncode == 0, err
    assert texts(stdout) == texts(alone.stdout)
    found = [json.loads(line)["metrics"] for line in stdout.splitlines()]
    assert all(result["mode"] == "ssd" for result in found)
    gone(pids)


@pytest.mark.slow
def test_an_interrupt_ends_all_processes(root):
    local = started(
        root, "--processes=2", f"--draft={root / 'draft'}", more=["--mode=ssd", "--k=3"]
    )
    time.sleep(10)
    pids = children(local.pid)
    assert len(pids) >= 3
    local.send_signal(signal.SIGTERM)
    assert local.wait(60) == 143
    gone(pids)
