"""Keyed randomness that can be enumerated: every path of a random program, with its probability.

A program is an ordinary function that asks a `Chance` for its draws. `paths` runs it again and
again until every combination of answers has been given.

Noise is the engine's: a key has one exponential clock E_v for each token v (Gumbel noise is
-log E_v), and a draw from a law takes the token with the least E_v / law_v. The normalised clocks
are uniform on a simplex, where each answer cuts off a convex piece with rational corners; so two
draws with one key, from two laws, have an exact joint probability. A uniform variate is the
simplex of two tokens. Nothing here imports JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from fractions import Fraction
from typing import NamedTuple, TypeVar

Law = tuple[Fraction, ...]
Corner = tuple[Fraction, ...]
State = TypeVar("State", bound=Hashable)


class Key(NamedTuple):
    """What a draw is for: start is None where the key has no start (coupled noise)."""

    start: int | None
    position: int
    purpose: str
    request: int = 0


class _OneObject(tuple[Fraction, ...]):
    """A law that no other object equals, so that comparing and hashing it takes no fractions."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


@functools.cache
def one_object(law: Law) -> Law:
    """The law as the object that stands for all that are equal."""
    return _OneObject(law)


# What each key's noise has shown so far: laws drawn from, with the token that came.
Seen = frozenset[tuple[Key, tuple[tuple[Law, int], ...]]]


class Chance:
    """Answers the draws of one run: first as the script says, then the first possible way."""

    def __init__(self, script: tuple[int, ...], seen: Seen, alive: Callable[[Key], bool]):
        self._script = script
        self._alive = alive
        self._answers: list[int] = []
        self._seen = dict(seen)
        self.probability = Fraction(1)
        self.untried: list[tuple[int, ...]] = []

    def token(self, law: Law, key: Key) -> int:
        """The token that the noise of `key` draws from `law`."""
        if not self._alive(key):
            raise ValueError(f"{key} belongs to a finished round, whose noise was forgotten")
        law, seen = one_object(law), self._seen.get(key, ())
        for earlier, token in seen:
            if earlier is law:
                return token
        token = self._choose(_answers(seen, law) if seen else law)
        self._seen[key] = (*seen, (law, token))
        return token

    def below(self, threshold: Fraction, key: Key) -> bool:
        """Whether the uniform variate of `key` is below the threshold."""
        if threshold <= 0 or threshold >= 1:
            return threshold >= 1
        return self.token((threshold, 1 - threshold), key) == 0

    def seen(self) -> Seen:
        """What the noise of every key has shown."""
        return frozenset(self._seen.items())

    def _choose(self, probabilities: Law) -> int:
        possible = [index for index, p in enumerate(probabilities) if p.numerator > 0]
        at = len(self._answers)
        if at < len(self._script):
            answer = self._script[at]
        else:
            answer = possible[0]
            self.untried.extend((*self._answers, other) for other in possible[1:])
        self._answers.append(answer)
        self.probability *= probabilities[answer]
        return answer


class Renamed(Chance):
    """Another chance, asked under other keys: those of one row of a batch, say."""

    def __init__(self, chance: Chance, rename: Callable[[Key], Key]):
        self._chance = chance
        self._rename = rename

    def token(self, law: Law, key: Key) -> int:
        """The token that the noise of the renamed key draws from `law`."""
        return self._chance.token(law, self._rename(key))


def paths(
    program: Callable[[Chance], State], seen: Seen, alive: Callable[[Key], bool]
) -> Iterator[tuple[State, Seen, Fraction]]:
    """Every result of a program, with what the noise has shown and the probability."""
    todo: list[tuple[int, ...]] = [()]
    while todo:
        chance = Chance(todo.pop(), seen, alive)
        result = program(chance)
        yield result, chance.seen(), chance.probability
        todo.extend(chance.untried)


@functools.cache
def _answers(seen: tuple[tuple[Law, int], ...], law: Law) -> Law:
    """Probability of each token of `law`, given what the noise has shown."""
    size = len(law)
    region = [tuple(Fraction(int(v == corner)) for v in range(size)) for corner in range(size)]
    for earlier, token in seen:
        region = _drawing(region, earlier, token)
    total = _measure(region)
    return tuple(_measure(_drawing(region, law, token)) / total for token in range(size))


def _drawing(region: list[Corner], law: Law, token: int) -> list[Corner]:
    """The part of a convex region of clocks where `law` draws `token`: E_t / l_t <= E_v / l_v."""
    if law[token] == 0:
        return []
    for other, weight in enumerate(law):
        if other != token and weight > 0:
            region = _clip(region, lambda e, o=other, w=weight: e[o] * law[token] - e[token] * w)
    return region


def _clip(region: list[Corner], height: Callable[[Corner], Fraction]) -> list[Corner]:
    """The part of a convex polygon where a linear function is not negative."""
    corners: list[Corner] = []
    for index, corner in enumerate(region):
        before = region[index - 1]
        low, high = height(before), height(corner)
        if low * high < 0:
            share = low / (low - high)
            corners.append(tuple(b + (c - b) * share for b, c in zip(before, corner, strict=True)))
        if high >= 0:
            corners.append(corner)
    return corners


def _measure(region: list[Corner]) -> Fraction:
    """Length (two tokens) or twice the area (three) of a region of the simplex."""
    if not region:
        return Fraction(0)
    if len(region[0]) == 2:
        return max(corner[0] for corner in region) - min(corner[0] for corner in region)
    if len(region[0]) > 3:
        raise NotImplementedError("noise seen twice is enumerated for two or three tokens")
    total = Fraction(0)
    for index, corner in enumerate(region):
        before = region[index - 1]
        total += before[0] * corner[1] - before[1] * corner[0]
    return abs(total)
