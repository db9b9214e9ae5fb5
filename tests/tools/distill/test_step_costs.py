"""What forwards cost, against one token of the target."""

import numpy as np

from ssd_jax.tools.distill import step_costs


def test_costs_are_compared_round_by_round(monkeypatch):
    """Rounds may be slow as a whole: ratios of medians would be others."""
    ms = [[1.0, 2.0, 4.0], [2.0, 2.0, 12.0], [1.0, 8.0, 4.0], [0.5, 0.5, 4.0]]

    class Forward:
        def __init__(self, *_model, width, **_room):
            self.width = width

        def chunk(self, tokens, start):
            assert (len(tokens), start) == (self.width, 32)
            return np.zeros(1)

    def in_turns(forwards, *, rounds, progress):
        assert (len(forwards), rounds, progress) == (4, 3, None)
        return ms

    monkeypatch.setattr(step_costs, "TeacherForced", Forward)
    monkeypatch.setattr(step_costs, "in_turns", in_turns)
    target, draft = (object(),), (object(),)
    found = step_costs.measure_steps(target, draft, ks=(2,), budgets=(4,), context=64, repeats=3)
    assert found.target_ms == 2
    assert found.target == {1: 1.0, 3: 2.0}
    assert found.draft == {1: 1.0, 4: 0.5}
