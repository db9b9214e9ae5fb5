from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from ssd_jax.checkpoints import orbax
from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts import checkpoint as draft_checkpoint
from ssd_jax.checkpoints.drafts.checkpoint import HEAD, KEY, OUTPUT_IDS, identity_of, write_draft
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system import atomic
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_drafts
from tests.checkpoints.tiny_drafts import EMBEDDING, open_target
from tests.system.full_disk import files_of_at_most

IDS = np.array([3, 5, 100, 200, tiny.EOS, tiny.END_OF_TURN])
SPECIAL = [tiny.EOS, tiny.END_OF_TURN, tiny.PAD]
TIED = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING}
Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Checkpoint:
    return open_target(tiny.write_checkpoint(tmp_path_factory.mktemp("target")))


def test_a_draft_holds_its_own_tensors_its_map_and_the_names_of_the_others(tmp_path, target):
    tiny_drafts.write(tmp_path / "draft", target, IDS)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored.keys() == {*tiny_drafts.trained_tensors(), OUTPUT_IDS}
    assert stored[OUTPUT_IDS].dtype == np.int32
    np.testing.assert_array_equal(stored[OUTPUT_IDS], IDS)
    assert stored[Q_PROJ].dtype == ml_dtypes.bfloat16
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["vocab_size"] == tiny.ROWS
    assert config[KEY] == {
        "format": 1,
        "target": identity_of(target, TIED)._asdict(),
        "tied": TIED,
        "output_ids": OUTPUT_IDS,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_the_same_target_in_another_format_has_the_same_identity(tmp_path, target):
    orbax.write_checkpoint(tmp_path / "converted", target, "bfloat16")
    converted = open_target(tmp_path / "converted")
    assert identity_of(converted, TIED).sha256 == identity_of(target, TIED).sha256
    orbax.write_checkpoint(tmp_path / "wide", target, "float32")
    assert (
        identity_of(open_target(tmp_path / "wide"), TIED).sha256 == identity_of(target, TIED).sha256
    )


@pytest.mark.parametrize("what", ["configuration", "vocabulary", "values"])
def test_another_target_has_another_identity(tmp_path, target, what):
    path = tiny.write_checkpoint(
        tmp_path,
        seed=int(what == "values"),
        **({"rope_theta": 5000.0} if what == "configuration" else {}),
    )
    if what == "vocabulary":
        text = (path / "tokenizer.json").read_text()
        (path / "tokenizer.json").write_text(text.replace("<pad>", "<pid>"))
        config = path / "tokenizer_config.json"
        config.write_text(config.read_text().replace("<pad>", "<pid>"))
    assert identity_of(open_target(path), TIED).sha256 != identity_of(target, TIED).sha256


def test_blocks_of_any_size_give_the_same_identity(target, monkeypatch):
    identity = identity_of(target, TIED)
    monkeypatch.setattr(draft_checkpoint, "_BLOCK", 7 * 32)
    assert identity_of(target, TIED) == identity


def test_a_tensor_that_the_target_lacks_is_named(target):
    with pytest.raises(InputError, match=r"no tensor .lm_head\.weight."):
        identity_of(target, {HEAD: HEAD})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 5, 5], "id 5 follows 5 at place 2"),
        ([5, 3], "must ascend, but id 3 follows 5"),
        ([-1, 3], "output id -1 is out of range, ids are 0 to 319"),
        ([3, tiny.ROWS], "output id 320 is out of range"),
        ([0.5], "list of integers, not float64"),
    ],
)
def test_impossible_output_ids_are_refused(tmp_path, target, ids, message):
    with pytest.raises(InputError, match=message):
        tiny_drafts.write(tmp_path / "draft", target, np.array(ids))
    assert not list(tmp_path.iterdir())


def given(change):
    tensors = tiny_drafts.trained_tensors()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), "'model.layers.0.self_attn.q_proj.weight' is missing"),
        (lambda t: t.update(other=t[Q_PROJ]), "'other' is surplus"),
        (lambda t: t.update({HEAD: t[Q_PROJ]}), "'lm_head.weight' is both stored and tied"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ][:5]}), r"shape \(5, 32\), the configuration says"),
        (
            lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.float16)}),
            "has type float16; a draft's are F32",
        ),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)}), "needs .*q_proj.weight_scale"),
        (lambda t: t.update({Q_PROJ + "_scale": np.ones(32, np.float32)}), "not stored as int8"),
        (
            lambda t: t.update({NORM: np.ones(32, np.int8), NORM + "_scale": np.ones(32, "f4")}),
            r"of shape \(32,\) is int8, which only matrices may be",
        ),
    ],
)
def test_tensors_that_do_not_make_up_the_draft_are_refused(tmp_path, target, change, message):
    with pytest.raises(InputError, match=message):
        tiny_drafts.write(tmp_path / "draft", target, IDS, tensors=given(change))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*SPECIAL, tiny.TOKENS], "output id 259 is out of range, ids are 0 to 258"),  # padding
        ([3, tiny.END_OF_TURN, tiny.PAD], r"lack \[256\], which end a text"),
        ([3, tiny.EOS, tiny.END_OF_TURN], r"lack \[258\], which are special tokens"),
    ],
)
def test_with_the_tokenizer_a_map_is_refused_that_could_not_be_read(tmp_path, target, ids, message):
    def write(ids):
        config, tied = tiny_drafts.parts(target, ids)
        write_draft(
            tmp_path / "draft",
            config=config,
            tensors=tiny_drafts.trained_tensors(),
            tied=tied,
            output_ids=ids,
            target=identity_of(target, tied),
            tokenizer=target.tokenizer,
        )

    with pytest.raises(InputError, match=message):
        write(np.array(ids))
    assert not list(tmp_path.iterdir())
    write(np.array([3, *SPECIAL]))


def test_nothing_but_a_draft_is_overwritten(tmp_path, target):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="exists and is not empty"):
        tiny_drafts.write(tmp_path / "notes", target, IDS)
    assert names(tmp_path) == ["notes"]


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("over", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path, target, over):
    if over:
        tiny_drafts.write(tmp_path / "draft", target, IDS)
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        tiny_drafts.write(tmp_path / "draft", target, IDS, seed=1)
    assert names(tmp_path) == ["draft"] * over
    if over:
        stored = load_file(tmp_path / "draft" / "model.safetensors")[Q_PROJ]
        np.testing.assert_array_equal(stored, tiny_drafts.trained_tensors()[Q_PROJ])


def test_a_new_draft_takes_the_place_of_the_old(tmp_path, target):
    tiny_drafts.write(tmp_path / "draft", target, IDS)
    tiny_drafts.write(tmp_path / "draft", target, None, seed=1)
    assert names(tmp_path) == ["draft"]
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored.keys() == tiny_drafts.trained_tensors().keys()
    np.testing.assert_array_equal(stored[Q_PROJ], tiny_drafts.trained_tensors(seed=1)[Q_PROJ])


def test_the_old_draft_is_back_where_the_new_one_cannot_be_put(tmp_path, target, monkeypatch):
    tiny_drafts.write(tmp_path / "draft", target, IDS)
    rename = Path.rename

    def refuse(path, to):
        if path.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(atomic, "_exchange", lambda *_names: False)
    with pytest.raises(OSError, match="Input/output"):
        tiny_drafts.write(tmp_path / "draft", target, None)
    assert names(tmp_path) == ["draft"]
    assert OUTPUT_IDS in load_file(tmp_path / "draft" / "model.safetensors")


def test_everything_reaches_the_disk_before_its_name_does(tmp_path, target, monkeypatch):
    done, sync, rename = [], os.fsync, Path.rename

    monkeypatch.setattr(os, "fsync", lambda to: (done.append(os.fstat(to).st_ino), sync(to)))
    monkeypatch.setattr(Path, "rename", lambda here, to: (done.append("renamed"), rename(here, to)))
    path = tiny_drafts.write(tmp_path / "draft", target, IDS)
    first, *files, partial, last, parent = done
    assert first == "renamed"  # what is under way
    assert sorted(files) == sorted(entry.stat().st_ino for entry in path.iterdir())
    assert (partial, last, parent) == (path.stat().st_ino, "renamed", tmp_path.stat().st_ino)


def test_files_have_the_mode_that_the_user_asked_for(tmp_path, target):
    before = os.umask(0o027)
    try:
        path = tiny_drafts.write(tmp_path / "draft", target, IDS)
    finally:
        os.umask(before)
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {
        "config.json": 0o640,
        "model.safetensors": 0o640,
    }


def test_leftovers_of_a_killed_writer_are_removed_and_nothing_else(tmp_path, target):
    for name in (".draft.0123abcd.partial", ".draft.0123abcd.old", ".draft.b.0123abcd.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    tiny_drafts.write(tmp_path / "draft", target, IDS)
    assert names(tmp_path) == [".draft.b.0123abcd.partial", "draft"]


def test_a_map_needs_a_head_of_its_own(tmp_path, target):
    config, tied = tiny_drafts.parts(target, IDS)
    config = ModelConfig(**(vars(config) | {"tie_embeddings": True}))
    with pytest.raises(InputError, match="needs a head of its own"):
        write_draft(
            tmp_path / "draft",
            config=config,
            tensors=tiny_drafts.trained_tensors(),
            tied={EMBEDDING: tied[EMBEDDING]},
            output_ids=IDS,
            target=identity_of(target, tied),
        )
