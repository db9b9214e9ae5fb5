"""The coupled rule where branches cost little: only rows that the text comes through are drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.rows import LONG
from ssd_jax.kernels.verify.positions import Positions, TargetProbs
from ssd_jax.sampling import verification
from ssd_jax.sampling.judgement import coupled
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import ON_DEVICE, VARIANTS
from tests.sampling.rows import QUICKLY, empty_history, rows
from tests.sampling.trees import path_of, random_parents, walk

ROWS, NODES = 6, 7


def trees(rng, says: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, tokens of which half are the target's behind their parents, and lengths."""
    parents = random_parents(rng, ROWS, NODES)
    right = np.take_along_axis(says, parents, axis=1)
    tokens = np.where(rng.random(right.shape) < 0.5, right, right + 1).astype(np.int32)
    return parents, tokens, rng.integers(NODES - 2, NODES + 1, ROWS).astype(np.int32)


def proposed(tokens: np.ndarray, lengths: np.ndarray) -> Proposal:
    return Proposal(tokens, lengths, tokens[:, :, None], np.ones((*tokens.shape, 1), np.float32))


@pytest.mark.parametrize("vocab", [50, LONG])
def test_draws_nothing_behind_rows_that_the_text_does_not_come_through(vocab):
    says = np.random.default_rng(1).integers(0, 40, (ROWS, NODES + 1)).astype(np.int32)
    parents, tokens, lengths = trees(np.random.default_rng(2), says)
    drawn: list[int] = []

    def draw(block, _key, _residual):
        jax.debug.callback(lambda numbers: drawn.extend(numbers.tolist()), block.number)
        return jnp.asarray(says).reshape(-1)[block.number]

    def judged():
        number = jnp.arange(ROWS * (NODES + 1))
        sequence = number // (NODES + 1)
        logits = jnp.zeros((number.size, vocab))
        positions = Positions(logits, sequence, number, number, number > 0, number, number)
        sampling = rows(*({"request": row} for row in range(ROWS)))
        target = TargetProbs(lambda _: logits, lambda: logits[:, 0], draw, uses_cond=True)
        start = jnp.zeros(ROWS, jnp.int32)
        return coupled.judge(
            target, positions, proposed(tokens, lengths), sampling, start, jnp.asarray(parents)
        )

    outcome = jax.jit(judged)()
    jax.effects_barrier()
    accepted = [
        walk(parents[row], tokens[row], int(lengths[row]), says[row]) for row in range(ROWS)
    ]
    assert outcome.accepted.tolist() == [len(path) for path in accepted]
    last = [path[-1] + 1 if path else 0 for path in accepted]
    assert outcome.bonus.tolist() == says[np.arange(ROWS), last].tolist()
    if vocab < LONG:  # short rows are drawn side by side
        return
    needed = [
        row * (NODES + 1) + node
        for row in range(ROWS)
        for node in range(NODES + 1)
        if _is_said(parents[row], tokens[row], int(lengths[row]), says[row], node)
    ]
    assert sorted(drawn) == needed
    assert len(needed) < ROWS * NODES / 2


def _is_said(parents, tokens, length: int, says, row: int) -> bool:
    """Whether the target says every token on the path to a row."""
    return all(
        node < length and tokens[node] == says[parents[node]] for node in path_of(parents, row)
    )


@functools.partial(jax.jit, static_argnames=("tokens", "rule", "parts"), compiler_options=QUICKLY)
def verify(*arguments, **law):
    return verification.verify(*arguments, **law)


def test_long_rows_get_the_outcomes_of_drawing_all_at_once():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (ROWS, NODES + 1, LONG)).astype(np.float32)
    logits[:, :, :3] += 8  # so that some of the tree is accepted
    parents = random_parents(rng, ROWS, NODES)
    tokens = rng.integers(0, 3, (ROWS, NODES)).astype(np.int32)
    settings = [{"top_p": 0.9}, {}, {"presence_penalty": 2.0}, {"temperature": 0.0}, {}, {}]
    sampling = rows(*(row | {"request": number} for number, row in enumerate(settings)))
    start, history = np.arange(ROWS, dtype=np.int32) * 9, empty_history(ROWS, LONG)
    case = logits, proposed(tokens, np.full(ROWS, NODES, np.int32)), sampling, start, history
    common = {"tokens": LONG, "rule": "coupled", "parents": parents}
    found = verify(*case, parts=ON_DEVICE, **common)
    expected = verify(*case, parts=VARIANTS["full"], **common)
    assert [array.tolist() for array in found] == [array.tolist() for array in expected]
    assert found.accepted.max() >= 2
