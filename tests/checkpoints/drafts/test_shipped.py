from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ssd_jax.checkpoints.drafts import shipped
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from tests.checkpoints.tiny_drafts import open_target, write

ROOT = Path(__file__).parents[3]
OPTIONS = {"mode": "ssd", "draft": "default", "k": "2", "draft_placement": "inline"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafts(tmp_path, path, monkeypatch):
    """Two for the target, and one for another."""
    directory = tmp_path / "drafts"
    directory.mkdir()
    monkeypatch.setattr(shipped, "DIRECTORY", directory)
    target = open_target(path)
    write(directory / "light", target, None, layers=1)
    write(directory / "strong", target, None, layers=2)
    other = open_target(tiny.write_checkpoint(tmp_path / "other-target", seed=1))
    write(directory / "other", other, None, seed=1)
    return directory


def found(target, draft=shipped.DEFAULT):
    return shipped.draft_source(draft, lambda: target, ["ngram"])


def test_the_default_is_the_smallest_for_its_target(drafts, path):
    assert found(open_target(path)) == str(drafts / "light")


@pytest.mark.parametrize("name", ["light", "strong", "other"])
def test_a_draft_of_the_package_has_a_name(drafts, name):
    assert found(None, name) == str(drafts / name)


@pytest.mark.parametrize("source", ["ngram", "pip:x==1", "./light", ".", "..", "/", "", "light/.."])
def test_sources_that_are_no_shipped_draft_stay_as_they_are(drafts, source):
    assert found(None, source) == source


def test_shipped_drafts_are_listed_by_size(drafts):
    drafts = shipped.shipped_drafts()
    assert {draft.path.name for draft in drafts} == {"light", "strong", "other"}
    assert [draft.bytes for draft in drafts] == sorted(draft.bytes for draft in drafts)
    assert drafts[-1].path.name == "strong"


def test_a_target_of_another_shape_is_not_read(drafts, tmp_path, monkeypatch):
    target = open_target(tiny.write_checkpoint(tmp_path / "wide", hidden_size=48))
    monkeypatch.setattr(shipped, "identity_of", None)
    with pytest.raises(InputError, match="no draft comes with"):
        found(target)


def test_two_drafts_of_one_target_take_one_look_at_it(drafts, path, monkeypatch):
    looks = []

    def identity_of(target, tied):
        looks.append(tied)
        return shipped_identity(target, tied)

    shipped_identity = shipped.identity_of
    monkeypatch.setattr(shipped, "identity_of", identity_of)
    assert found(open_target(path)) == str(drafts / "light")
    assert len(looks) == 1


def test_leftovers_of_a_killed_writer_are_no_draft(drafts, path):
    (drafts / "light").rename(drafts / ".light.0123abcd.old")
    assert {draft.path.name for draft in shipped.shipped_drafts()} == {"strong", "other"}


@pytest.mark.parametrize("damage", ["no tensors", "no JSON", "no draft"])
def test_a_damaged_draft_is_named(drafts, path, damage):
    config = drafts / "light" / "config.json"
    if damage == "no tensors":
        (drafts / "light" / "model.safetensors").unlink()
    else:
        config.write_text("{" if damage == "no JSON" else "{}")
    with pytest.raises(InputError, match=r"light is no draft .*; install ssd_jax again"):
        found(open_target(path))


@pytest.mark.parametrize("there", [True, False])
def test_a_package_without_drafts_says_so(tmp_path, path, monkeypatch, there):
    directory = tmp_path / "drafts"
    if there:
        directory.mkdir()
    monkeypatch.setattr(shipped, "DIRECTORY", directory)
    with pytest.raises(InputError, match=r"no draft comes with ssd_jax yet, for .*; name a draft"):
        found(open_target(path))


def test_drafts_of_the_package_are_whole_and_packed():
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "drafts/*/*" in packed["package-data"]["ssd_jax"]
    files = [file for file in shipped.DIRECTORY.rglob("*") if file.is_file()]
    assert all(len(file.relative_to(shipped.DIRECTORY).parts) == 2 for file in files)
    for draft in shipped.shipped_drafts():
        there = {path.name for path in draft.path.iterdir()}
        assert there == {"config.json", "model.safetensors", "README.md"}
    assert sum(file.stat().st_size for file in files) <= 25_000_000


@pytest.mark.parametrize(("draft", "name"), [("default", "light"), ("strong", "strong")])
def test_the_engine_takes_a_draft_of_the_package(drafts, path, draft, name):
    llm = LLM(str(path), **OPTIONS | {"draft": draft}, context=64, load=False)
    assert llm.draft is not None
    assert llm.config.draft == draft
    assert llm.resolved.draft_source == llm.draft.source == str(drafts / name)


def test_a_target_without_one_is_told_which_have_one(drafts, tmp_path):
    target = open_target(tiny.write_checkpoint(tmp_path / "third", seed=2))
    with pytest.raises(InputError, match=r"no draft comes with ssd_jax for .*third.*only for .*"):
        found(target)


def test_a_target_that_lacks_a_tied_tensor_is_another_one(drafts, tmp_path):
    target = open_target(tiny.write_checkpoint(tmp_path / "tied", "qwen2"))
    with pytest.raises(InputError, match="no draft comes with"):
        found(target)


@pytest.mark.more
def test_a_draft_of_the_package_is_like_any_other(drafts, path):
    texts = []
    for settings in ({}, OPTIONS | {"draft": "strong"}):
        with LLM(str(path), dtype="float32", context=64, **settings) as llm:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params)
            texts.append(output.token_ids)
    assert texts[0] == texts[1]
    assert output.metrics["acceptance_length"] > 1.5  # it has all of the target's layers, rounded
