"""What the records of verification rules say."""

from typing import get_args

import pytest

from ssd_jax.sampling.rules import RULES, RuleName


def test_every_rule_has_a_record():
    assert tuple(RULES) == get_args(RuleName)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_lossless_and_depends_on_lengths_unless_its_noise_is_that_of_the_position(rule):
    assert not rule.lossy
    assert rule.timed is not rule.keyed_by_position
