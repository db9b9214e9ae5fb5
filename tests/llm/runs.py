"""Requests of several kinds for a model, and how they are run."""

from __future__ import annotations

from ssd_jax.sampling.params import SamplingParams

PROMPTS = [
    "a",
    "to be or not to be, that is the question",
    "xyxyxyxyxyxyxyxyxyxy",
    "one two three one two three one two",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "?",
    "0101010101",
    "bcbdbcb",
]
LETTERS = {65: 30.0, 66: 29.0, 67: 28.5}  # b, c, d
GREEDY = [
    {"max_tokens": 30},
    {"max_tokens": 1},
    {"max_tokens": 17, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"max_tokens": 24, "min_tokens": 20, "presence_penalty": 0.5},
    {"max_tokens": 9, "logit_bias": {65: 2.0, 66: -3.0}},
    {"max_tokens": 2},
    {"max_tokens": 40, "ignore_eos": True},
    {"max_tokens": 30, "logit_bias": LETTERS, "bad_words": ["bb", "bcb", "cdc", "dbc"]},
]
SAMPLED = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.5, "top_p": 0.9, "seed": 2},
    {},
    {"temperature": 0.4, "top_k": 5, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4},
    {"temperature": 0.7, "seed": 2**63 + 5},
    {"temperature": 0.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 6},
    {"temperature": 0.9, "seed": 7},
]


def requests(llm, verify, **more):
    settings = zip(GREEDY, SAMPLED if verify == "coupled" else [{}] * len(GREEDY), strict=True)
    return [
        llm.request(prompt, SamplingParams(**greedy, **sampled, **more), index)
        for index, (prompt, (greedy, sampled)) in enumerate(zip(PROMPTS, settings, strict=True))
    ]


def outputs(llm, asked, mode=None, k=None):
    found = {}
    for event in llm.run(asked, mode, k):
        if event.output is not None:
            found[event.prompt_index] = event.output
    return [found[request.index] for request in asked]


def run(engine, asked):
    """The outputs of an engine of one's own."""
    found = {}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        found |= {e.prompt_index: e.output for e in engine.step() if e.output is not None}
    return [found[request.index] for request in asked]


def ids(found):
    return [output.token_ids for output in found]
