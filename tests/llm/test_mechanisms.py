"""Decoders with mechanisms of any family say in SD and SSD what they say token by token."""

import pytest

from ssd_jax.llm.llm import LLM
from tests.checkpoints import tiny_pair
from tests.llm.runs import ids, outputs, requests
from tests.models.every_mechanism import EVERY_MECHANISM, EXPERTS, OTHER_NORMS

MORE = pytest.mark.more


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        pytest.param(EVERY_MECHANISM, "float32", id="every mechanism"),
        pytest.param(EVERY_MECHANISM, "int8", id="every mechanism, int8", marks=MORE),
        pytest.param(OTHER_NORMS, "bfloat16", id="other norms, bfloat16", marks=MORE),
        pytest.param(EXPERTS, "float32", id="experts"),
        pytest.param(EXPERTS, "bfloat16", id="experts, bfloat16", marks=MORE),
        pytest.param(EXPERTS, "int8", id="experts, int8", marks=MORE),
    ],
)
def test_text_of_every_mode_is_that_of_decoding_token_by_token(tmp_path, changes, dtype):
    target, draft = tiny_pair.write(tmp_path, "granite", **changes)
    settings = {"draft_placement": "inline", "compile_cache": "off", "exact": "bitwise"}
    sizes = {"context": 320, "slots": 4, "k": "3", "budget": "8"}
    with LLM(target, draft=draft, mode="ssd", dtype=dtype, **sizes, **settings) as llm:
        asked = requests(llm, "ratio")
        alone = ids(outputs(llm, asked, "ar"))
        assert len({tuple(text) for text in alone}) > 1
        for mode in ("sd", "ssd"):
            assert ids(outputs(llm, asked, mode)) == alone
