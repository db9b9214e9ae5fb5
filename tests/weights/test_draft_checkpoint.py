from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.weights import draft_checkpoint, orbax
from ssd_jax.weights.draft_checkpoint import HEAD, KEY, OUTPUT_IDS, identity_of, write_draft
from tests import tiny
from tests.weights import tiny_drafts
from tests.weights.tiny_drafts import EMBEDDING, Target, open_target

IDS = np.array([3, 5, 100, 200, tiny.EOS, tiny.END_OF_TURN])
TIED = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return open_target(tiny.write_checkpoint(tmp_path_factory.mktemp("target")))


def test_a_draft_holds_its_own_tensors_its_map_and_the_names_of_the_others(tmp_path, target):
    tiny_drafts.write(tmp_path / "draft", target, IDS)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored.keys() == {*tiny_drafts.own(), OUTPUT_IDS}
    assert stored[OUTPUT_IDS].dtype == np.int32
    np.testing.assert_array_equal(stored[OUTPUT_IDS], IDS)
    assert stored[Q_PROJ].dtype == ml_dtypes.bfloat16
    said = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert said["vocab_size"] == tiny.ROWS
    assert said[KEY] == {
        "format": 1,
        "target": vars(identity_of(target, TIED)),
        "tied": TIED,
        "output_ids": OUTPUT_IDS,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_the_same_target_in_another_format_has_the_same_identity(tmp_path, target):
    orbax.write_checkpoint(tmp_path / "converted", target.checkpoint, "bfloat16")
    converted = open_target(tmp_path / "converted")
    assert identity_of(converted, TIED).sha256 == identity_of(target, TIED).sha256
    orbax.write_checkpoint(tmp_path / "wide", target.checkpoint, "float32")
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
    whole = identity_of(target, TIED)
    monkeypatch.setattr(draft_checkpoint, "_BLOCK", 7 * 32)
    assert identity_of(target, TIED) == whole


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
def test_output_ids_that_cannot_be_are_refused(tmp_path, target, ids, message):
    with pytest.raises(InputError, match=message):
        tiny_drafts.write(tmp_path / "draft", target, np.array(ids))
    assert not list(tmp_path.iterdir())


def given(change):
    tensors = tiny_drafts.own()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), "'model.layers.0.self_attn.q_proj.weight' is missing"),
        (lambda t: t.update(other=t[Q_PROJ]), "'other' is surplus"),
        (lambda t: t.update({HEAD: t[Q_PROJ]}), "'lm_head.weight' is both stored and tied"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ][:5]}), r"shape \(5, 32\), the configuration says"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.float16)}), "has type float16"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)}), "needs .*q_proj.weight_scale"),
        (lambda t: t.update({Q_PROJ + "_scale": np.ones(32, np.float32)}), "not stored as int8"),
    ],
)
def test_tensors_that_do_not_make_up_the_draft_are_refused(tmp_path, target, change, message):
    with pytest.raises(InputError, match=message):
        tiny_drafts.write(tmp_path / "draft", target, IDS, tensors=given(change))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, target, monkeypatch):
    path = tiny_drafts.write(tmp_path / "draft", target, IDS)
    with pytest.raises(InputError, match="exists and is not empty"):
        tiny_drafts.write(path, target, IDS)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draft_checkpoint.json, "dumps", full)
    identity = draft_checkpoint.Identity(source="x", sha256="y")
    config, tied = tiny_drafts.parts(target, IDS)
    with pytest.raises(OSError, match="No space"):
        write_draft(
            tmp_path / "other",
            config=config,
            tensors=tiny_drafts.own(),
            tied=tied,
            output_ids=IDS,
            target=identity,
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_a_map_needs_a_head_of_its_own(tmp_path, target):
    config, tied = tiny_drafts.parts(target, IDS)
    config = ModelConfig(**(vars(config) | {"tie_embeddings": True}))
    with pytest.raises(InputError, match="needs a head of its own"):
        write_draft(
            tmp_path / "draft",
            config=config,
            tensors=tiny_drafts.own(),
            tied={EMBEDDING: tied[EMBEDDING]},
            output_ids=IDS,
            target=identity_of(target, tied),
        )
