"""Thousands of short texts of an engine, and the law that they should follow.

The law is worked out from the model's own logits, teacher-forced over every text that the
truncation leaves possible, with the slow reference. Greedy requests run in the same batches.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ssd_jax import LLM, SamplingParams
from ssd_jax.engine.engine import Engine
from ssd_jax.testing import tiny
from tests.models.golden import our_logits
from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.reference import next_law

COUNT = 3  # tokens of a text that are compared
MORE = 3  # that are asked for, so that no proposal and no branch is cut before
LETTERS = (97, 98, 99)
# The bias leaves three letters, so that counts are large, and the prompt has all their pairs, so
# that n-grams always match. Frequency penalties tell tokens in flight from tokens that are not.
COMMON: dict = {"logit_bias": dict.fromkeys(LETTERS, 30.0)}
SAMPLED: dict[str, dict] = {
    "top-k": COMMON | {"temperature": 1.0, "top_k": 3},
    "top-p, frequency": COMMON | {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.8},
}
GREEDILY: dict = COMMON | {"temperature": 0.0}
EACH = 200
MANY = 600
"""Sampled requests of each setting, in the default suite and in the slow one."""
GREEDY = 20
PROMPT = list(b"aabacbbcca")
FEW_BRANCHES = {
    "budget": "2",
    "proposal_support": "2",
    "backup": "draft",
    "fan_out": "confidence",
}


def write_checkpoints(root, family="qwen3", **changes):
    """A target, and a draft that is unlike it."""
    return [
        tiny.write_checkpoint(root / f"noise-{noise}", family, noise=noise, **changes)
        for noise in (0, 0.1)
    ]


def laws_of(target):
    """Texts and their probabilities under each setting."""
    return {name: text_law(target, settings) for name, settings in SAMPLED.items()}


def as_rows(settings):
    """The settings as the slow reference takes them."""
    bias = settings["logit_bias"]
    return settings | {"bias_ids": tuple(bias), "bias": tuple(bias.values())}


def text_law(path, settings):
    law = {(): 1.0}
    for _ in range(COUNT):
        texts = np.array([[*PROMPT, *text] for text in law])
        logits = our_logits(path, texts)[:, -1, : tiny.TOKENS]
        longer = {}
        for (text, probability), row in zip(law.items(), logits, strict=True):
            following = next_law(row, as_rows(settings), PROMPT, text)
            for token in np.flatnonzero(following):
                longer[*text, int(token)] = probability * following[token]
        law = longer
    return law


def requests(llm, count=EACH):
    """Shuffled, so that settings meet each other in the slots."""
    settings = [*SAMPLED.values()] * count + [GREEDILY] * GREEDY
    asked = [
        llm.request(
            PROMPT,
            SamplingParams(max_tokens=COUNT + MORE, ignore_eos=True, seed=11, **chosen),
            index,
        )
        for index, chosen in enumerate(settings)
    ]
    return [asked[place] for place in np.random.default_rng(0).permutation(len(asked))]


def counted(law, texts):
    """How often each text of a law came, others in the last cell; and the law, for `p_value`."""
    places = {text: place for place, text in enumerate(law)}
    cells = [places.get(tuple(text[:COUNT]), len(places)) for text in texts]
    return np.bincount(cells, minlength=len(places) + 1), np.array([*law.values(), 0.0])


def p_values(laws, outputs):
    """Of the outputs by request index."""
    values = {
        name: [outputs[index] for index in range(place, len(outputs) - GREEDY, 2)]
        for place, name in enumerate(SAMPLED)
    }
    return {name: p_value(*counted(laws[name], texts)) for name, texts in values.items()}


def run(engine, asked):
    """Token ids of every request by its index, and the metrics of all."""
    for request in asked:
        engine.add(request)
    outputs, figures = {}, []
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                outputs[event.prompt_index] = event.output.token_ids
                figures.append(event.output.metrics)
    return outputs, figures


def open_llm(checkpoints, mode, drafter="model", **settings):
    target, draft = checkpoints
    return LLM(
        str(target),
        mode=mode,
        draft="ngram" if drafter == "ngram" else str(draft),
        dtype="float32",
        slots=4,  # prompts come in one a round, and short texts leave as soon
        k="2",
        context=32,
        compile_cache="off",
        draft_placement="inline" if mode == "ssd" else None,
        **settings,
    )


def engine_with(llm, mode, change):
    """An engine of a model whose drafter was changed."""
    roles = llm.loaded.roles(mode, llm.config.speculated)
    return Engine(
        roles.target,
        llm.tokenizer.open_stream,
        llm.tokenizer.eos_ids,
        drafter=change(roles.drafter),
    )


def mix_up(proposal):
    """Draws from q, and ships it with the probabilities of its ids mixed up."""
    q = np.asarray(proposal.q)
    both = np.all(q > 0, axis=-1, keepdims=True)
    return proposal._replace(q=np.where(both, q[..., ::-1], q))


def assert_lawful(llm, laws, engine, count=EACH, **settings):
    """Sampled texts follow the law, greedy ones are plain decoding; returns metrics of requests.

    `settings` are those of requests.
    """
    asked = [dataclasses.replace(request, **settings) for request in requests(llm, count)]
    outputs, metrics = run(engine, asked)
    assert len(outputs) == 2 * count + GREEDY
    params = SamplingParams(max_tokens=COUNT + MORE, ignore_eos=True, **GREEDILY)
    (plain,) = llm.generate([PROMPT], params, mode="ar")
    greedy = {tuple(outputs[2 * count + index]) for index in range(GREEDY)}
    assert greedy == {tuple(plain.token_ids)}
    assert min(p_values(laws, outputs).values()) > ALPHA
    return metrics
