"""Texts of a checkpoint whose matrices are quantised."""

import pytest

from ssd_jax.llm.llm import LLM
from ssd_jax.testing import tiny
from tests.checkpoints.gptq import quantise
from tests.llm.runs import ids, outputs, requests


@pytest.mark.more
def test_text_of_sd_is_that_of_decoding_token_by_token_with_integers_as_they_are(tmp_path):
    tiny.write_checkpoint(
        tmp_path, "qwen3", hidden_size=64, intermediate_size=64, num_attention_heads=8
    )
    quantise(tmp_path)
    settings = {"compile_cache": "off", "dtype": "auto", "context": 320, "slots": 4, "k": 3}
    with LLM(tmp_path, draft="ngram", mode="sd", **settings) as llm:
        assert llm.resolved.dtype == "native"
        asked = requests(llm, "ratio")
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        assert ids(outputs(llm, asked, "sd")) == alone
