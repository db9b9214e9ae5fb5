"""A host is lost, refuses, or differs: every process ends soon, with one line that says which."""

from __future__ import annotations

import json
import signal
import time

import pytest

from ssd_jax.testing import tiny
from tests.placement.hosts.processes import Processes

SOON = 60.0
"""Seconds, of a time-out of 10, with what a busy machine adds."""
GENERATE = (
    *("ssd_jax", "generate", "--target=model", "--dtype=float32", "--context=320"),
    *("--ignore_eos", "--compile_cache=off"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two with models of one name, which are the same, and one with another."""
    root = tmp_path_factory.mktemp("faults")
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        (root / name).mkdir()
        tiny.write_checkpoint(root / name / "model", "qwen3", seed=seed)
    return root


def decoding(folders, tmp_path, timeout=10.0):
    """Processes amid a long text."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "xyz")))
    flags = (f"--prompt_file={prompts}", "--json", "--slots=1")
    # The first prompt ends, the second goes on and on.
    return Processes(
        *GENERATE,
        *flags,
        "--max_tokens=300",
        timeout=timeout,
        folders={0: folders / "one", 1: folders / "same"},
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("lost", "by"),
    [
        (0, signal.SIGKILL),
        pytest.param(
            1, signal.SIGKILL, marks=pytest.mark.slow
        ),  # by default `test_calls.py` has it
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_every_process_ends_when_one_is_lost(folders, tmp_path, lost, by):
    with decoding(folders, tmp_path) as processes:
        first = processes.read_line()
        assert json.loads(first)["finish_reason"] == "length"
        time.sleep(0.2)
        began = time.monotonic()
        processes.processes[lost].send_signal(by)
        left = processes.processes[1 - lost]
        output, errors = left.communicate(timeout=SOON)
        assert time.monotonic() - began < SOON
    assert left.returncode not in (0, None)
    if not lost and left.returncode == -signal.SIGABRT:
        return  # the C++ of a follower noticed first, which is rare and says nothing
    named = "host 1 of 2" if lost else "host 0 of 2 (the leader"
    assert named in errors, (left.returncode, errors)
    assert "is lost" in errors
    if lost:
        assert left.returncode == 1
        cut_off = json.loads(output.splitlines()[-1])
        assert cut_off["finish_reason"] == "error"
        assert cut_off["token_ids"]


@pytest.mark.slow
def test_a_leader_that_is_told_to_end_ends_all(folders, tmp_path):
    with decoding(folders, tmp_path) as processes:
        processes.read_line()
        processes.processes[0].send_signal(signal.SIGINT)
        (leader, _, _), (follower, _, words) = processes.ended(SOON)
    assert leader == 130
    assert follower == 0, words


@pytest.mark.more
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("other", ("hosts differ in weights of the target (model)", "host 0 of 2", "host 1 of 2")),
        ("nothing", ("host 1 of 2", "model")),
    ],
)
def test_other_weights_or_none_are_refused_everywhere_by_the_same_message(folders, other, words):
    (folders / other).mkdir(exist_ok=True)
    pair = {0: folders / "one", 1: folders / other}
    with Processes(*GENERATE, "--prompt=abc", folders=pair) as processes:
        (leader, _, of_leader), (follower, _, of_follower) = processes.ended()
    assert leader == follower == 2
    assert all(word in of_leader for word in words)
    assert (
        of_leader.splitlines()[-1].split(": ", 1)[1]
        == of_follower.splitlines()[-1].split(": ", 1)[1]
    )
