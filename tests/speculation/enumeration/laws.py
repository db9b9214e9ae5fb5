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

# Told each row that goes on and the probability of being there.
Watch = Callable[[State, Fraction], None]


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
    step: Callable[[State, Chance], State], prompt: Text, count: int, watch: Watch = lambda *_: None
) -> dict[Text, Fraction]:
    """The law of the first `count` tokens that rounds of `step` emit."""

    def batch(rows: tuple[State, ...], chance: Chance) -> tuple[State, ...]:
        return (step(rows[0], chance),)

    return {
        rows[0]: mass for rows, mass in emitted_by_batch(batch, (prompt,), count, watch).items()
    }


def emitted_by_batch(
    step: Callable[[tuple[State, ...], Chance], tuple[State, ...]],
    prompts: tuple[Text, ...],
    count: int,
    watch: Watch = lambda *_: None,
) -> dict[tuple[Text, ...], Fraction]:
    """The joint law of the first `count` tokens of every row; row r draws as request r.

    Runs that reach the same states with the same knowledge of future noise go on as one. `watch`
    sees every row that goes on, after each round, with the probability of being there.
    """

    def unfinished(request: int, row: State) -> bool:
        return len(row.text) < len(prompts[request]) + count

    def alive(key: Key, rows: tuple[State, ...]) -> bool:
        row = rows[key.request]
        return unfinished(key.request, row) and _may_be_asked(key, row)

    law: dict[tuple[Text, ...], Fraction] = defaultdict(Fraction)
    start = tuple(State(prompt) for prompt in prompts)
    running: dict[tuple[tuple[State, ...], Seen], Fraction] = {(start, frozenset()): Fraction(1)}
    while running:
        following: dict[tuple[tuple[State, ...], Seen], Fraction] = defaultdict(Fraction)
        for (rows, seen), mass in running.items():
            for after, shown, probability in paths(
                lambda chance, rows=rows: step(rows, chance),
                seen,
                lambda key, rows=rows: alive(key, rows),
            ):
                going = [row for request, row in enumerate(after) if unfinished(request, row)]
                for row in going:
                    watch(row, mass * probability)
                if going:
                    future = frozenset(item for item in shown if alive(item[0], after))
                    following[after, future] += mass * probability
                else:
                    texts = zip(prompts, after, strict=True)
                    law[tuple(row.text[len(p) : len(p) + count] for p, row in texts)] += (
                        mass * probability
                    )
        running = following
    return dict(law)


def _may_be_asked(key: Key, state: State) -> bool:
    """Whether a key can still be asked for: the rounds and records of earlier starts are over."""
    oldest = len(state.text) - 1 if state.start is None else state.start
    return (key.start is None or key.start >= oldest) and key.position > oldest
