"""Rates that shape sampled trees of rules that compare q with p."""

import numpy as np

from ssd_jax.roles.drafting import GAP_CLASSES, TreeShape
from ssd_jax.speculation.fixed_rates import fixed_rates


def test_rates_depend_on_the_rank_alone_and_fall_with_it():
    rates = fixed_rates(TreeShape(nodes=16, depth=4), trees=True)
    assert rates.shape == (4, GAP_CLASSES, 6)
    assert (rates == rates[:1, :1]).all()
    assert (np.diff(rates[0, 0]) < 0).all()
    assert 0 < rates[0, 0].min() < rates[0, 0].sum() < 1


def test_a_chain_has_rates_of_first_children_alone():
    rates = fixed_rates(TreeShape(nodes=16, depth=4), trees=False)
    assert (rates[..., 0] > 0).all()
    assert (rates[..., 1:] == 0).all()


def test_shapes_with_few_ranks_have_as_many_rates():
    assert fixed_rates(TreeShape(nodes=4, depth=2, ranks=2), trees=True).shape[-1] == 2
