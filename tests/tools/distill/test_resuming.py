"""Whatever ends a run, going on gives the files of a run that nothing ended, none made twice."""

import errno
import os
import re

import pytest

from ssd_jax.errors import InputError, SsdError
from ssd_jax.tools.distill.shards import read_shards
from tests.tools.distill.fake_target import FakeTarget, files, job, run

MOST_IN_A_SHARD = 4


@pytest.fixture
def uninterrupted(tmp_path, monkeypatch):
    """The files of a run that nothing ended."""
    FakeTarget().install(monkeypatch)
    run(job(tmp_path / "whole"))
    return files(tmp_path / "whole")


def test_a_run_writes_shards_that_fit_and_says_what_is_in_them(tmp_path, monkeypatch):
    fake = FakeTarget().install(monkeypatch)
    manifest = run(job(tmp_path / "run"))
    entries = manifest.data["shards"]
    assert manifest.finished
    assert len(entries) == manifest.data["planned"] > 3
    assert sum(entry["completions"] for entry in entries) == 20
    assert max(entry["completions"] for entry in entries) == MOST_IN_A_SHARD
    assert all(entry["tokens"] <= 40 for entry in entries)
    samples = list(read_shards(tmp_path / "run"))
    assert manifest.data["tokens"] == sum(len(sample.tokens) for sample in samples)
    assert manifest.data["generated"] == sum(len(sample.learnt) for sample in samples)
    assert sorted(fake.answered) == list(range(20))
    assert {sample.prompt_length for sample in samples} == {0, 2, 3, 4}  # 0 is plain text


@pytest.mark.parametrize("patience", [0, 1, 9, 19])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, monkeypatch, uninterrupted, patience):
    fake = FakeTarget(patience=patience).install(monkeypatch)
    one = job(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run(one)
    before = {name: data for name, data in files(one.directory).items() if name != "manifest.json"}
    fake.patience = None
    run(one)
    assert files(one.directory) == uninterrupted
    assert before.items() <= uninterrupted.items()
    assert len(fake.answered) - 20 <= MOST_IN_A_SHARD  # the rest is not answered again


def test_an_answer_that_ended_by_an_error_is_no_data(tmp_path, monkeypatch):
    FakeTarget(reason="error").install(monkeypatch)
    one = job(tmp_path / "run")
    with pytest.raises(SsdError, match="completion 0 ended by an error"):
        run(one)
    assert not list(one.directory.glob("shard-*"))


@pytest.mark.parametrize("write", range(1, 9))
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, uninterrupted, write):
    fake = FakeTarget().install(monkeypatch)
    one = job(tmp_path / "run")
    writes, sync = [], os.fsync

    def full(descriptor):
        writes.append(descriptor)
        if len(writes) == write:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(one)
    assert not [name for name in files(one.directory) if name.endswith(".partial")]
    with pytest.raises(InputError, match="no complete shards"):
        read_shards(one.directory)
    run(one)
    assert files(one.directory) == uninterrupted
    assert len(fake.answered) - 20 <= MOST_IN_A_SHARD


def test_leftovers_of_a_killed_writer_are_removed(tmp_path, monkeypatch, uninterrupted):
    FakeTarget().install(monkeypatch)
    one = job(tmp_path / "run")
    (one.directory / ".shard-00000.safetensors.0a1b.partial").write_bytes(b"half")
    run(one)
    assert files(one.directory) == uninterrupted


def test_a_finished_run_is_not_done_again(tmp_path, monkeypatch, uninterrupted):
    fake = FakeTarget().install(monkeypatch)
    one = job(tmp_path / "whole")
    run(one)
    assert (fake.answered, fake.scored) == ([], 0)
    assert files(one.directory) == uninterrupted


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("kind", ["", ".scores"])
def test_damage_is_noticed_and_mended_alone(tmp_path, monkeypatch, uninterrupted, damage, kind):
    fake = FakeTarget().install(monkeypatch)
    one = job(tmp_path / "whole")
    path = one.directory / f"shard-00001{kind}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(InputError, match=f"{re.escape(str(path))}.*--stage=whole again"):
        list(read_shards(one.directory))
    run(one)
    assert files(one.directory) == uninterrupted
    assert (0 < len(fake.answered) <= MOST_IN_A_SHARD) == (kind == "")
    assert fake.scored == 1


def test_shards_of_another_target_are_refused(tmp_path, uninterrupted):
    with pytest.raises(InputError, match="sha256 't', this one has u"):
        read_shards(tmp_path / "whole", target="u")
    assert list(read_shards(tmp_path / "whole", target="t"))


def test_jobs_beyond_the_target_are_refused_first(tmp_path, monkeypatch):
    fake = FakeTarget().install(monkeypatch)
    for changes, message in (
        ({"max_tokens": 97}, "the 100 positions"),
        ({"temperatures": (0.0,)}, "completions = 20 is more than the 8 prompts"),
        ({"slots": 5}, "room for 4 completions of up to 10 tokens.*5 slots.*to 50 at"),
        (
            {"slots": 64, "completions": 3, "shard_tokens": 29},
            "3 slots are never all in use; raise it to 30 ",
        ),
    ):
        with pytest.raises(InputError, match=message):
            run(job(tmp_path / "run", **changes))
    assert fake.answered == []
    assert files(tmp_path / "run") == {}


def test_no_more_slots_are_asked_for_than_there_are_completions(tmp_path, monkeypatch):
    FakeTarget().install(monkeypatch)
    assert run(job(tmp_path / "run", slots=64, completions=3, shard_tokens=30)).finished


def test_without_scores_none_are_kept(tmp_path, monkeypatch):
    fake = FakeTarget().install(monkeypatch)
    run(job(tmp_path / "run", top_n=0))
    assert fake.scored == 0
    assert all(sample.top_ids is None for sample in read_shards(tmp_path / "run"))


def test_another_seed_gives_other_text(tmp_path, monkeypatch, uninterrupted):
    FakeTarget().install(monkeypatch)
    run(job(tmp_path / "run", seed=4))
    assert files(tmp_path / "run").keys() >= {"shard-00000.safetensors"}
    assert files(tmp_path / "run") != uninterrupted
