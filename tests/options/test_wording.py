"""Messages name settings as keywords in Python and as flags on the command line."""

import pytest

from ssd_jax.options.wording import as_flags


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("lower `context`", "lower --context"),
        (
            "give `dtype='int8'` (`draft_dtype` of a draft)",
            "give --dtype=int8 (--draft_dtype of a draft)",
        ),
        ("leave out `chat_template=False`", "leave out --chat_template=false"),
        ("`mesh='data=2,tensor=4'`", "--mesh=data=2,tensor=4"),
        (
            "`budget=8`, `ssd-jax distill` or `SamplingParams(seed=...)`",
            "--budget=8, `ssd-jax distill` or `SamplingParams(seed=...)`",
        ),
        ("`a b` and `llama-gguf-split --merge`", "`a b` and `llama-gguf-split --merge`"),
    ],
)
def test_settings_in_a_message_become_flags(message, shown):
    assert as_flags(message) == shown
