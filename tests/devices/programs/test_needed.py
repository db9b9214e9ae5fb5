"""What the host knows of its rows: which parts of the law they need, and so which program runs."""

import numpy as np
import pytest

from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import Parts
from tests.sampling.edits import Edit, edited

VOCAB = 300
HOT, COLD = {"temperature": 0.7}, {"temperature": 0.0}
CASES = {
    "temperature": (HOT, Parts(True, False, False)),
    "nothing": (COLD, Parts(False, False, False)),
    "top_k": (HOT | {"top_k": 9}, Parts(True, True, False)),
    "top_p": (HOT | {"top_p": 0.999}, Parts(True, True, False)),
    "min_p": (HOT | {"min_p": 0.001}, Parts(True, True, False)),
    "filters of a greedy row": (
        COLD | {"top_k": 9, "top_p": 0.5, "min_p": 0.1},
        Parts(False, False, False),
    ),
    "repetition_penalty": (COLD | {"repetition_penalty": 0.9}, Parts(False, False, True)),
    "frequency_penalty": (HOT | {"frequency_penalty": -0.1}, Parts(True, False, True)),
    "presence_penalty": (COLD | {"presence_penalty": 0.1}, Parts(False, False, True)),
    "repetition_penalty above 1": (COLD | {"repetition_penalty": 1.1}, Parts(False, False, True)),
    "frequency_penalty above 0": (COLD | {"frequency_penalty": 0.1}, Parts(False, False, True)),
    "presence_penalty below 0": (COLD | {"presence_penalty": -0.1}, Parts(False, False, True)),
    "logit_bias": (COLD | {"logit_bias": ((0, -1.0),)}, Parts(False, False, True)),
}


def needed(*slots, start=10):
    """Of rows with these settings; None is an idle row that once had all of them."""
    rows, at = SamplingRows(len(slots), VOCAB), np.full(len(slots), start)
    for slot, settings in enumerate(slots):
        if settings is None:
            at[slot] = IDLE
            settings = {"temperature": 1.0, "top_k": 2, "repetition_penalty": 2.0}
        rows.set(SlotOpening(slot, SamplingParams(**settings)))
    return rows.needed(at)


@pytest.mark.parametrize("name", CASES)
def test_every_setting_asks_for_what_it_needs(name):
    settings, expected = CASES[name]
    assert needed(settings) == expected
    assert needed(None, settings, None) == expected


def test_rows_need_what_any_of_them_needs():
    every = [settings for settings, _ in CASES.values()]
    assert needed(*every) == Parts(True, True, True)
    assert needed(HOT, COLD) == Parts(True, False, False)
    assert needed(None, None) == Parts(False, False, False)


def test_a_slot_forgets_the_needs_of_its_request_before():
    rows = SamplingRows(1, VOCAB)
    for settings, expected in CASES.values():
        rows.set(SlotOpening(0, SamplingParams(**settings)))
        assert rows.needed(np.array([5])) == expected


def test_a_slot_keeps_no_setting_of_its_request_before():
    """Nor does its neighbour."""
    more = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2} | HOT
    more |= {"frequency_penalty": 0.3, "presence_penalty": 0.4, "seed": 2**40}
    before = SamplingParams(**more, logit_bias={7: 1.0, 8: 2.0, 9: 3.0})
    after = SamplingParams(temperature=0.3, seed=3, logit_bias={8: -1.0})
    used, fresh = (SamplingRows(2, VOCAB) for _ in range(2))
    used.set(SlotOpening(1, before, 6, banned=[4, 5, 6], ban_before=30, bad_word_ids=[(1, 2)]))
    for rows in (used, fresh):
        rows.set(SlotOpening(1, after, 4, banned=[3], ban_before=20))
    for slot in range(2):
        found, expected = used.row(slot)._asdict(), fresh.row(slot)._asdict()
        for settings in (found, expected):
            settings["bias"] = settings["bias"][settings["bias_ids"] < VOCAB]
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, name)


@pytest.mark.parametrize(("start", "expected"), [(18, True), (19, False), (20, False)])
def test_ids_are_banned_up_to_a_position(start, expected):
    rows = SamplingRows(1, VOCAB)
    rows.set(SlotOpening(0, SamplingParams(), 0, banned=[2], ban_before=20))
    # The first token comes at start + 1.
    assert rows.needed(np.array([start])).adjusted is expected


def test_an_end_of_bans_without_banned_ids_asks_for_nothing():
    rows = SamplingRows(1, VOCAB)
    rows.set(SlotOpening(0, SamplingParams(), 0, banned=[], ban_before=20))
    assert not rows.needed(np.array([3])).adjusted


def test_rows_with_bad_words_need_their_bans_until_another_request_comes():
    rows, at = SamplingRows(2, VOCAB), np.array([IDLE, 3])
    assert not rows.needed(at).adjusted
    rows.set(SlotOpening(1, SamplingParams(), bad_word_ids=[(7,), (2, 5)]))
    assert rows.needed(at).adjusted
    assert not rows.needed(at[::-1]).adjusted
    ids = np.asarray(rows.on_device().bad_word_ids)
    assert [word[word >= 0].tolist() for word in ids[1, :3]] == [[7], [2, 5], []]
    assert (ids[0] == -1).all()
    assert ids[1, 1, -2:].tolist() == [2, 5]
    rows.set(SlotOpening(1, SamplingParams(), bad_word_ids=[(4,)]))
    assert (np.asarray(rows.on_device().bad_word_ids)[1] >= 0).sum() == 1
    rows.set(SlotOpening(1, SamplingParams()))
    assert not rows.needed(at).adjusted
    assert (np.asarray(rows.on_device().bad_word_ids) == -1).all()


def test_bad_words_are_sent_to_the_device_only_when_they_change():
    rows = SamplingRows(2, VOCAB)
    before = rows.on_device()
    rows.set(SlotOpening(0, SamplingParams(temperature=1.0)))
    after = rows.on_device()
    assert after.bad_word_ids is before.bad_word_ids
    assert after.temperature.tolist() == [1, 0]


def test_greedy_requests_stay_greedy_at_a_temperature_of_the_draft():
    rows = SamplingRows(2, VOCAB)
    for slot, settings in enumerate((HOT, COLD)):
        rows.set(SlotOpening(slot, SamplingParams(**settings)), temperature=0.5)
    assert [rows.row(slot).temperature.tolist() for slot in range(2)] == [[0.5], [0.0]]


def test_every_field_of_the_settings_is_classified():
    """A new setting has to say which part of the law it belongs to."""
    keys_and_padding = {"seed", "request", "bias", "bias_ids", "banned", "ban_before"}
    assert {*Sampling._fields} - keys_and_padding - {"bad_word_ids"} <= {*CASES}


FAULTS = [
    (" | (host.min_p > 0)", ""),
    ("(host.top_k > 0) | ", ""),
    (" | (host.top_p < 1)", ""),
    ("hot = live & ", "hot = "),
    ("(hot & truncated)", "truncated"),
    (" | (host.presence_penalty != 0)", ""),
    ("(host.frequency_penalty != 0) | ", ""),
    ("host.presence_penalty != 0", "host.presence_penalty > 0"),
    ("host.presence_penalty != 0", "host.presence_penalty < 0"),
    ("host.frequency_penalty != 0", "host.frequency_penalty > 0"),
    ("host.frequency_penalty != 0", "host.frequency_penalty < 0"),
    ("host.repetition_penalty != 1", "host.repetition_penalty > 1"),
    ("host.repetition_penalty != 1", "host.repetition_penalty < 1"),
    ("banned | penalised | biased", "banned | penalised"),
    ("penalised | biased | bad_worded", "penalised | biased"),
    ("(live & (banned", "((banned"),
    ("> start + 1", "> start"),
    ("> start + 1", "> start + 2"),
    (" & (host.banned >= 0).any(axis=1)", ""),
]


def look_at_all():
    for name in CASES:
        test_every_setting_asks_for_what_it_needs(name)
    for start, expected in ((18, True), (19, False), (20, False)):
        test_ids_are_banned_up_to_a_position(start, expected)
    test_an_end_of_bans_without_banned_ids_asks_for_nothing()
    test_rows_with_bad_words_need_their_bans_until_another_request_comes()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_that_chooses_wrongly_is_caught(fault):
    with edited([Edit(SamplingRows, "needed", *fault)]), pytest.raises(AssertionError):
        look_at_all()
