from __future__ import annotations

from ssd_jax.speculation.pace import Pace


def pace(*, round_seconds=1.0, branches=0.1, record=0.1, rounds=4):
    found = Pace()
    for _ in range(rounds):
        found.round(round_seconds)
        found.forward("branches", branches)
        found.forward("record", record)
    return found


def test_until_speeds_are_known_everything_is_waited_for():
    found = Pace()
    assert found.worth("branches", [[1.0, 1.1, 1.2]], 2) == 2
    found.round(1.0)
    assert found.worth("branches", [[1.0, 1.1, 1.2]], 2) == 2
    found.forward("branches", 100.0)
    assert found.worth("branches", [[1.0, 1.1, 1.2]], 2) == 0


def test_a_forward_is_waited_for_while_it_brings_more_than_its_time_is_worth():
    # 2 tokens a second, 0.1 seconds a forward: each forward costs 0.2 tokens.
    gains = [[1.0, 1.5, 1.8, 1.95, 2.0]]
    assert pace().worth("branches", gains, 2) == 2
    assert pace(branches=0.05).worth("branches", gains, 2) == 3
    assert pace(branches=0.3).worth("branches", gains, 2) == 0
    assert pace().worth("branches", gains, 1) == 3


def test_of_a_forward_that_is_running_only_the_rest_is_waited_for():
    found, gains = pace(branches=0.3), [[1.0, 1.5, 1.9]]
    assert found.worth("branches", gains, 2) == 0
    assert found.worth("branches", gains, 2, underway=0.04) == 0  # 0.26 s are worth 0.52 tokens
    assert found.worth("branches", gains, 2, underway=0.06) == 1
    assert found.worth("branches", gains, 2, underway=0.3) == 1  # the one after it takes 0.3 s
    assert found.worth("branches", gains, 2, underway=9.0) == 1  # overdue: any moment now


def test_the_two_kinds_of_forwards_have_their_own_cost():
    found = pace(branches=0.3, record=0.05)
    assert found.worth("branches", [[1.0, 1.5]], 2) == 0
    assert found.worth("record", [[1.0, 1.5]], 2) == 1


def test_a_record_costs_what_it_takes_beside_its_forwards_once():
    found, gains = pace(), [[1.0, 1.3, 1.6, 1.9]]
    assert found.worth("record", gains, 2) == 3
    found.drafted(0.1)  # 0.2 tokens beside 0.1 a forward gained
    assert found.worth("record", gains, 2) == 3
    assert found.worth("branches", gains, 2) == 3
    found.drafted(0.5)
    found.drafted(0.5)
    assert found.worth("record", gains, 2) == 0
    assert found.worth("branches", gains, 2) == 3


def test_slow_forwards_are_tried_again_after_a_while():
    found, gains = pace(), [[1.0, 1.5]]
    for _ in range(4):
        found.forward("record", 50.0)
    found.drafted(0.0)
    rounds = 0
    while found.worth("record", gains, 2) == 0:
        found.round(1.0)
        rounds += 1
    assert 32 <= rounds <= 100


def test_a_pause_does_not_make_time_cheap():
    found = pace(branches=0.3)
    found.round(1000.0)
    assert found.worth("branches", [[1.0, 1.5]], 2) == 0


def test_rows_with_all_their_tokens_wait_with_the_others():
    gains = [[1.0, 1.15, 1.3], [1.0]]
    assert pace().worth("branches", gains, 2) == 0
    assert pace().worth("branches", [*gains, [1.0, 1.15]], 2) == 1
    assert pace().worth("branches", [[1.0, 1.15, 1.3]] * 2, 2) == 2


def test_no_forward_is_waited_for_where_none_is_to_come():
    assert pace().worth("branches", [], 2) == 0
    assert Pace().worth("record", [[1.0]], 2) == 0
