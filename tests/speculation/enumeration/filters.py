"""The sampling law in rationals, written from its definition; nothing here imports JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

from tests.speculation.enumeration.chance import Law

Text = tuple[int, ...]
Model = Callable[[Text], Law]


def normalised(weights: Sequence[Fraction | int]) -> Law:
    """Weights as probabilities."""
    total = sum(weights)
    return tuple(Fraction(weight) / total for weight in weights)


def keep(law: Law, threshold: Fraction) -> Law:
    """Tokens at or above a threshold probability, renormalised."""
    return normalised([p if p >= threshold else 0 for p in law])


def sharpen(law: Law, power: int) -> Law:
    """Temperature 1 / power."""
    return normalised([p**power for p in law])


def top_k(law: Law, k: int) -> Law:
    """The k likeliest tokens and those as likely as the last of them."""
    return keep(law, sorted(law, reverse=True)[min(k, len(law)) - 1])


def top_p(law: Law, mass: Fraction) -> Law:
    """The fewest likeliest tokens that reach a mass, and those as likely as the last of them."""
    reached = Fraction(0)
    for p in sorted(law, reverse=True):
        reached += p
        if reached >= mass:
            return keep(law, p)
    return law


def min_p(law: Law, share: Fraction) -> Law:
    """Tokens with at least a share of the likeliest one's probability."""
    return keep(law, share * max(law))


def support(law: Law, n: int) -> Law:
    """The n likeliest tokens, ties to the lowest id: what a sparse proposal keeps."""
    best = sorted(range(len(law)), key=lambda token: (-law[token], token))[:n]
    return normalised([p if token in best else 0 for token, p in enumerate(law)])


def within(law: Law, ids: Sequence[int]) -> Law:
    """What a reduced vocabulary keeps."""
    return normalised([p if token in ids else 0 for token, p in enumerate(law)])


def point(token: int, vocab: int) -> Law:
    """All probability on one token."""
    return tuple(Fraction(int(v == token)) for v in range(vocab))


def then(model: Model, *filters: Callable[[Law], Law]) -> Model:
    """A model whose law passes through filters, in order."""

    @functools.cache
    def filtered(text: Text) -> Law:
        law = model(text)
        for filter_ in filters:
            law = filter_(law)
        return law

    return filtered


def without(model: Model, words: Sequence[Text], *, prompt: int = 1) -> Model:
    """No word is completed by a token after the prompt, where its other tokens come last."""

    def banned(text: Text) -> Law:
        law, output = list(model(text)), text[prompt:]
        for *first, last in words:
            if output[len(output) - len(first) :] == (*first,):
                law[last] = Fraction(0)
        return normalised(law)

    return banned


def presence(model: Model, factor: Fraction) -> Model:
    """Multiplies the weight of every token said so far: a presence penalty of -log factor."""

    def penalised(text: Text) -> Law:
        return normalised(
            [p * factor if token in text else p for token, p in enumerate(model(text))]
        )

    return penalised
