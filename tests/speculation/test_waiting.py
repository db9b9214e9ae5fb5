"""What a draft reports of its work, and what the pace learns of it."""

from types import SimpleNamespace

import numpy as np
import pytest

from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.speculation.fan_out import UniformFanOut
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.sequence_state import RoundState, SequenceState
from ssd_jax.speculation.tuner import teaches
from ssd_jax.speculation.waiting import Waiting


def work_of(activity, pace=None):
    return Waiting(activity, pace=pace)


def test_forwards_are_known_by_their_branches_where_the_budget_stayed():
    pace, seconds = Pace(), iter([7.0, 0.5, 7.0, 0.25])
    work = work_of(lambda: Activity((Busy("expand", 0.0, next(seconds)),)), pace)
    work.expands(8)
    work.gather()  # the first one: what came before it is not known
    assert pace.steps() == {}
    for branches in (8, 4, 4):
        work.expands(branches)
        work.gather()
    assert pace.steps() == {8: 0.5, 4: 0.25}


def test_work_is_reported_once_however_often_it_is_asked_for():
    activities = [Activity((Busy("grow", 2.0, 3.0),), 7), Activity((Busy("expand", 1.0, 2.0),), 5)]
    work = work_of(lambda: activities.pop() if activities else Activity())
    work.gather()
    assert work.report(0, 0.0) == Activity((Busy("expand", 1, 2), Busy("grow", 2, 3)), 12)
    assert work.report(0, 0.0) == Activity()


def test_a_draft_without_reports_has_no_activity():
    work = work_of(None)
    work.gather()
    assert work.report(2, 1.0) is None


def test_the_pace_learns_what_drafts_just_in_time_cost():
    """Two tokens in 4 seconds, of 5 that the controller waited: 1 is the way there and back."""
    pace = Pace()
    pace.round(10.0)
    spans = (Busy("draft", 0.0, 4.0), Busy("expand", 4.0, 5.0))
    work_of(lambda: Activity(spans), pace).report(2, 5.0)
    assert pace.worth("record", [[1.0, 1.3]], usual=0.99) == 1  # (2 + 1) seconds cost .297
    assert pace.worth("record", [[1.0, 1.3]], usual=1.01) == 0  # .303


@pytest.mark.parametrize(
    ("temperature", "rule", "sees"),
    [(0.0, "ratio", True), (0.7, "coupled", True), (0.7, "ratio", False), (0.7, "block", False)],
)
def test_lengths_follow_confidence_only_where_the_text_depends_on_no_length(
    temperature, rule, sees
):
    """Under the other rules no length may follow from what was drawn."""
    pace = Pace()
    pace.round(1.0)
    pace.forward("branches", 0.2)
    state = SequenceState(
        fan_out=UniformFanOut(), backup=None, room=99, teaches=teaches(temperature, rule)
    )
    for _ in range(200):
        state.stats.observe(1, 2, (7, 0))
    state.stats.round(2, hit=True, empty=False, prepared=True)

    def forwards(confidence):
        lengths = np.array([2])
        confidences = np.array([[confidence]])
        branches = SimpleNamespace(lengths=lengths[None], confidence=confidences, trees=None)
        this_round = RoundState(
            0.0, None, np.array([4]), {0: state}, {}, SimpleNamespace(branch=[0]), lengths
        )
        this_round.count_won(branches)
        return Waiting(pace=pace).more_forwards(this_round, {0: 2})

    # A forward costs .4 tokens; a third token is worth .25, or .49 where the others are sure.
    assert forwards((0, 0)) == 0
    assert (forwards((7, 7)) > 0) == sees
