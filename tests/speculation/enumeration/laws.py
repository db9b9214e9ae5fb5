"""The law of the first emitted tokens: by the chain rule, and by enumerating whole runs.

Nothing here imports JAX.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from itertools import product

from tests.speculation.enumeration.chance import Chance, Key, Seen, paths
from tests.speculation.enumeration.filters import Model, Text
from tests.speculation.enumeration.rounds import State


def autoregressive(target: Model, prompt: Text, count: int) -> dict[Text, Fraction]:
    """The law of `count` tokens after the prompt; impossible texts are left out."""
    law = {}
    for tokens in product(range(len(target(prompt))), repeat=count):
        probability = Fraction(1)
        for index, token in enumerate(tokens):
            probability *= target(prompt + tokens[:index])[token]
        if probability:
            law[tokens] = probability
    return law


def emitted(
    step: Callable[[State, Chance], State], prompt: Text, count: int
) -> dict[Text, Fraction]:
    """The law of the first `count` tokens that rounds of `step` emit.

    Runs that reach the same state with the same knowledge of future noise go on as one.
    """
    law: dict[Text, Fraction] = defaultdict(Fraction)
    running: dict[tuple[State, Seen], Fraction] = {(State(prompt), frozenset()): Fraction(1)}
    while running:
        following: dict[tuple[State, Seen], Fraction] = defaultdict(Fraction)
        for (state, seen), mass in running.items():
            for after, shown, probability in paths(
                lambda chance, state=state: step(state, chance),
                seen,
                lambda key, state=state: _may_be_asked(key, state),
            ):
                tokens = after.text[len(prompt) :]
                if len(tokens) >= count:
                    law[tokens[:count]] += mass * probability
                else:
                    future = frozenset(item for item in shown if _may_be_asked(item[0], after))
                    following[after, future] += mass * probability
        running = following
    return dict(law)


def _may_be_asked(key: Key, state: State) -> bool:
    """Whether a key can still be asked for: earlier starts and emitted positions are over."""
    started = key.start is None or key.start >= len(state.text) - 1
    return started and key.position >= len(state.text)
