"""Decoders with mechanisms of any family say in SD and SSD what they say token by token."""

import numpy as np
import pytest

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from tests.checkpoints import tiny_pair
from tests.llm.runs import PROMPTS, ids, outputs, requests
from tests.models.every_mechanism import (
    AT_ONCE,
    EVERY_MECHANISM,
    EXPERTS,
    FAMILIES,
    OTHER_NORMS,
    SIDE_BY_SIDE,
)
from tests.models.golden import ON_GPUS, ON_TPUS, execution_as

MORE = pytest.mark.more


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("gpt_oss", "bfloat16"),
        *(
            pytest.param(family, dtype, marks=MORE)
            for family, dtype in (
                ("cohere2", "bfloat16"),
                ("glm4_moe", "float32"),
                ("minimax_m2", "float32"),
                ("phi3", "bfloat16"),
            )
        ),
    ],
)
def test_families_say_in_every_mode_what_they_say_token_by_token(tmp_path, family, dtype):
    check(tmp_path, family, dtype, FAMILIES[family])


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
        pytest.param(AT_ONCE, "bfloat16", id="at once, bfloat16", marks=MORE),
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
        pytest.param("granite", SIDE_BY_SIDE, "bfloat16", id="side by side", marks=MORE),
        pytest.param("granite", EXPERTS, "bfloat16", id="experts", marks=MORE),
        pytest.param("granite", AT_ONCE, "int8", id="at once, int8", marks=MORE),
        *(
            pytest.param(family, FAMILIES[family], dtype, id=family, marks=MORE)
            for family, dtype in (
                ("cohere2", "float32"),
                ("glm4_moe", "float32"),
                ("gpt_oss", "bfloat16"),
            )
        ),
    ],
)
def test_trees_of_every_mode_say_what_decoding_token_by_token_says(
    tmp_path, family, changes, dtype
):
    found = check(tmp_path, family, dtype, changes, **TREES)
    assert sum(output.metrics["tree_rounds"] or 0 for output in found) > 20


@pytest.mark.more
@pytest.mark.parametrize("trees", [{}, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("there", [ON_TPUS, ON_GPUS], ids=["tpu", "gpu"])
def test_as_on_accelerators_every_mode_says_what_decoding_token_by_token_says(
    tmp_path, there, trees
):
    """With pages so small that attention of the layers with a window leaves most of them out."""
    small = {"page_size": 16, "exact": "distribution"}
    check(tmp_path, "granite", "float32", AT_ONCE, there=there, **trees, **small)


def check(tmp_path, family, dtype, changes, *, there=(), **more):
    """The outputs of all modes. `there` are fields of `Execution`, as on an accelerator."""
    target, draft = tiny_pair.write(tmp_path, family, **changes)
    settings = {"draft_placement": "inline", "compile_cache": "off", "exact": "bitwise"}
    settings |= {"context": 320, "slots": 4, "k": "3", "budget": "8"} | more
    found = []
    with execution_as(**dict(there)):
        llm = LLM(target, draft=draft, mode="ssd", dtype=dtype, **settings)
    with llm:
        asked = requests(llm, more.get("verify", "ratio"))
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        for mode in ("sd", "ssd"):
            spoken = outputs(llm, asked, mode)
            assert ids(spoken) == alone
            found += spoken
    return found


@pytest.mark.more
@pytest.mark.parametrize("changes", [AT_ONCE, SIDE_BY_SIDE], ids=["at once", "side by side"])
def test_a_draft_that_is_the_target_is_accepted_and_foreseen(tmp_path, changes):
    """What it proposes in branches is what it says behind the whole text: no other is accepted."""
    target, _ = tiny_pair.write(tmp_path, "granite", **changes)
    settings = {"context": 320, "slots": 2, "k": "3", "budget": "8", "dtype": "float32"}
    settings |= {"verify": "coupled", "draft_placement": "inline", "compile_cache": "off"}
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=heat, top_k=40, seed=3)
        for heat in (0.0, 0.8, 0.0, 0.8)
    ]
    with LLM(target, draft=target, mode="ssd", **settings) as llm:
        found = llm.generate(PROMPTS[1:5], params)
    for output in found:
        accepted, judged = np.sum(output.metrics["acceptance_by_position"], axis=0)
        assert accepted > 0.97 * judged
        assert output.metrics["hit_rate"] > 0.97
