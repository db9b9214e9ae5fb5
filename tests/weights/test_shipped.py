from __future__ import annotations

import pytest

from ssd_jax.errors import InputError
from ssd_jax.llm import LLM
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.weights import shipped
from tests import tiny
from tests.weights.tiny_drafts import open_target, write

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


@pytest.mark.parametrize(
    ("mode", "name"), [("sd", "light"), ("ssd", "strong"), ("auto", "strong"), ("ar", "strong")]
)
def test_sd_takes_the_lightest_and_the_others_the_strongest(drafts, path, mode, name):
    assert shipped.default_draft(open_target(path), mode) == drafts / name


def test_the_smallest_comes_first(drafts):
    found = shipped.shipped_drafts()
    assert {draft.path.name for draft in found} == {"light", "strong", "other"}
    assert [draft.bytes for draft in found] == sorted(draft.bytes for draft in found)
    assert found[-1].path.name == "strong"


def test_a_target_without_one_is_told_which_have_one(drafts, tmp_path):
    target = open_target(tiny.write_checkpoint(tmp_path / "third", seed=2))
    with pytest.raises(InputError, match=r"no draft comes with ssd_jax for .*third.*only for .*"):
        shipped.default_draft(target, "sd")


def test_a_target_that_lacks_a_tied_tensor_is_another_one(drafts, tmp_path):
    target = open_target(tiny.write_checkpoint(tmp_path / "tied", "qwen2"))
    with pytest.raises(InputError, match="no draft comes with"):
        shipped.default_draft(target, "sd")


def test_default_is_a_draft_like_any_other(drafts, path):
    texts = []
    for settings in ({}, OPTIONS):
        with LLM(str(path), dtype="float32", context=64, compile_cache="off", **settings) as llm:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params)
            texts.append(output.token_ids)
    assert texts[0] == texts[1]
    assert output.metrics["acceptance_length"] > 1.5  # it has all of the target's layers, rounded
