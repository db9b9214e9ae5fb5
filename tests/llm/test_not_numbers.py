"""A model whose logits are no numbers: the target's end the request by an error, a draft's change
no text."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax import LLM, SamplingParams
from ssd_jax.engine import event_reports
from ssd_jax.testing import tiny

pytestmark = pytest.mark.more  # tests/sampling has what is emitted

SETTINGS = {"dtype": "float32", "context": 128, "slots": 3, "k": 3, "budget": 6}
SETTINGS |= {"mode": "ssd", "draft_placement": "inline", "compile_cache": "off"}
LENGTH = {"max_tokens": 12, "ignore_eos": True}
GREEDY = SamplingParams(**LENGTH)
TEXTS = "some text", "other"


def checkpoint(path, change=None, **settings):
    """A model, some of whose numbers may be none."""
    tiny.write_checkpoint(path, "qwen2", **settings)
    if change is not None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
    return str(path)


def nothing(tensors):
    norm = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (norm.astype("f4") * np.nan).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def without_draft(tmp_path_factory):
    """A model whose draft computes nothing."""
    root = tmp_path_factory.mktemp("draft")
    draft = checkpoint(root / "draft", nothing, noise=0.04)
    with LLM(checkpoint(root / "target"), draft=draft, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def without_word(tmp_path_factory, without_draft):
    """A model that cannot read a word, which it never says, and the word."""
    root, encode = tmp_path_factory.mktemp("target"), without_draft.tokenizer.encode
    healthy = without_draft.generate(TEXTS, [GREEDY] * 2, mode="ar")
    token_ids = {token for output in healthy for token in output.token_ids}
    read = {word: encode(word, add_special_tokens=False) for word in "bcdfgjkpquvwyz"}
    word, unread = next((word, token) for word, (token,) in read.items() if token not in token_ids)

    def no_word(tensors):
        tensors["model.embed_tokens.weight"][unread] = np.nan

    target, draft = checkpoint(root / "target", no_word), checkpoint(root / "draft", noise=0.04)
    with LLM(target, draft=draft, **SETTINGS) as llm:
        yield llm, word


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_nan_ends_by_an_error_and_no_other(
    without_word, mode, temperature, caplog
):
    llm, word = without_word
    params = GREEDY, SamplingParams(**LENGTH, temperature=temperature), GREEDY
    found = llm.generate([TEXTS[0], f"a {word}", TEXTS[1]], params, mode=mode)
    assert [output.finish_reason for output in found] == ["length", "error", "length"]
    assert found[1].token_ids == []
    again = llm.generate(TEXTS, [GREEDY] * 2, mode=mode)
    assert [found[0].token_ids, found[2].token_ids] == [output.token_ids for output in again]
    (line,) = [record for record in caplog.records if record.name == event_reports.__name__]
    assert "no numbers" in line.getMessage()
    assert line.exc_info is None


def test_what_was_said_before_an_error_is_the_same_in_every_mode(without_draft, tmp_path):
    """The target cannot read a word that it says amid the text; the draft can."""
    (healthy,) = without_draft.generate(TEXTS[:1], [GREEDY], mode="ar")
    end = next(n for n in range(5, 12) if healthy.token_ids[n] not in healthy.token_ids[:n])

    def no_word(tensors):
        tensors["model.embed_tokens.weight"][healthy.token_ids[end]] = np.nan

    target, draft = checkpoint(tmp_path / "target", no_word), checkpoint(tmp_path / "draft")
    with LLM(target, draft=draft, **SETTINGS) as llm:
        for mode in llm.modes:
            (found,) = llm.generate(TEXTS[:1], [GREEDY], mode=mode)
            assert found.finish_reason == "error"
            assert found.token_ids == healthy.token_ids[: end + 1], mode


def test_a_token_of_nan_spoils_no_page_of_others(without_word):
    """Behind a beginning that requests share, and run in one piece with it."""
    llm, word = without_word
    settings = {"dtype": "float32", "context": 64, "attention": "xla", "compile_cache": "off"}
    settings |= {"kv_memory": "1MiB", "page_size": 16, "prefix_caching": True}
    with LLM(llm.config.target, **settings) as separate:
        bad, good, again = (
            separate.generate(["he is on the line " + end], [GREEDY], mode="ar")[0]
            for end in (word, TEXTS[1], TEXTS[1])
        )
    assert [output.finish_reason for output in (bad, good, again)] == ["error", "length", "length"]
    assert good.metrics["cached_tokens"] == 16
    assert good.token_ids == again.token_ids


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_whose_logits_are_nan_changes_no_text(without_draft, mode):
    """Of sampled text that is compared which a filter leaves no choice."""
    one = SamplingParams(**LENGTH, temperature=0.7, top_k=1)
    params = [GREEDY, one]
    expected, found = (without_draft.generate(TEXTS, params, mode=of) for of in ("ar", mode))
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in found] == ["length"] * 2


def test_a_greedy_draft_whose_logits_are_nan_proposes_ids(tmp_path):
    """All rows of the embedding are ids: -1, if it is a token, is the last one."""
    settings = {"vocab_size": 259}
    target = checkpoint(tmp_path / "target", **settings)
    draft = checkpoint(tmp_path / "draft", nothing, noise=0.04, **settings)
    with LLM(target, draft=draft, draft_temperature=0.0, **SETTINGS) as llm:
        last = llm.tokenizer.size - 1
        params = SamplingParams(
            max_tokens=40, ignore_eos=True, temperature=1.0, seed=3, logit_bias={last: 6.0}
        )
        (found,) = llm.generate(["some text"], params)
    assert found.finish_reason == "length"
    assert last in found.token_ids
