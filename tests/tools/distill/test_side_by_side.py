"""Several engines, each in a process of its own, make the shards that one makes."""

import contextlib
import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys

import pytest

from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.cores import usable_cores
from ssd_jax.tools.distill import side_by_side
from ssd_jax.tools.distill.completions import Report, complete_shards
from ssd_jax.tools.distill.generate import plan_shards
from ssd_jax.tools.distill.settings import GenerateSettings, TargetSettings
from tests.tools.distill import fake_target

pytestmark = pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")


def job(directory, target, processes, **changes):
    """Twelve completions of a real engine in six shards."""
    settings = {"completions": 12, "max_tokens": 6, "slots": 2, "shard_tokens": 20, "top_n": 4}
    settings |= {"seed": 3, "temperatures": (0.0, 1.0), "processes": processes}
    return dataclasses.replace(
        fake_target.job(directory),
        target=TargetSettings(source=str(target), dtype="float32"),
        settings=GenerateSettings(**settings | changes),
    )


@pytest.mark.more
def test_two_processes_make_the_files_of_one_and_report_every_token(tmp_path, tiny_checkpoint):
    lines = []

    @contextlib.contextmanager
    def bar(label, *, unit):
        del unit
        yield lambda done, total, *_: lines.append((label, done, total))

    one = fake_target.run(job(tmp_path / "one", tiny_checkpoint, 1))
    made = dataclasses.replace(job(tmp_path / "two", tiny_checkpoint, 2), bar=bar)
    two = fake_target.run(made)
    assert one.data == two.data
    assert one.data["planned"] == 6
    assert fake_target.files(tmp_path / "two") == fake_target.files(tmp_path / "one")
    generated = [done for label, done, _ in lines if label == "generating"]
    given = sum(len(made.prompts[one.prompt].ids) for one in _completions(made))
    assert generated[-1] == two.data["tokens"] - given
    assert lines[-1] == ("scoring", two.data["generated"], two.data["generated"])
    assert not multiprocessing.active_children()


@pytest.mark.more
def test_an_error_in_a_process_is_raised_here_and_none_is_left(tmp_path):
    missing = tmp_path / "nothing"
    with pytest.raises(InputError, match=re.escape(str(missing))):
        fake_target.run(job(tmp_path / "run", missing, 2))
    assert not multiprocessing.active_children()


@pytest.mark.more
def test_processes_end_with_the_one_that_started_them(tmp_path):
    command = [sys.executable, "-m", "tests.tools.distill.abandoned", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        for _ in range(2):
            assert starter.stdout.readline().startswith(b"Report")
        starter.kill()
        starter.communicate(timeout=300)  # to the end: nobody has the output open any more


@pytest.mark.more
def test_a_process_that_dies_is_named_and_what_was_written_counts(tmp_path, tiny_checkpoint):
    one = job(tmp_path, tiny_checkpoint, 2)
    shards = dict(enumerate(plan_shards(one.prompts, one.settings)))
    reports = side_by_side.run(complete_shards, one, shards)
    assert next(reports) == Report()
    assert any(report.shard for report in reports)  # ends at the first
    for child in multiprocessing.active_children():
        os.kill(child.pid, 9)
    with pytest.raises(SsdError, match=r"exit status -9.*lower processes"):
        list(reports)
    assert not multiprocessing.active_children()


def _completions(one):
    return [completion for shard in plan_shards(one.prompts, one.settings) for completion in shard]


@pytest.mark.parametrize(
    ("cores", "processes", "groups"),
    [
        ({0, 1}, 1, [(0, 1)]),
        ({0, 1}, 2, [(0,), (1,)]),
        ({0, 1}, 5, [(0,), (1,)]),
        ({0, 1, 2, 5, 6}, 2, [(0, 1), (2, 5, 6)]),
        ({0, 1, 2, 5, 6}, 3, [(0,), (1, 2), (5, 6)]),
        (set(), 2, []),
    ],
)
def test_processes_share_the_cores(monkeypatch, cores, processes, groups):
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: frozenset(cores))
    assert side_by_side.core_groups(processes) == groups


def test_processes_do_not_share_an_accelerator(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert side_by_side.core_groups(2) == []
