"""How much of a draft's work the target hides: scripted rounds, overlaps computed by hand."""

from __future__ import annotations

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.requests import metrics
from ssd_jax.roles import activity
from ssd_jax.roles.activity import Activity, Busy, TargetTimes, overlap
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import Silent
from tests.fakes.activities import ACTIVITIES, LOOK, Script
from tests.sampling.edits import Edit, edited


@pytest.mark.parametrize(
    ("begin", "end", "others", "seconds"),
    [
        (2, 5, [], 0),
        (2, 5, [(0, 2), (5, 9)], 0),
        (2, 5, [(0, 9)], 3),
        (2, 5, [(3, 4)], 1),
        (2, 5, [(0, 3), (4, 9)], 2),
        (2, 2, [(0, 9)], 0),
    ],
)
def test_overlap_is_the_seconds_that_two_spans_share(begin, end, others, seconds):
    assert overlap(begin, end, others) == seconds


def test_programs_in_a_queue_keep_the_target_busy_one_after_the_other():
    times = TargetTimes()
    times.dispatched(1.0)
    times.dispatched(1.5)
    assert times.read(3.0, in_flight=True) == (1.0, 3.0)
    assert times.read(4.0, in_flight=False) == (3.0, 4.0)
    times.dispatched(6.0)
    assert times.read(7.0, in_flight=False) == (6.0, 7.0)
    times.dispatched(8.0)  # its reader is gone
    times.idle()
    times.dispatched(20.0)
    assert times.read(21.0, in_flight=False) == (20.0, 21.0)


def measured(activities, sources=("hit",) * 3, looks=(LOOK,) * 3):
    """Metrics of a request of five tokens: the prompt's, three rounds with a look-up, one more."""
    script = Script(activities, sources, looks)
    engine = Engine(script, Silent, frozenset(), drafter=script, clock=script.clock)
    engine.add(Request(prompt_ids=[1], params=SamplingParams(max_tokens=5), index=0))
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                return event.output.metrics
    raise AssertionError


def test_the_hidden_share_is_the_drafts_time_beside_the_targets():
    found = measured(ACTIVITIES, ("cold", "hit", "miss"))
    assert found["hidden_draft_share"] == pytest.approx(11 / 13)
    assert found["hidden_draft_share_on_hit"] == pytest.approx(6 / 7)
    assert found["step_ms"] == pytest.approx(3000)  # of 2, 4 and 3 s; slot 1 is another's
    assert found["bytes_per_round"] == pytest.approx(300)


def test_a_verification_is_idle_where_no_draft_works_beside_it():
    # Beside the first round the draft works, beside the second it does not; of the last rounds
    # nothing is known.
    assert measured(ACTIVITIES)["verify_idle_ms"] == pytest.approx(10_000)
    busy = Activity((Busy("grow", 25, 26, [1]),), 0)
    assert measured((*ACTIVITIES[:2], busy))["verify_idle_ms"] is None
    # What a late draft has done meanwhile is not known.
    late = ("hit", "stale", "late")
    assert measured((ACTIVITIES[0], Activity(), Activity()), late)["verify_idle_ms"] is None


def test_a_draft_that_reports_nothing_has_no_share():
    found = measured((None,) * 3)
    for name in ("hidden_draft_share", "hidden_draft_share_on_hit", "step_ms", "verify_idle_ms"):
        assert found[name] is None
    assert found["bytes_per_round"] is None
    found = measured((Activity(),) * 3)
    assert found["hidden_draft_share"] is None
    assert found["bytes_per_round"] == 0


def test_hits_are_counted_by_k_and_by_rank_and_what_did_not_win_is_waste():
    looks = ((0, 2, 1, 5), (2, 1, None, 6), (0, 3, 0, 4))
    found = measured(ACTIVITIES, ("hit", "miss", "hit"), looks)
    assert found["hit_rate_by_k"] == [(2, 2), (0, 0), (0, 1)]
    assert found["hit_rate_by_rank"] == [(1, 3), (1, 2), (0, 1)]
    assert found["wasted_draft_tokens"] == 15


FLAWS = {
    "gaps count as overlap": Edit(activity, "overlap", "max(0.0, ", "abs("),
    "all of a span counts": Edit(activity, "overlap", "max(begin, span_begin)", "span_begin"),
    "misses count as hits": Edit(metrics, "_draft", 'and v.source == "hit"', ""),
    "what was not prepared counts": Edit(metrics, "_by_outcome", "look.prepared > rank", "True"),
    "a rank is a number of branches": Edit(
        metrics, "_by_outcome", "look.rank == rank", "look.rank == rank + 1"
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_in_hidden_shares_are_caught(flaw):
    with edited([FLAWS[flaw]]), pytest.raises(AssertionError):
        all_of_them()


def all_of_them():
    test_the_hidden_share_is_the_drafts_time_beside_the_targets()
    test_a_verification_is_idle_where_no_draft_works_beside_it()
    test_hits_are_counted_by_k_and_by_rank_and_what_did_not_win_is_waste()
