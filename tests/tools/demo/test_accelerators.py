"""Predictions are recorded tokens over the time that the recorded rounds take elsewhere."""

from __future__ import annotations

import pytest

from ssd_jax.tools.demo.accelerators import RecordedRounds, StageTimes, predict, stored_times

TIMES = StageTimes(target_devices=4, forward=10.0, verify=12.0, draft=1.0, backup=2.0, branches=4.0)


def test_each_mode_has_the_time_of_its_rounds():
    sd = RecordedRounds(k=4, tokens=30, rounds=10)
    ssd = RecordedRounds(k=4, tokens=28, rounds=10, misses=4)
    found = predict(TIMES, sd, ssd, 16)
    assert found["ar"] == pytest.approx(1 / 10)
    assert found["sd"] == pytest.approx(30 / (10 * (12 + 4 * 1)))
    # Four forwards of 4 s are longer than the verification; a miss waits for 4 tokens of 2 s.
    assert found["ssd"] == pytest.approx(28 / (10 * 16 + 4 * 4 * 2))


def test_ssd_can_hide_what_drafting_takes_of_a_round_of_sd():
    assert TIMES.drafting_share(4) == pytest.approx(4 / 16)


def test_branches_behind_a_verification_cost_nothing():
    sd = RecordedRounds(k=2, tokens=20, rounds=10)
    ssd = RecordedRounds(k=2, tokens=20, rounds=10)
    assert predict(TIMES, sd, ssd, 16)["ssd"] == pytest.approx(20 / (10 * 12))


def test_rounds_are_counted_over_all_answers():
    answers = [
        {"acceptance_histogram": [2, 0, 1], "miss_causes": {"miss": 1, "cold": 1}},
        {"acceptance_histogram": None, "miss_causes": None},
        {"acceptance_histogram": [0, 3], "miss_causes": {}},
    ]
    found = RecordedRounds.from_metrics(answers, 4)
    assert found == RecordedRounds(k=4, tokens=2 + 3 + 6, rounds=6, misses=2)


def test_the_package_has_times_and_says_what_made_them():
    stored = stored_times()
    assert stored.command == "python -m tests.tools.aot.stages"
    assert {"jax", "libtpu"} <= {*stored.versions}
    assert (stored.slots, stored.k, stored.branches) == (1, 4, 16)
    assert stored.chips
    for times in stored.chips.values():
        assert 0 < times.draft < times.forward <= times.verify
        assert times.target_devices >= 1
