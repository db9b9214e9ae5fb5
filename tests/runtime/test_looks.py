"""What a look-up says of the outcome that came and of the branches that were made for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_jax.runtime.roles import DraftRow, Look, News
from ssd_jax.runtime.speculated import Found, Speculated
from ssd_jax.speculation.backup import make
from ssd_jax.speculation.confidence import UNKNOWN
from ssd_jax.speculation.fan_out_flag import parse
from tests.runtime.test_controller import only, write

K, M = 2, 4


def begun():
    """A sequence whose prompt has been told."""
    each = Speculated(
        0, k=K, fan_out=parse("uniform", K, M), backup=make("none", 0, 0, 99), room=50
    )
    each.prefill([5, 6, 7], 0, last=True)
    assert each.prompted is not None
    each.move(Found(each.prompted, 0, "cold"))
    return each


def news(proposed, bonus, lengths):
    tokens = np.arange(40, 40 + M * K, dtype=np.int32).reshape(1, M, K)
    parts = (np.array([part], np.int32) for part in (proposed, bonus, lengths))
    return News(*parts, tokens, np.full(tokens.shape, UNKNOWN, np.int32), K)


def look_up(each, row):
    each.take(row)
    return each.look_up(row)


def test_looks_name_k_rank_and_the_tokens_that_did_not_win():
    each = begun()
    each.hear(news([0, 0], [10, 11, 12, -1], [2, 2, 1, 0]), (4, 0, 0))
    # Three branches of k = 0 with 5 tokens; the second one comes true, limited to one token.
    found = look_up(each, DraftRow(0, 3, [11], 1))
    assert (found.source, found.look) == ("hit", Look(0, 3, 1, 4))
    each.move(found)
    # L = 1: branches of k = 0 and of k = 1. The outcome (1, 9) has none.
    each.hear(news([42, 0], [13, 14, 15, 16], [2, 2, 1, 1]), (2, 2, 0))
    found = look_up(each, DraftRow(0, 5, [42, 9], 2))
    assert (found.source, found.look) == ("miss", Look(1, 2, None, 6))
    each.move(found)
    each.hear("late", (4, 0, 0))
    row = DraftRow(0, 6, [3], 2)
    found = look_up(each, row)
    assert (found.source, found.look) == ("late", Look(0, 0, None, 0))
    assert look_up(each, row).look is None  # told again after an interruption: counted once


@pytest.mark.parametrize("settings", [{}, {"rank": only(3, 4, 9, 20)}, {"backup": "draft"}])
def test_look_ups_by_k_and_by_rank_add_up(settings):
    metrics = write(k=3, wrong=lambda position: position % 4 == 0, **settings)[0].metrics
    hits, looks = (sum(column) for column in zip(*metrics["hit_rate_by_k"], strict=True))
    assert hits / looks == pytest.approx(metrics["hit_rate"])
    assert looks == hits + sum(metrics["fallbacks"].values())
    assert sum(found for found, _ in metrics["hit_rate_by_rank"]) == hits
    assert metrics["wasted_draft_tokens"] > 0
