"""Requests that outgrow the pages that their slots share."""

from __future__ import annotations

import dataclasses

from ssd_jax import SamplingParams
from tests.fakes.grammars import Successors
from tests.llm.paged import PAGE

ENDS = {"min_tokens": 150, "stop_token_ids": range(32)}
"""Many a stop id would come before, and one comes soon after."""
PARAMS = [
    {"logit_bias": {65: 40.0, 66: 39.0, 67: 38.0}, "bad_words": ["bb", "cc", "bcb", "cdc"]},
    {"frequency_penalty": 0.6, "presence_penalty": 0.5},
    {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.3} | ENDS,
    {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"presence_penalty": 0.9, "frequency_penalty": 0.1, "logit_bias": {65: 2.0, 0: 4.0}},
]
"""The youngest, which is put off first, often says id 0, that of padding."""
FEW = {"kv_memory": str(9 * PAGE // 2), "page_size": 64, "context": 400}
"""Nine pages, for three texts that grow to four each."""
ALONE_FEW = FEW | {"kv_memory": str(9 * PAGE // 4)}
"""The same without a draft."""


def asked(llm, **more):
    return [
        llm.request(
            f"Once upon a time {index}" * 3,
            SamplingParams(ignore_eos=True, **{"max_tokens": 170, **params, **more}),
            index,
        )
        for index, params in enumerate(PARAMS)
    ]


def put_off(found):
    return sum(output.metrics["preemptions"] for output in found)


def asked_under_a_grammar(llm):
    """Texts, of which every second one has a grammar without an end."""
    letters = range(40, 60)
    after = {token: {other for other in letters if (other - token) % 3} for token in letters}
    grammar = Successors({None: {*letters}, **after}, llm.tokenizer.size)
    sampled = [{"temperature": 0.8, "seed": 1}, {}, {"frequency_penalty": 0.3}]
    plain = [
        llm.request(
            f"Once upon a time {index}" * 3,
            SamplingParams(max_tokens=170, **sampled[index % 3]),
            index,
        )
        for index in range(6)
    ]
    return [
        request
        if index % 2
        else dataclasses.replace(
            request,
            params=dataclasses.replace(request.params, structured_outputs={"regex": "any"}),
            grammar=grammar,
        )
        for index, request in enumerate(plain)
    ]
