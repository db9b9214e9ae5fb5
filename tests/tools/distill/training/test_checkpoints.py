"""Checkpoints are whole or passed over, and the last few are kept."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.files import MAX_TEXT
from ssd_jax.tools.distill.training.checkpoints import Checkpoints
from ssd_jax.tools.distill.training.journal import Journal, read_journal

# Reads of one array that fails let those of the others fall, whose futures complain later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(value):
    return {"b": jnp.full((3, 2), value, jnp.float32), "a": [jnp.int32(value), jnp.float32(0.5)]}


def opened(path, keep=2, **made_with):
    return Checkpoints(path, made_with={"seed": 1} | made_with, keep=keep)


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_the_last_state_comes_back_and_older_ones_go(tmp_path):
    saved = opened(tmp_path)
    assert saved.restore(state(0)) is None
    for step in (10, 20, 30):
        saved.save(step, state(step))
    assert names(tmp_path) == ["step_20", "step_30"]
    restored = opened(tmp_path).restore(state(0))
    assert restored.step == 30
    np.testing.assert_array_equal(restored.state["b"], np.full((3, 2), 30, np.float32))
    assert restored.state["a"][0] == 30
    assert restored.state["a"][0].dtype == np.int32


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_damaged_checkpoints_are_passed_over(tmp_path):
    saved = opened(tmp_path, keep=9)
    for step in (10, 20, 30, 40):
        saved.save(step, state(step))
    (largest,) = (tmp_path / "step_20" / "state" / "d").iterdir()
    cut(largest)
    cut(tmp_path / "step_30" / "made_with" / "metadata")
    shutil.rmtree(tmp_path / "step_40" / "state")
    (tmp_path / "step_50").mkdir()
    half = tmp_path / "step_60.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    again = opened(tmp_path, keep=9)
    assert again.restore(state(0)).step == 10
    again.save(20, state(21))
    assert again.restore(state(0)).state["a"][0] == 21
    assert names(tmp_path) == ["step_10", "step_20"]


def test_damage_of_all_checkpoints_is_an_error(tmp_path):
    opened(tmp_path).save(10, state(10))
    shutil.rmtree(tmp_path / "step_10" / "state")
    with pytest.raises(InputError, match=r"can be read: step_10 is damaged: .*remove that dir"):
        opened(tmp_path).restore(state(0))


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path):
    (tmp_path / "step-00000010" / "arrays").mkdir(parents=True)
    with pytest.raises(InputError, match=r"of an earlier version .*; go on with that version, or"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, kind):
    saved = opened(tmp_path)
    saved.save(10, state(10))

    def full(*_args, **_named):
        raise kind(f"{'a long path ' * 40}: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(
            SsdError, match=r"step_20 cannot be .*No space left on device; make room"
        ):
            saved.save(20, state(20))
    assert saved.restore(state(0)).step == 10
    again = opened(tmp_path)
    assert again.restore(state(0)).step == 10
    again.save(20, state(21))
    assert again.restore(state(0)).state["a"][0] == 21
    assert names(tmp_path) == ["step_10", "step_20"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.tools.distill.training.test_checkpoints import opened, state
saved, count = opened(Path({path!r})), [0]
def die(event, arguments):
    if event in ("os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"):
        count[0] += 1
        if count[0] == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
saved.save(10, state(10))
sys.addaudithook(die)
saved.save(20, state(20))
saved.save(30, state(30))
print(count[0])
"""


@pytest.mark.slow
def test_a_kill_at_any_change_of_a_name_leaves_a_whole_state(tmp_path):
    for kill in range(1, 60):
        path = tmp_path / str(kill)
        code = KILLED.format(here=str(Path.cwd()), path=str(path))
        done = subprocess.run(
            [sys.executable, "-c", code, str(kill)], check=False, capture_output=True
        )
        restored = opened(path).restore(state(0))
        assert restored.state["a"][0] == restored.step
        assert restored.step in (10, 20, 30)
        if done.returncode == 0:
            assert kill > 4
            return
        assert done.returncode == -signal.SIGKILL
    pytest.fail("it never came to its end")


def test_other_settings_are_refused_by_name_and_so_is_another_state(tmp_path):
    opened(tmp_path, rate=0.1).save(10, state(10))
    with pytest.raises(InputError, match=r"rate was 0\.1, is 0\.2"):
        opened(tmp_path, rate=0.2).restore(state(0))
    with pytest.raises(InputError, match="the state of another draft"):
        opened(tmp_path, rate=0.1).restore({"b": jnp.zeros((2, 2))})


def test_a_journal_goes_on_after_the_step_that_was_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, step=0)
    for step in (1, 2, 3):
        journal.write(step=step, loss=1.0 / step)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    Journal(path, step=2).write(step=3, loss=9.0)
    assert [(e["step"], e["loss"]) for e in read_journal(path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]


@pytest.mark.more
def test_a_journal_of_any_length_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Journal(path, step=0).write(step=1, held_out={"loss": 2.0}, much="x" * MAX_TEXT)
    assert Journal(path, step=1).last_look() == {"loss": 2.0}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without /dev/full")
def test_a_journal_that_cannot_be_written_is_named(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl", step=-1)
    journal.path = Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        journal.write(step=1)
