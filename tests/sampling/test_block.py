"""Block verification against its definition, token for token, by the same noise."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS, mesh_of
from ssd_jax.sampling import keys, verification
from ssd_jax.sampling.judgement import block, rejection
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import VARIANTS
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import slow_probs
from tests.sampling.rows import QUICKLY, empty_history, rows
from tests.selection import cases

ROWS, K, VOCAB, N = 240, 5, 12, 6
SETTINGS = ({}, {"temperature": 0.7, "top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05})


@functools.cache
def case():
    """Logits [rows, K + 1, V] and proposals of 0 to K tokens, drawn from a q near p, sparse."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1.5, (ROWS, K + 1, VOCAB)).astype(np.float32)
    near = logits[:, :K] + rng.normal(0, 0.8, (ROWS, K, VOCAB))
    support = np.argsort(-near, axis=-1)[..., :N].astype(np.int32)
    weights = np.exp(np.take_along_axis(near, support, axis=-1))
    q = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    chosen = (rng.random((ROWS, K, 1)) > np.cumsum(q, axis=-1)).sum(axis=-1).clip(0, N - 1)
    tokens = np.take_along_axis(support, chosen[..., None], axis=-1)[..., 0]
    length = rng.integers(0, K + 1, ROWS).astype(np.int32)
    sampling = rows(*(SETTINGS[row % len(SETTINGS)] | {"request": row} for row in range(ROWS)))
    start = rng.integers(0, 1000, ROWS).astype(np.int32)
    return logits, Proposal(tokens, length, support, q), sampling, start


def noise(row: int, position: int, purpose: Purpose) -> keys.Key:
    _, _, sampling, start = case()
    at = (jnp.asarray([value], jnp.int32) for value in (start[row], position))
    return keys.derive(
        jnp.asarray(sampling.seed[row : row + 1]),
        jnp.asarray(sampling.request[row : row + 1]),
        *at,
        purpose,
    )


@functools.cache
def by_definition() -> list[tuple[int, int]]:
    """(k, t*) of each row in float64."""
    logits, proposal, _, start = case()
    found = []
    for row, length in enumerate(proposal.length.tolist()):
        setting = SETTINGS[row % len(SETTINGS)]
        p = np.stack([slow_probs(logit, **setting) for logit in logits[row]])
        q = np.zeros((K, VOCAB))
        np.put_along_axis(q, proposal.support[row], proposal.q[row].astype(float), axis=-1)
        tokens, c, k = proposal.tokens[row], [1.0], 0
        for place in range(length):
            x = tokens[place]
            c.append(min(1.0, c[-1] * p[place, x] / q[place, x]))
        for i in range(1, length + 1):
            h = c[i]
            if i < length:
                surplus = np.maximum(c[i] * p[i] - q[i], 0).sum()
                h = 1.0 if c[i] == 1 else surplus / (surplus + 1 - c[i])
            u = float(keys.uniform(noise(row, start[row] + i, Purpose.ACCEPT))[0])
            k = i if u < h else k
        weights = p[k] if k == length else np.maximum(c[k] * p[k] - q[k], 0)
        gumbel = keys.gumbel(noise(row, start[row] + 1 + k, Purpose.BONUS), VOCAB)[0]
        with np.errstate(divide="ignore"):
            found.append((k, int(np.argmax(np.log(weights) + np.asarray(gumbel)))))
    return found


def outcomes(variant: str, rule: str = "block", mesh: Mesh | None = None) -> list[tuple[int, int]]:
    """The same by the code, compiled from what its functions are now."""
    law = {"tokens": VOCAB, "rule": rule, "parts": VARIANTS[variant]}

    def judge(*arguments):
        return verification.verify(*arguments, **law)

    logits, *others = case()
    if mesh is not None:  # as programs of a target
        replicated = PartitionSpec()
        specs = {"in_specs": replicated, "out_specs": replicated, "axis_names": {DATA_AXIS}}
        judge = jax.shard_map(judge, mesh=mesh, check_vma=False, **specs)
        columns = NamedSharding(mesh, PartitionSpec(None, None, TENSOR_AXIS))
        logits = jax.device_put(logits, columns)
    compiled = jax.jit(judge, compiler_options=QUICKLY)
    outcome = compiled(logits, *others, empty_history(ROWS, VOCAB))
    return list(zip(outcome.accepted.tolist(), outcome.bonus.tolist(), strict=True))


@pytest.mark.parametrize("variant", ["any", "full"])
def test_every_row_ends_as_the_definition_says(variant):
    expected = by_definition()
    assert {k for k, _ in expected} == {*range(K + 1)}
    assert outcomes(variant) == expected


@pytest.mark.parametrize("variant", cases(["any", "full"], "full"))
def test_rows_end_alike_where_devices_share_the_vocabulary(variant):
    assert outcomes(variant, mesh=mesh_of(jax.devices()[:4])) == by_definition()


def test_a_proposal_of_one_token_is_judged_as_by_the_ratio_rule():
    at_most_one = case()[1].length <= 1
    both = zip(outcomes("any"), outcomes("any", "ratio"), strict=True)
    assert all(one == other for (one, other), short in zip(both, at_most_one, strict=True) if short)


FAULTS = {
    "the uncapped product": Edit(
        block, "_survival", "jnp.minimum(survival[-1] * p / q, 1.0)", "survival[-1] * p / q"
    ),
    "each token by itself": Edit(block, "_survival", "survival[-1] * p / q", "p / q"),
    "K for the row's own L": Edit(
        block, "judge", "count == proposal.length[:, None]", "count == c.shape[1]"
    ),
    "the first token that fails ends it": Edit(
        block,
        "judge",
        "jnp.where(passes & is_proposed(proposal), count, 0)",
        "jnp.where(jnp.cumprod(passes & is_proposed(proposal), axis=1) > 0, count, 0)",
    ),
    "a surplus of p, not c p": Edit(block, "_surplus", "scale[:, None] * p", "p"),
    "a residual of p, not c p": Edit(block, "judge", "accepted, scale)", "accepted, None)"),
    "a residual of the next token's c p": Edit(
        block, "judge", "take_column(survival, accepted)", "take_column(c, accepted - 1)"
    ),
    "q of the token before": Edit(
        rejection, "padded_q", "((0, 0), (0, 1), (0, 0)))", "((0, 0), (1, 0), (0, 0)))"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault):
    with edited([fault]):
        found = outcomes("full")
    assert found != by_definition()
