"""Checkpoints are whole or passed over, and the last few are kept."""

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.distill.training import checkpoints
from ssd_jax.distill.training.checkpoints import Checkpoints
from ssd_jax.distill.training.journal import Journal, read_journal
from ssd_jax.errors import InputError


def state(value):
    return {"b": jnp.full((3, 2), value, jnp.float32), "a": [jnp.int32(value), jnp.float32(0.5)]}


def opened(path, keep=2, **made_with):
    return Checkpoints(path, made_with={"seed": 1} | made_with, keep=keep)


def test_the_last_state_comes_back_and_older_ones_go(tmp_path):
    saved = opened(tmp_path)
    assert saved.restore(state(0)) is None
    for step in (10, 20, 30):
        saved.save(step, state(step))
    assert saved.steps() == [20, 30]
    restored = opened(tmp_path).restore(state(0))
    assert restored.step == 30
    np.testing.assert_array_equal(restored.state["b"], np.full((3, 2), 30, np.float32))
    assert restored.state["a"][0] == 30
    assert restored.state["a"][0].dtype == np.int32


def test_what_is_not_whole_is_passed_over(tmp_path):
    saved = opened(tmp_path, keep=9)
    for step in (10, 20, 30, 40):
        saved.save(step, state(step))
    largest = max(
        (p for p in (tmp_path / "step-00000020" / "arrays").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    manifest = tmp_path / "step-00000030" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    (tmp_path / "step-00000040" / "manifest.json").unlink()
    half = tmp_path / ".step-00000050.0123abcd.partial"
    half.mkdir()
    again = opened(tmp_path, keep=9)
    assert again.steps() == [10]
    assert not half.exists()
    assert again.restore(state(0)).step == 10
    again.save(20, state(21))
    assert again.restore(state(0)).state["a"][0] == 21
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    saved = opened(tmp_path)
    saved.save(10, state(10))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_sizes", full)
    with pytest.raises(OSError, match="No space"):
        saved.save(20, state(20))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert saved.restore(state(0)).step == 10


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
