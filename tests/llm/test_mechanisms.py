"""Decoders with mechanisms of any family say in SD and SSD what they say token by token."""

import pytest

from ssd_jax.llm.llm import LLM
from tests.checkpoints import tiny_pair
from tests.llm.runs import ids, outputs, requests
from tests.models.every_mechanism import EVERY_MECHANISM, EXPERTS, OTHER_NORMS, SIDE_BY_SIDE

MORE = pytest.mark.more


GPT_OSS = {
    "attention_bias": True,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
    "sliding_window": 24,
    "swiglu_limit": 1.0,
}
GLM4_MOE = {
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
MINIMAX_M2 = {"num_experts_per_tok": 3, "num_local_experts": 6, "rotary_dim": 4}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("gpt_oss", GPT_OSS, id="gpt_oss"),
        pytest.param("glm4_moe", GLM4_MOE, id="glm4_moe", marks=MORE),
        pytest.param("minimax_m2", MINIMAX_M2, id="minimax_m2", marks=MORE),
    ],
)
def test_families_with_experts_say_in_every_mode_what_they_say_token_by_token(
    tmp_path, family, changes
):
    check(tmp_path, family, "bfloat16" if family == "gpt_oss" else "float32", changes)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        pytest.param(EVERY_MECHANISM, "float32", id="every mechanism"),
        pytest.param(EVERY_MECHANISM, "int8", id="every mechanism, int8", marks=MORE),
        pytest.param(OTHER_NORMS, "bfloat16", id="other norms, bfloat16", marks=MORE),
        pytest.param(SIDE_BY_SIDE, "float32", id="side by side"),
        pytest.param(SIDE_BY_SIDE, "bfloat16", id="side by side, bfloat16", marks=MORE),
        pytest.param(EXPERTS, "float32", id="experts"),
        pytest.param(EXPERTS, "bfloat16", id="experts, bfloat16", marks=MORE),
        pytest.param(EXPERTS, "int8", id="experts, int8", marks=MORE),
    ],
)
def test_text_of_every_mode_is_that_of_decoding_token_by_token(tmp_path, changes, dtype):
    check(tmp_path, "granite", dtype, changes)


TREES = {"tree_nodes": 8, "verify": "coupled"}


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        pytest.param("granite", EVERY_MECHANISM, "float32", id="every mechanism"),
        pytest.param("granite", EVERY_MECHANISM, "bfloat16", id="bfloat16", marks=MORE),
        pytest.param("granite", OTHER_NORMS, "int8", id="other norms, int8", marks=MORE),
        pytest.param("granite", EXPERTS, "bfloat16", id="experts", marks=MORE),
        pytest.param("gpt_oss", GPT_OSS, "bfloat16", id="gpt_oss", marks=MORE),
        pytest.param("glm4_moe", GLM4_MOE, "float32", id="glm4_moe", marks=MORE),
    ],
)
def test_trees_of_every_mode_say_what_decoding_token_by_token_says(
    tmp_path, family, changes, dtype
):
    found = check(tmp_path, family, dtype, changes, **TREES)
    assert sum(output.metrics["tree_rounds"] or 0 for output in found) > 20


def check(tmp_path, family, dtype, changes, **more):
    """The outputs of all modes."""
    target, draft = tiny_pair.write(tmp_path, family, **changes)
    settings = {"draft_placement": "inline", "compile_cache": "off", "exact": "bitwise"}
    sizes = {"context": 320, "slots": 4, "k": "3", "budget": "8"}
    found = []
    with LLM(target, draft=draft, mode="ssd", dtype=dtype, **sizes, **settings, **more) as llm:
        asked = requests(llm, more.get("verify", "ratio"))
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        for mode in ("sd", "ssd"):
            spoken = outputs(llm, asked, mode)
            assert ids(spoken) == alone
            found += spoken
    return found
