"""What cutting q costs: against a whole forward, and by hand."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from ssd_jax.tools.bench import report, support
from ssd_jax.tools.bench.perplexity import TeacherForced
from ssd_jax.tools.bench.support import Overlaps, Support, TargetText, measure_supports
from tests.models.golden import FLOAT32, Runner, parameters

OUTPUTS = np.arange(3, tiny.TOKENS, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def target(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    model = FunctionalModel(checkpoint.config, FLOAT32)
    return model, parameters(checkpoint, model)


def draft(outputs=None):
    """Random weights over the same vocabulary, or over some outputs of it."""
    config = ModelConfig.from_hf(tiny.config("llama"))
    if outputs is not None:
        config = dataclasses.replace(config, output_size=len(outputs), tie_embeddings=False)
    model = FunctionalModel(config, FLOAT32, output_ids=outputs)
    random = np.random.default_rng(5)
    return model, [
        jax.numpy.asarray(0.3 * random.standard_normal(struct.shape), struct.dtype)
        for struct in model.parameter_structs()
    ]


def law(logits, temperature):
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64) / temperature)
    return weights / weights.sum(axis=1, keepdims=True)


def cut(q, n):
    """Its n likeliest, renormalised."""
    kept = np.where(q >= np.sort(q, axis=1)[:, -n][:, None], q, 0.0)
    return kept / kept.sum(axis=1, keepdims=True)


CASES = list(itertools.product([40, 300], [(1.0, None), (0.5, 1.3)], [None, OUTPUTS]))
"""Length, temperatures, and outputs of the draft."""


@pytest.mark.more
@pytest.mark.parametrize(
    ("length", "temperatures", "outputs"),
    # Each value of each in `make test-more`.
    [
        pytest.param(*case, marks=[] if n in (2, 5) else pytest.mark.slow)
        for n, case in enumerate(CASES)
    ],
)
def test_acceptance_is_that_of_whole_forwards(target, length, temperatures, outputs):
    """Texts shorter than a chunk and longer; twice, since pages are used again."""
    made, sizes = draft(outputs), (1, 4, 30)
    temperature, own = temperatures
    overlaps = Overlaps(
        target,
        made,
        tokens=tiny.TOKENS,
        longest=length,
        supports=sizes,
        params=SamplingParams(temperature=temperature),
        draft_temperature=own,
    )
    for seed in range(2):
        tokens = np.random.default_rng(seed).integers(0, tiny.TOKENS, length).astype(np.int32)
        found = overlaps(TargetText(tokens, 9))
        p = law(whole(target, tokens)[:, : tiny.TOKENS], temperature)
        logits = whole(made, tokens)
        q = law(logits[:, : tiny.TOKENS] if outputs is None else logits, own or temperature)
        p = p if outputs is None else p[:, outputs]
        expected = [np.minimum(p, cut(q, n)).sum(axis=1) for n in (*sizes, q.shape[1])]
        np.testing.assert_allclose(found, np.array(expected)[:, 8:-1], atol=2e-4)
        assert found.shape == (len(sizes) + 1, length - 9)


def whole(made, tokens):
    model, weights = made
    if model.output_ids is None:
        return np.asarray(Runner(model, weights, slots=1, context=len(tokens))(tokens[None])[0])
    chunks = TeacherForced(model, weights, longest=len(tokens)).logits(tokens)
    return np.concatenate(list(chunks))[: len(tokens)]


def test_losses_are_weighed_by_tokens_and_told_by_text():
    texts = [TargetText(np.zeros(size, np.int32), 1) for size in (2, 4)]
    values = {1: np.array([[0.2], [0.5]]), 3: np.array([[0.6, 0.6, 0.9], [0.7, 0.8, 0.9]])}
    seen = []
    cut, full = measure_supports(
        lambda text: values[len(text.tokens) - 1],
        texts,
        [16],
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]
    assert (cut.n, full.n) == (16, None)
    assert cut.acceptance == pytest.approx((0.2 + 0.6 + 0.6 + 0.9) / 4)
    assert cut.lost == pytest.approx((0.3 + 0.1 + 0.2) / 4)
    assert cut.by_text.value == pytest.approx((0.3 + 0.1) / 2)
    assert full.lost == full.by_text.value == 0


def test_table_and_json_say_what_was_lost():
    texts = [TargetText(np.zeros(3, np.int32), 1)] * 6
    entries = measure_supports(lambda _: np.array([[0.5, 0.5], [0.5, 0.75]]), texts, [4])
    page = io.StringIO()
    Console(width=100, file=page, color_system=None).print(
        support.supports_table(entries, judged=12)
    )
    for part in ("full", "0.5000", "0.6250", "0.1250 (0.1250 to 0.1250)", "12 tokens"):
        assert part in page.getvalue()
    document = report.document("support", settings={}, environment={}, judged=12, supports=entries)
    document = json.loads(json.dumps(document, allow_nan=False))
    assert [entry["n"] for entry in document["supports"]] == [4, None]
    assert document["suite"] == "support"
    assert isinstance(entries[0], Support)
