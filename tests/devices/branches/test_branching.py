"""Which outcomes get a branch, and with which bonus token each begins."""

import functools

import jax
import numpy as np
import pytest

from ssd_jax.devices.branches import branching
from ssd_jax.devices.branches.branching import Forks, place_forks
from ssd_jax.devices.draft.record import Record
from ssd_jax.sampling.proposal import Proposal
from tests.sampling.rows import QUICKLY

K, W, VOCAB = 4, 5, 9

jitted = jax.jit(place_forks, static_argnums=2, compiler_options=QUICKLY)


def numbers(counts, branches):
    """Of a draft that has all branches."""
    return jitted(counts, np.zeros_like(counts), branches)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def bonus_tokens(records: Record, last, forks: Forks):
    """Bonus tokens of branches with k < L, and of those with k = L."""
    return branching.early_bonus_tokens(records, forks), branching.tail_bonus_tokens(
        last, records, forks
    )


def recorded(tokens, length, candidates) -> Record:
    tokens, length = np.array(tokens, np.int32), np.array(length, np.int32)
    support = tokens[:, :, None]
    proposal = Proposal(tokens, length, support, np.ones(support.shape, np.float32))
    nothing = np.full(tokens.shape, -1), np.zeros((*tokens.shape, 0), np.float32)
    return Record(length * 0, length * 0, proposal, np.array(candidates, np.int32), *nothing)  # pyright: ignore[reportArgumentType]


def records(rows: int) -> Record:
    """Random records of every length; the proposed token is a candidate or not, and lists end."""
    rng = np.random.default_rng(0)
    candidates = rng.permuted(np.tile(np.arange(VOCAB), (rows, K, 1)), axis=-1)[..., :W]
    ends = rng.integers(0, W + 1, (rows, K, 1))
    some = (np.arange(W) < ends) | (rng.random((rows, K, 1)) < 0.5)
    tokens, length = rng.integers(0, VOCAB, (rows, K)), rng.integers(0, K + 1, rows)
    return recorded(tokens, length, np.where(some, candidates, -1))


def fan_outs(length: np.ndarray) -> np.ndarray:
    """Random F_0..F_L [B, K + 1], many of them 0; every fifth row is idle."""
    rng = np.random.default_rng(1)
    shape = (len(length), K + 1)
    counts = rng.integers(0, W + 3, shape) * rng.integers(0, 2, shape)
    counts[np.arange(K + 1) > length[:, None]] = 0
    counts[::5] = 0
    return counts.astype(np.int32)


def numbered(counts) -> list[tuple[int, int]]:
    return [(k, rank) for k, count in enumerate(counts) for rank in range(count)]


def test_branches_are_numbered_by_k_then_by_rank():
    """Some k have none, some have all of them, and what a fan-out leaves is not used."""
    counts = [[2, 0, 1, 3], [0, 0, 0, 1], [0, 7, 0, 0], [0, 0, 0, 0]]
    found = numbers(np.array(counts, np.int32), 7)
    assert found.k.tolist() == [[0, 0, 2, 3, 3, 3, -1], [3, *[-1] * 6], [1] * 7, [-1] * 7]
    assert found.rank.tolist() == [[0, 1, 0, 0, 1, 2, 0], [0] * 7, [*range(7)], [0] * 7]
    assert found.k.dtype == found.rank.dtype == np.int32


def test_ranks_that_others_make_are_left_out():
    """The first branch of a k here is the first, whatever its rank."""
    found = jitted(np.array([[2, 0, 1]]), np.array([[1, 5, 2]]), 3)
    assert [part.tolist() for part in found] == [[[0, 0, 2]], [[1, 2, 2]], [[True, False, True]]]


def test_any_fan_out_is_numbered():
    counts = fan_outs(np.full(400, K))
    budget = int(counts.sum(1).max())
    found = jax.tree.map(np.asarray, numbers(counts, budget))
    for row, counts_of_row in enumerate(counts):
        expected = numbered(counts_of_row) + [(-1, 0)] * (budget - counts_of_row.sum())
        assert list(zip(found.k[row], found.rank[row], strict=True)) == expected


@pytest.mark.parametrize(
    ("length", "counts", "before", "after"),
    [
        (3, [2, 2, 2, 1], [9, 4, 7, 8, 1, 2, -1], [*[-1] * 6, 20]),
        (3, [0, 2, 0, 2], [7, 8, -1, -1, -1, -1, -1], [-1, -1, 20, 30, -1, -1, -1]),
        (2, [1, 1, 2, 0], [9, 7, -1, -1, -1, -1, -1], [-1, -1, 20, 30, -1, -1, -1]),
        (0, [3, 0, 0, 0], [-1] * 7, [20, 30, 10, *[-1] * 4]),
        (3, [3, 0, 3, 1], [9, 4, -1, 1, 2, 3, -1], [*[-1] * 6, 20]),
        (0, [5, 0, 0, 0], [-1] * 7, [20, 30, 10, *[-1] * 4]),
    ],
    ids=["all", "zeros", "short", "empty", "more than before", "more than after"],
)
def test_bonus_tokens_are_the_best_candidates_but_the_proposed_token(length, counts, before, after):
    """The record proposes 5, of c_0 the first, then 6, of c_1 the second, and 7, not in c_2."""
    records = recorded([[5, 6, 7]], [length], [[[5, 9, 4], [7, 6, 8], [1, 2, 3]]])
    forks = numbers(np.array([counts], np.int32), 7)
    found = bonus_tokens(records, np.array([[20, 30, 10]], np.int32), forks)
    assert [tokens.tolist() for tokens in found] == [[before], [after]]


def test_bonus_tokens_of_any_record_and_fan_out():
    """Candidates that end early and fan-outs wider than the lists leave branches without one."""
    drawn = records(400)
    length, tokens = np.asarray(drawn.proposal.length), np.asarray(drawn.proposal.tokens)
    counts = fan_outs(length)
    budget = int(counts.sum(1).max())
    last = np.random.default_rng(2).permuted(np.tile(np.arange(VOCAB), (400, 1)), axis=1)[:, :W]
    before, after = bonus_tokens(drawn, last.astype(np.int32), numbers(counts, budget))
    none = 0
    for row, counts_of_row in enumerate(counts):
        expected = {"before": [-1] * budget, "after": [-1] * budget}
        for number, (k, rank) in enumerate(numbered(counts_of_row)):
            if k < length[row]:
                others = drawn.candidates[row, k].tolist()
                found = [c for c in others if c not in (-1, tokens[row, k])]
            else:
                found = last[row].tolist()
            none += rank >= len(found)
            bonus = found[rank] if rank < len(found) else -1
            expected["before" if k < length[row] else "after"][number] = bonus
        assert {"before": before[row].tolist(), "after": after[row].tolist()} == expected
    assert none > 50  # branches beyond the end of their list are among them
