"""A draft checkpoint over its target: whole tensors, the right rows, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints import orbax
from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts import source as draft_source
from ssd_jax.checkpoints.drafts.checkpoint import (
    HEAD,
    KEY,
    OUTPUT_IDS,
    SCALE,
    identity_of,
    write_draft,
)
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.devices.opening.models import open_model
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear import api as products
from ssd_jax.kernels.linear.quantized import quantize
from ssd_jax.llm.llm import LLM
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_drafts, tiny_gguf, tiny_models
from tests.checkpoints.tiny_drafts import EMBEDDING, open_target
from tests.sampling.edits import Edit, edited

IDS = np.array([0, 3, 5, 31, 100, 200, tiny.EOS, tiny.END_OF_TURN, tiny.PAD])
Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
ONES = np.ones(32, np.float32)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Checkpoint:
    return open_target(tiny.write_checkpoint(tmp_path_factory.mktemp("draft-source") / "target"))


@pytest.fixture
def draft(tmp_path, target):
    return tiny_drafts.write(tmp_path / "draft", target, IDS)


def heads_agree(draft, target):
    rows = open_checkpoint(str(draft), target=target).tensors.read(HEAD)
    return np.array_equal(rows, tiny_drafts.target_tensors()[EMBEDDING][IDS])


@pytest.mark.parametrize("block", [1, 50 * 32, 1 << 24])
def test_own_tensors_and_the_targets_make_up_the_draft(draft, target, monkeypatch, block):
    monkeypatch.setattr(draft_source, "_BLOCK", block)
    opened = open_checkpoint(str(draft), target=target)
    tensors, of_target = tiny_drafts.trained_tensors(), tiny_drafts.target_tensors()
    assert opened.tensors.shapes.keys() == {*tensors, EMBEDDING, HEAD}
    expected = tensors | {EMBEDDING: of_target[EMBEDDING], HEAD: of_target[EMBEDDING][IDS]}
    for name, array in expected.items():
        assert opened.tensors.shape(name) == array.shape
        np.testing.assert_array_equal(opened.tensors.read(name), array, err_msg=name)
    part = (slice(2, 7), slice(3, 30))
    np.testing.assert_array_equal(opened.tensors.read(HEAD, part), expected[HEAD][part])
    np.testing.assert_array_equal(opened.tensors.read(Q_PROJ, part), expected[Q_PROJ][part])
    assert opened.config.vocab_size == tiny.ROWS
    assert opened.config.outputs == opened.config.output_size == len(IDS)
    np.testing.assert_array_equal(opened.output_ids, IDS)
    assert opened.tokenizer is target.tokenizer


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("blocks.append(block[block_ids - low])", "blocks.insert(1, block[block_ids - low])"),
        ("block[block_ids - low]", "block[: len(block_ids)]"),
        ("block[block_ids - low]", "block[block_ids - low][::-1]"),
    ],
)
def test_rows_taken_in_another_order_are_caught(draft, target, monkeypatch, old, new):
    monkeypatch.setattr(draft_source, "_BLOCK", 50 * 32)
    assert heads_agree(draft, target)
    with edited([Edit(draft_source, "_read_rows", old, new)]):
        assert not heads_agree(draft, target)


def test_a_head_of_all_tokens_is_the_targets(tmp_path, target):
    opened = open_checkpoint(str(tiny_drafts.write(tmp_path / "d", target, None)), target=target)
    assert opened.output_ids is None
    assert opened.config.outputs == tiny.ROWS
    np.testing.assert_array_equal(opened.tensors.read(HEAD), opened.tensors.read(EMBEDDING))


def test_int8_rows_come_back_with_their_scales(tmp_path, target):
    tensors = tiny_drafts.trained_tensors()
    values, scales = (np.asarray(part) for part in quantize(tensors[Q_PROJ]))
    tensors |= {Q_PROJ: values, Q_PROJ + "_scale": scales}
    path = tiny_drafts.write(tmp_path / "draft", target, IDS, tensors=tensors)
    opened = open_checkpoint(str(path), target=target)
    assert Q_PROJ + "_scale" not in opened.tensors.shapes
    np.testing.assert_array_equal(opened.tensors.read(Q_PROJ), values * scales[:, None])
    part = (slice(3, 9), slice(0, 5))
    np.testing.assert_array_equal(
        opened.tensors.read(Q_PROJ, part), (values * scales[:, None])[part]
    )


def test_a_quantised_target_and_its_converted_form_serve_the_same_draft(tmp_path):
    words = SimpleNamespace(
        size=tiny_models.VOCAB,
        eos_ids={3},
        special_ids={1},
        token=lambda i: f"word {i}",
        save=lambda _: None,
    )
    words.within = lambda _: words

    def opened(path):
        return replace(open_checkpoint(str(path)), load_tokenizer=lambda: words)

    tensors = tiny_models.hf_tensors("llama", tied=True)
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tensors, types={EMBEDDING: "Q8_0"})
    quantised = opened(path)
    orbax.write_checkpoint(
        tmp_path / "converted",
        quantised,
        "bfloat16",
    )
    ids, ties = np.array([1, 3, 17]), {EMBEDDING: EMBEDDING, HEAD: EMBEDDING}
    config = ModelConfig(
        **(vars(quantised.config) | {"tie_embeddings": False, "output_size": len(ids)})
    )
    write_draft(
        tmp_path / "draft",
        config=config,
        tensors={n: a for n, a in tensors.items() if n != EMBEDDING},
        tied=ties,
        output_ids=ids,
        target=identity_of(quantised, ties),
    )
    values = quantised.tensors.read(EMBEDDING)[ids]
    assert (values != tensors[EMBEDDING][ids]).any()  # 8 bits are not 16
    for of in (quantised, opened(tmp_path / "converted")):
        rows = open_checkpoint(str(tmp_path / "draft"), target=of).tensors.read(HEAD)
        np.testing.assert_array_equal(
            rows.astype(ml_dtypes.bfloat16), values.astype(ml_dtypes.bfloat16)
        )


@pytest.mark.parametrize(("count", "cut"), [(9, False), (8, True)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_mesh_gets_the_rows_that_one_device_gets(
    tmp_path, target, count, cut, dtype, monkeypatch
):
    monkeypatch.setattr(products, "backend", lambda *_, **__: "xla")  # a mesh packs no weights
    path = tiny_drafts.write(tmp_path / "draft", target, IDS[-count:])
    mesh = mesh_of(jax.devices()[1:3])
    one = open_model(str(path), dtype, target=target)
    two = open_model(str(path), dtype, target=target, mesh=mesh)
    head = [struct for struct in two.model.parameter_structs() if struct.shape == (count, 32)]
    assert [struct.sharding.is_fully_replicated for struct in head] == [not cut]
    for here, there in zip(one.load(), two.load(), strict=True):
        np.testing.assert_array_equal(np.asarray(here), np.asarray(there))


def test_the_identity_that_two_processes_compare_covers_the_map(tmp_path, draft, target):
    other = tiny_drafts.write(tmp_path / "other", target, np.delete(IDS, 2))
    again = open_target(target.path)
    prints = [
        open_model(str(path), "float32", target=of).fingerprint
        for path, of in ((draft, target), (draft, again), (other, target))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_draft_trained_again_is_another_one_to_costs_and_workers(tmp_path, draft, target):
    """Same target, same map, same place; one value of one tensor."""
    tensors = tiny_drafts.trained_tensors()
    changed = tensors[Q_PROJ].copy()
    changed[-1, -1] += 1
    before = open_model(str(draft), "float32", target=target)
    assert before.fingerprint == open_model(str(draft), "float32", target=target).fingerprint
    tiny_drafts.write(tmp_path / "draft", target, IDS, tensors=tensors | {Q_PROJ: changed})
    after = open_model(str(draft), "float32", target=target)
    assert before.fingerprint != after.fingerprint


def test_a_drafts_own_weights_are_read_once(draft, target, monkeypatch):
    reads = []
    digest = draft_source.DraftTensors.digest
    monkeypatch.setattr(
        draft_source.DraftTensors, "digest", lambda self: (reads.append(1), digest(self))[1]
    )
    opened = open_model(str(draft), "float32", target=target)
    assert not reads
    assert opened.fingerprint == opened.fingerprint
    assert len(reads) == 1


def changed(draft, change):
    """A draft whose configuration was changed."""
    config = json.loads((draft / "config.json").read_text())
    change(config)
    (draft / "config.json").write_text(json.dumps(config))
    return str(draft)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[KEY].update(format=2), "format 2, this version reads 1; use the version"),
        (lambda c: c.update({KEY: "x"}), "format None"),
        (lambda c: c[KEY].pop("tied"), r"malformed \(KeyError: 'tied'\)"),
        (lambda c: c[KEY].update(output_ids="ids"), r"no tensor 'ids', the output ids"),
        (
            lambda c: c[KEY]["tied"].update({HEAD: "embed_tokens.weight"}),
            r"'lm_head.weight' is to be .*has no such tensor \(nearest: 'model.embed_tokens.wei",
        ),
        (lambda c: c[KEY].update(tied=[[HEAD, EMBEDDING]]), "'tied' must map names"),
        (lambda c: c[KEY].update(tied={HEAD: 3}), "'tied' must map names"),
        (lambda c: c[KEY].update(output_ids=["output_ids"]), "'output_ids' must be the name"),
        (lambda c: c[KEY].update(acceptance="0.5"), "'acceptance' must be a number from 0 to 1"),
        (lambda c: c[KEY].update(acceptance=1.5), "'acceptance' must be a number from 0 to 1"),
        (lambda c: c[KEY]["tied"].update({Q_PROJ: Q_PROJ}), "q_proj.weight' is both stored and"),
        (lambda c: c[KEY]["tied"].pop(HEAD), "'lm_head.weight' is missing"),
        (lambda c: c[KEY]["tied"].update({HEAD: NORM}), r"'lm_head.weight' has shape \(9,\)"),
        (lambda c: c.update(hidden_size=16, head_dim=8), "shape"),
    ],
)
def test_an_impossible_draft_configuration_is_refused(draft, target, change, message):
    with pytest.raises(InputError, match=message):
        open_model(changed(draft, change), "float32", target=target)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[::-1], "must ascend, but id 257 follows 258 at place 1"),
        (np.append(IDS[:-1], 400), "output id 400 is out of range, ids are 0 to 258"),
        (np.append(IDS[:-1], tiny.TOKENS), "output id 259 is out of range"),  # padding
        (IDS[IDS != tiny.EOS], r"lack \[256\], which end a text"),
        (IDS[IDS != tiny.PAD], r"lack \[258\], which are special tokens"),
        (np.array(3), r"list of integers, not int32 of shape \(\)"),
        (IDS[None], r"list of integers, not int32 of shape \(1, 9\)"),
    ],
)
def test_an_impossible_map_is_refused(draft, target, ids, message):
    path = draft / "model.safetensors"
    save_file(load_file(path) | {OUTPUT_IDS: np.array(ids, np.int32, order="C")}, path)
    with pytest.raises(InputError, match=message):
        open_model(str(draft), "float32", target=target)


def test_a_draft_of_another_target_is_refused_with_both_hashes(tmp_path, draft, target):
    other = open_target(tiny.write_checkpoint(tmp_path / "other", seed=1))
    ties = {EMBEDDING: EMBEDDING}
    of_draft, of_target = (identity_of(checkpoint, ties).sha256 for checkpoint in (target, other))
    message = (
        f"another target: it was made for .*{of_draft}.* has sha256 {of_target}; give the target"
    )
    with pytest.raises(InputError, match=message):
        open_model(str(draft), "float32", target=other)
    with pytest.raises(InputError, match=message):
        LLM(str(other.path), mode="sd", draft=str(draft), load=False)


@pytest.mark.parametrize("lacks", ["tokens", "end"])
def test_a_draft_of_a_target_with_other_tokens_names_that_target(draft, target, lacks):
    words = target.tokenizer
    size = 200 if lacks == "tokens" else words.size
    eos = words.eos_ids if lacks == "tokens" else words.eos_ids | {7}
    other = SimpleNamespace(
        size=size, eos_ids=eos, special_ids=words.special_ids, token=lambda i: f"word {i}"
    )
    other.within = lambda _: other
    message = f"another target: it was made for .*`target='{target.source}'`.*distill"
    with pytest.raises(InputError, match=message):
        open_checkpoint(str(draft), target=replace(target, load_tokenizer=lambda: other))


def test_a_target_of_another_width_is_named_beside_the_right_one(tmp_path, draft, target):
    place = tiny.write_checkpoint(tmp_path / "wide", hidden_size=64)
    other = open_target(place)
    message = f"shape .*made for {target.source} .* this target is {place}: give .*distill"
    with pytest.raises(InputError, match=message):
        open_checkpoint(str(draft), target=other)


def test_a_draft_is_no_model_of_its_own(draft):
    with pytest.raises(InputError, match=r"is a draft made for the target .*`draft='.*`target='"):
        LLM(str(draft), load=False)


def test_a_file_that_is_cut_off_is_refused(draft, target):
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or damaged"):
        open_model(str(draft), "float32", target=target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {Q_PROJ: t[Q_PROJ].astype(np.float16)}, "q_proj.weight' has type F16"),
        (lambda t: {Q_PROJ: t[Q_PROJ].astype(np.int8)}, "needs .*_scale', .*, not nothing"),
        (lambda t: int8(t, np.ones(31, np.float32)), r"F32 of shape \(32,\), not .*\(31,\)"),
        (lambda t: int8(t, np.ones(32, np.float16)), r"F32 of shape \(32,\), not .*F16"),
        (lambda _: {NORM: np.ones(32, np.int8), NORM + SCALE: ONES}, "int8, which only matrices"),
        (lambda _: {Q_PROJ + SCALE: ONES}, "are scales of a tensor that is not stored as int8"),
        (lambda t: {"other": t[Q_PROJ]}, "'other' is surplus"),
        (lambda t: {HEAD: t[Q_PROJ]}, "'lm_head.weight' is both stored and tied"),
    ],
)
def test_tensors_that_a_draft_does_not_have_are_refused(draft, target, change, message):
    path = draft / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | change(tensors), path)
    with pytest.raises(InputError, match=message):
        open_model(str(draft), "float32", target=target)


def int8(tensors, scales):
    return {Q_PROJ: tensors[Q_PROJ].astype(np.int8), Q_PROJ + SCALE: scales}


@pytest.mark.parametrize("damage", ["ids", "tensors", "shapes"])
def test_errors_in_headers_are_refused_before_the_target_is_read(
    draft, target, monkeypatch, damage
):
    def read(*_args):
        raise AssertionError("the target was read")

    monkeypatch.setattr(draft_source, "identity_of", read)
    with pytest.raises(AssertionError, match="was read"):
        open_model(str(draft), "float32", target=target)
    if damage == "shapes":
        changed(draft, lambda config: config.update(intermediate_size=8))
    else:
        path = draft / "model.safetensors"
        tensors = load_file(path)
        if damage == "tensors":
            del tensors[Q_PROJ]
        else:
            tensors[OUTPUT_IDS] = tensors[OUTPUT_IDS][::-1].copy()
        save_file(tensors, path)
    with pytest.raises(InputError):
        open_model(str(draft), "float32", target=target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_another_user_are_not_called_damaged(draft, target, monkeypatch, name):
    opened = Path.open

    def denied(path, *args, **kwargs):
        if path == draft / name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match=rf"no permission to read .*{name}; give this user access"):
        open_model(str(draft), "float32", target=target)
