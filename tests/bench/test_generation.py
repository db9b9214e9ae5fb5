"""One prompt through a model, timed."""

from types import SimpleNamespace

import pytest

from ssd_jax.bench.generation import prompt_result
from ssd_jax.bench.prompts import Prompt
from ssd_jax.errors import SsdError
from ssd_jax.runtime.request import SamplingParams


def test_an_answer_that_ends_by_an_error_has_no_figures():
    output = SimpleNamespace(finish_reason="error", metrics={})
    llm = SimpleNamespace(
        request=lambda *_: None,
        run=lambda *_: [SimpleNamespace(token_ids=[65], output=output)],
    )
    prompt = Prompt(set="own", index=3, text="x")
    with pytest.raises(SsdError, match=r"3.* ended by an error"):
        prompt_result(llm, prompt, SamplingParams(), "ar", None)
