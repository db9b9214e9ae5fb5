"""Texts of a checkpoint whose matrices are quantised."""

from pathlib import Path

import pytest

from ssd_jax.devices.opening import models as opened
from ssd_jax.kernels.experts.api import XLA, ExpertBackend
from ssd_jax.llm.llm import LLM
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_gpt_oss, tiny_pair
from tests.checkpoints.float8 import quantise_float8
from tests.checkpoints.gptq import quantise
from tests.llm.runs import ids, outputs, requests
from tests.models.golden import ON_TPUS, execution_as


@pytest.mark.more
@pytest.mark.parametrize("quantised", [quantise, lambda path: quantise_float8(path, (32, 128))])
def test_text_of_sd_is_that_of_decoding_token_by_token_with_weights_as_they_are(
    tmp_path, quantised
):
    tiny.write_checkpoint(
        tmp_path, "qwen3", hidden_size=64, intermediate_size=64, num_attention_heads=8
    )
    quantised(tmp_path)
    settings = {"compile_cache": "off", "dtype": "auto", "context": 320, "slots": 4, "k": 3}
    with LLM(tmp_path, draft="ngram", mode="sd", **settings) as llm:
        assert llm.resolved.dtype == "native"
        asked = requests(llm, "ratio")
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        assert ids(outputs(llm, asked, "sd")) == alone


@pytest.mark.parametrize("quantised", [quantise, lambda path: quantise_float8(path, (32, 64))])
def test_every_mode_over_devices_says_what_one_token_at_a_time_does_with_weights_in_groups(
    tmp_path, quantised
):
    target, draft = tiny_pair.write(tmp_path, "qwen3", hidden_size=64, intermediate_size=192)
    quantised(Path(target))
    settings = {"compile_cache": "off", "draft_placement": "inline", "mesh": "tensor=2"}
    sizes = {"context": 320, "slots": 4, "k": "3", "budget": "8"}
    settings |= sizes | {"exact": "bitwise", "draft": draft, "mode": "ssd"}
    with LLM(target, dtype="native", draft_dtype="bfloat16", **settings) as llm:
        assert llm.target.model.has_groups
        assert any("takes time" in line for line in llm.notices)
        asked = requests(llm, "ratio")
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        for mode in ("sd", "ssd"):
            assert ids(outputs(llm, asked, mode)) == alone
    settings = {"compile_cache": "off", "mesh": "tensor=2", "context": 320, "slots": 4}
    with LLM(target, dtype="bfloat16", mode="ar", **settings) as plain:
        assert ids(outputs(plain, asked, "ar")) == alone


@pytest.mark.parametrize(
    ("mesh", "expert_parallel", "experts"),
    [
        *(pytest.param("tensor=2", split, XLA, marks=pytest.mark.more) for split in (False, True)),
        (None, False, ExpertBackend("pallas_tpu", interpret=True)),
    ],
    ids=["channels", "experts", "kernel"],
)
def test_every_mode_on_tpus_says_what_one_token_at_a_time_does_with_experts_in_mxfp4(
    tmp_path, monkeypatch, mesh, expert_parallel, experts
):
    quantised, floats = tiny_gpt_oss.published()
    target = tiny_gpt_oss.write(
        tmp_path / "mxfp4", quantised, quantization_config=tiny_gpt_oss.METHOD
    )
    dense = tiny_gpt_oss.write(tmp_path / "floats", floats)
    monkeypatch.setattr(opened, "experts_backend_for", lambda *_: experts)
    settings = {"compile_cache": "off", "mesh": mesh, "context": 320, "slots": 4}
    more = {"draft": str(target), "draft_dtype": "native", "k": "2", "budget": "6"}
    more |= {"draft_placement": "inline", "mode": "ssd", "expert_parallel": expert_parallel}
    with execution_as(**ON_TPUS, linear="xla"):
        llm = LLM(target, dtype="native", **settings | more)
        plain = LLM(dense, dtype="bfloat16", mode="ar", **settings)
    with llm, plain:
        assert llm.target.model.has_groups
        asked = requests(llm, "ratio")
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        for mode in ("sd", "ssd"):
            assert ids(outputs(llm, asked, mode)) == alone
        assert ids(outputs(plain, asked, "ar")) == alone
