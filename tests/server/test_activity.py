"""Whether a server speculates, and why not."""

import pytest

from ssd_jax.engine.rounds.monitor import TargetSpan
from ssd_jax.server.activity import EngineActivity


def activity(*spans, **values):
    return EngineActivity(**{"mode": "ssd", "target": spans, **values})


def test_a_server_speculates_while_its_last_rounds_verify_proposals():
    plain, verified = TargetSpan(0, 1), TargetSpan(0, 1, proposed=3)
    assert activity(verified, plain).why_not_speculating is None
    assert activity(verified, *[plain] * 20).why_not_speculating is not None


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (EngineActivity(mode=None), "the model is loading"),
        (activity(mode="ar"), "mode ar has no draft"),
        (activity(), "nothing was decoded yet"),
        (activity(TargetSpan(0, 1, prompt=9)), "nothing was decoded yet"),
        (activity(TargetSpan(0, 1, misses=("dead",))), "the draft worker is out of reach"),
        (activity(TargetSpan(0, 1, misses=("late",))), "no proposal came in time (late)"),
        (activity(TargetSpan(0, 1)), "requests ask for no draft"),
        (
            activity(TargetSpan(0, 1), chooses=True),
            "mode auto finds it faster without the draft, or requests ask for no draft",
        ),
    ],
)
def test_the_reason_is_named(seen, reason):
    assert seen.why_not_speculating == reason


def test_the_mode_that_ran_is_that_of_the_last_proposal():
    plain = TargetSpan(1, 2)
    verified = [TargetSpan(0, 1, proposed=3, mode=mode) for mode in ("ssd", "sd")]
    assert activity().ran is None
    assert activity(plain).ran == "ar"
    assert activity(*verified, plain).ran == "sd"
    assert activity(*verified, *[plain] * 20).ran == "ar"


def test_shares_are_those_of_the_last_rounds():
    spans = [
        TargetSpan(0, 1, prompt=5, tokens=1),
        TargetSpan(1, 2, rows=2, tokens=5, hits=1, lookups=2),
        TargetSpan(2, 3, rows=1, tokens=4, hits=1, lookups=1),
    ]
    assert activity(*spans).hit_rate == pytest.approx(2 / 3)
    assert activity(*spans).acceptance_length == 3.0
    assert activity().hit_rate is activity().acceptance_length is None
    assert activity().hidden_draft_share is None
