"""What is held out is not learnt, in whatever completion it stands."""

import numpy as np

from ssd_jax.tools.distill.shards import Sample
from ssd_jax.tools.distill.training.data import set_aside

BEGIN = 12


def texts(prompt_length):
    """Three completions each of 20 beginnings."""
    rng = np.random.default_rng(0)
    begins = rng.integers(0, 99, (20, BEGIN))
    return [
        Sample(
            tokens=np.concatenate([begin, rng.integers(0, 99, 9)]).astype(np.int32),
            prompt_length=prompt_length,
        )
        for _ in range(3)
        for begin in begins
    ]


def test_completions_of_a_prompt_or_a_passage_are_on_one_side():
    for prompt_length in (BEGIN, 0):
        given = texts(prompt_length)
        learnt, aside = set_aside(given, tokens=200, seed=1, label="texts")
        assert len(learnt) + len(aside) == len(given)
        assert sum(len(text.tokens) for text in aside) >= 200
        sides = [{tuple(text.tokens[:BEGIN]) for text in side} for side in (learnt, aside)]
        assert not sides[0] & sides[1]
        assert len(sides[1]) == len(aside) / 3
