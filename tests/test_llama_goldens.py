"""SmolLM2's greedy ids against those of llama.cpp, which computes with the quantised weights."""

import json
from pathlib import Path

import pytest

from ssd_jax import LLM, SamplingParams

pytestmark = pytest.mark.slow

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "smollm2-llama.cpp.json").read_text())
MARGIN = {"bfloat16": 0.5}
"""By dtype, a margin of llama.cpp's (in logits) above which another token is an error."""


def sure(golden, bound):
    """The ids before the first one whose margin is not above the bound."""
    margins = golden["margins"]
    end = next((i for i, margin in enumerate(margins) if margin <= bound), len(margins))
    return golden["greedy_ids"][:end]


@pytest.mark.parametrize("dtype", MARGIN)
def test_smollm2_says_what_llama_cpp_is_sure_of(smollm2_path, dtype):
    prompts = GOLDEN["prompts"]
    wanted = [sure(golden, MARGIN[dtype]) for golden in prompts]
    with LLM(str(smollm2_path), dtype=dtype, slots=len(prompts), context=512) as llm:
        for golden in prompts:
            assert llm.encode(golden["messages"]) == golden["prompt_ids"]
        params = SamplingParams(max_tokens=len(prompts[0]["greedy_ids"]), ignore_eos=True)
        outputs = llm.generate([golden["prompt_ids"] for golden in prompts], params)
    for output, ids in zip(outputs, wanted, strict=True):
        assert output.token_ids[: len(ids)] == ids
    assert sum(map(len, wanted)) > 0
