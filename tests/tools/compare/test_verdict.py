"""Float or wrong."""

import math

import pytest

from ssd_jax.config.settings import DTYPES
from ssd_jax.tools.compare.judges import LIMITS, judge
from ssd_jax.tools.compare.scores import Candidate, Scores


def token(score, *, stay=True, go=False):
    return Candidate(score=score, may_stay=stay, may_go=go)


LIMIT = 2.0**-10
BANNED = token(-math.inf, stay=False, go=True)


@pytest.mark.parametrize(
    ("a", "b", "best", "verdict"),
    [
        (token(2.0), token(2 - LIMIT / 2), 2.0, "float"),
        (token(2 - LIMIT / 2), token(2.0), 2.0, "float"),
        (token(2.0), token(2 - LIMIT), 2.0, "wrong"),  # the limit itself is too much
        (token(2.0), token(0.0), 2.0, "wrong"),
        (token(0.0), token(2.0), 2.0, "wrong"),
        (token(2.0), BANNED, 2.0, "wrong"),
        (token(2.0), token(2 - LIMIT / 2, stay=False), 2.0, "wrong"),  # truncated away beyond doubt
        (token(2.0, go=True), token(1.0), 2.0, "float"),  # one run truncated the first away
        (token(2.0, go=True), token(1.0), 1.0, "float"),  # ... and so did this one
        (token(2.0, go=True), token(1.0, stay=False), 2.0, "wrong"),
        (token(1.0), token(1.0001), 4.0, "unknown"),  # the target would say a third one
        (token(1.0), token(0.0), 4.0, "unknown"),
        (BANNED, BANNED, 4.0, "unknown"),
    ],
)
def test_the_verdict_follows_from_what_rounding_could_do(a, b, best, verdict):
    scores = Scores(a=a, b=b, best=best)
    assert judge(scores, LIMIT, certain=False, bitwise=False) == verdict
    sure = judge(scores, LIMIT, certain=True, bitwise=False)
    assert sure == ("wrong" if verdict == "unknown" else verdict)


def test_bitwise_runs_may_not_part_at_all():
    scores = Scores(a=token(2.0), b=token(2.0), best=2.0)
    assert judge(scores, LIMIT, certain=True, bitwise=True) == "wrong"


def test_a_margin_is_the_distance_and_infinite_to_a_banned_token():
    assert Scores(a=token(1.0), b=token(3.5), best=4.0).margin == 2.5
    assert Scores(a=token(1.0), b=BANNED, best=4.0).margin == math.inf
    assert Scores(a=BANNED, b=BANNED, best=4.0).margin == math.inf


def test_every_dtype_has_a_limit():
    assert LIMITS.keys() == set(DTYPES)
