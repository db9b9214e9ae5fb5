"""A draft that lacks the target's last tokens, as Gemma 3's smallest models lack one of the larger
ones': it never proposes them, and reads them as the last that it has."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from tests.llm.runs import ids, outputs

ADDED = [f"<added {i}>" for i in range(3)]
FOREIGN = range(tiny.TOKENS, tiny.TOKENS + len(ADDED))
OFTEN = dict.fromkeys(FOREIGN, 6.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The draft is the target with a little noise, without the last rows of the embedding."""
    root = tmp_path_factory.mktemp("smaller")
    target = tiny.write_checkpoint(root / "target", "llama")
    draft = tiny.write_checkpoint(root / "draft", "llama", noise=0.02)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(ADDED)
    tokenizer.save(str(target / "tokenizer.json"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": tiny.TOKENS}))
    tensors = load_file(draft / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][: tiny.TOKENS]
    save_file(tensors, draft / "model.safetensors")
    return target, draft


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("sd", {}),
        ("ssd", {"draft_placement": "inline"}),
        pytest.param(
            "ssd", {"draft_placement": "process", "draft_dtype": "int8"}, marks=pytest.mark.more
        ),
        pytest.param(
            "ssd", {"draft_placement": "inline", "tree_nodes": "6"}, marks=pytest.mark.more
        ),
    ],
)
def test_texts_are_those_of_the_target(pair, mode, settings):
    target, draft = map(str, pair)
    more = {"budget": "8"} if mode == "ssd" else {}
    with LLM(
        target,
        mode=mode,
        draft=draft,
        dtype="float32",
        exact="bitwise",
        verify="coupled",
        slots=4,
        k="3",
        context=256,
        compile_cache=jax.config.jax_compilation_cache_dir,
        **more,
        **settings,
    ) as llm:
        assert llm.target.tokenizer.size == tiny.TOKENS + len(ADDED)
        rng = np.random.default_rng(0)
        asked = []
        for index, temperature in enumerate((0.0, 0.7, 0.0, 0.7)):
            prompt = rng.integers(0, 256, 40)
            prompt[2] = FOREIGN[-1]
            params = SamplingParams(
                max_tokens=40,
                temperature=temperature,
                seed=1,
                logit_bias=OFTEN if index > 1 else None,
                ignore_eos=True,
            )
            asked.append(llm.request(prompt.tolist(), params, index))
        alone, spoken = outputs(llm, asked, "ar"), outputs(llm, asked, mode)
    assert ids(alone) == ids(spoken)
    said = {token for text in ids(alone) for token in text}
    assert said & {*FOREIGN}
    assert said - {*FOREIGN}
    judged = [
        metrics["acceptance_by_position"] for metrics in (spoken[0].metrics, spoken[1].metrics)
    ]
    accepted, proposed = np.concatenate(judged).sum(axis=0)
    assert accepted > 0.3 * proposed  # a lookup beyond the embedding gives no numbers
