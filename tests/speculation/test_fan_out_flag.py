"""`--fan_out` takes a policy's name or lists of counts, and refuses impossible ones."""

from __future__ import annotations

import pytest

from ssd_jax.errors import InputError
from ssd_jax.speculation.fan_out import ConfidenceFanOut, UniformFanOut
from ssd_jax.speculation.fan_out_flag import POLICIES, parse


def test_lists_are_used_as_they_are():
    policy = parse("4,3,3,2,4/12,0,2,1,1", 4, 16)
    assert policy.counts(4, 16, "hit") == (4, 3, 3, 2, 4)
    assert policy.counts(4, 16, "miss") == (12, 0, 2, 1, 1)


def test_one_list_serves_hits_and_misses():
    policy = parse("4,3,3,2,4", 4, 16)
    assert policy.counts(4, 16, "miss") == policy.counts(4, 16, "hit") == (4, 3, 3, 2, 4)


def test_a_shorter_proposal_leaves_the_rest_of_a_list_to_its_last_slot():
    policy = parse("4,3,3,2,4/12,0,2,1,1", 4, 16)
    assert policy.counts(2, 16, "hit") == (4, 3, 9)
    assert policy.counts(1, 16, "miss") == (12, 4)


def test_a_list_shrinks_in_proportion_with_the_budget():
    assert parse("8,4,4", 2, 16).counts(2, 8, "hit") == (4, 2, 2)
    assert parse("14,1,1", 2, 16).counts(2, 2, "hit") == (1, 0, 1)


def test_words_name_policies():
    classes = {name: type(parse(name, 4, 16)) for name in POLICIES}
    assert classes == {name: policy.make for name, policy in POLICIES.items()}
    assert classes.items() >= {"uniform": UniformFanOut, "confidence": ConfidenceFanOut}.items()


@pytest.mark.parametrize(
    ("text", "budget", "complaint"),
    [
        (
            "unifrom",
            16,
            f"is unknown; give {', '.join(POLICIES)}, or 5 integers .* 4,3,3,3,3",
        ),
        ("16", 16, f"is unknown; give {', '.join(POLICIES)}, or 5 integers"),
        ("", 16, "is unknown"),
        ("4,3,x,2,4", 16, "'x' is not an integer; give a list such as 4,3,3,3,3"),
        ("4,3,3.5,2,4", 16, "'3.5' is not an integer"),
        ("4,3,3,2,4/", 16, "'' is not an integer"),
        ("4,3,3,2,4/4,3,3,2,4/4,3,3,2,4", 16, "'4/4' is not an integer"),
        ("4,4,4,4", 16, "'4,4,4,4' has 4 entries, and k = 0..4 needs 5; give a list such as"),
        ("4,3,3,2,4/8,8", 16, "'8,8' has 2 entries, and k = 0..4 needs 5"),
        (
            "4,3,3,2,5",
            16,
            "'4,3,3,2,5' sums to 17, and budget = 16; give `budget=17`, or a list such as",
        ),
        ("4,3,3,2,4/9,1,1,1,1", 16, "'9,1,1,1,1' sums to 13, and budget = 16"),
        ("4,-1,3,6,4", 16, "-1 is negative; give a list such as"),
        ("4,3,3,6,0", 16, "the entry of k = 4 is 0 and must be at least 1; give a list such as"),
        ("uniform", 1, "budget = 1 is too small for fan_out = 'uniform'; give at least 2"),
        ("0,0,0,0,1", 1, "budget = 1 is too small"),
    ],
)
def test_an_impossible_fan_out_is_refused_with_its_remedy(text, budget, complaint):
    with pytest.raises(InputError, match=complaint) as refused:
        parse(text, 4, budget)
    assert f"fan_out = {text!r}" in str(refused.value)


def test_the_smallest_budget_is_accepted():
    assert parse("1,0,0,0,1", 4, 2).counts(4, 2, "hit") == (1, 0, 0, 0, 1)
