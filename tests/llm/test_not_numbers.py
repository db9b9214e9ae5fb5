"""A model whose logits are no numbers: the target's end the request by an error, a draft's change
no text."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax import LLM, SamplingParams
from ssd_jax.engine.engine import Engine
from ssd_jax.testing import tiny

SETTINGS = {"dtype": "float32", "context": 128, "slots": 3, "compile_cache": "off", "k": 3}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TEXTS = "some text", "other"


def damaged(path, change):
    """A checkpoint some of whose numbers are none."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, one that cannot read a word that it never says, and which; two drafts, one of which
    computes nothing."""
    root = tmp_path_factory.mktemp("numbers")
    paths = {name: root / name for name in ("target", "no word", "draft", "no draft")}
    for name, path in paths.items():
        tiny.write_checkpoint(path, "qwen2", noise=0.04 if "draft" in name else 0.0)

    with LLM(str(paths["target"]), **SETTINGS | {"k": None}) as llm:
        said = {token for output in llm.generate(TEXTS, PARAMS) for token in output.token_ids}
        read = {word: llm.tokenizer.encode(word, add_special=False) for word in "bcdfgjkpquvwyz"}
        word, token = next((word, token) for word, (token,) in read.items() if token not in said)

    def no_word(tensors):
        tensors["model.embed_tokens.weight"][token] = np.nan

    def nothing(tensors):
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = (norm.astype("f4") * np.nan).astype(ml_dtypes.bfloat16)

    damaged(paths["no word"], no_word)
    damaged(paths["no draft"], nothing)
    return {name: str(path) for name, path in paths.items()} | {"word": word}


def mode_of(models, mode, draft="draft"):
    if mode == "ar":
        return {"k": None}
    more = {"draft_placement": "inline", "budget": 6} if mode == "ssd" else {}
    return {"mode": mode, "draft": models[draft], **more}


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_ends_by_an_error_and_its_neighbours_do_not(models, mode, temperature, caplog):
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0, temperature)
    ]
    how = SETTINGS | mode_of(models, mode)
    with LLM(models["no word"], **how) as llm:
        found = llm.generate(
            [TEXTS[0], f"a {models['word']}", TEXTS[1]], [params[0], params[1], params[0]]
        )
        again = llm.generate(TEXTS, PARAMS)
    assert [output.finish_reason for output in found] == ["length", "error", "length"]
    assert found[1].token_ids == []
    assert [found[0].token_ids, found[2].token_ids] == [output.token_ids for output in again]
    (line,) = [record for record in caplog.records if record.name == Engine.__module__]
    assert "no numbers" in line.getMessage()
    assert line.exc_info is None


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_computes_nothing_changes_no_text(models, mode):
    """In ratio a token that a filter leaves alone is drawn whatever the noise."""
    one = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, top_k=1)
    for params in (PARAMS, one):
        with LLM(models["target"], **SETTINGS | mode_of(models, "ar")) as llm:
            expected = llm.generate("some text", params)[0].token_ids
        with LLM(models["target"], **SETTINGS | mode_of(models, mode, "no draft")) as llm:
            (output,) = llm.generate("some text", params)
        assert output.token_ids == expected
        assert output.finish_reason == "length"
