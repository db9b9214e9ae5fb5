"""The sampling law written slowly, in float64 and NumPy, for one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np


def slow_probs(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **_):
    """Temperature, top-k, top-p, min-p by sorting, in float64; ties at a threshold are kept."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if top_k:
        p = np.where(p >= np.sort(p)[-min(top_k, len(p))], p, 0)
        p /= p.sum()
    if top_p < 1:
        descending = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(descending), top_p)
        p = np.where(p >= descending[min(last, len(p) - 1)], p, 0)
        p /= p.sum()
    if min_p:
        p = np.where(p >= min_p * p.max(), p, 0)
        p /= p.sum()
    return p


def next_law(logits: np.ndarray, settings: dict, prompt: Sequence[int], output: Sequence[int]):
    """The law [V] of the token after prompt and output; settings as in `rows.rows`."""
    logits = np.array(logits, np.float64)
    if len(prompt) + len(output) < settings.get("ban_before", 0):
        logits[[token for token in settings["banned"] if token >= 0]] = -np.inf
    for word in settings.get("bad_word_ids", ()):
        *first, last = (token for token in word if token >= 0) if max(word) >= 0 else (-1,)
        if last >= 0 and list(output)[len(output) - len(first) :] == first:
            logits[last] = -np.inf
    for token in {*prompt, *output}:
        penalty = settings.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= settings.get("frequency_penalty", 0.0) * list(output).count(token)
        logits[token] -= settings.get("presence_penalty", 0.0)
    for token, bias in zip(settings.get("bias_ids", ()), settings.get("bias", ()), strict=True):
        if token < len(logits):
            logits[token] += bias
    if settings.get("temperature", 1.0) == 0:
        return np.eye(len(logits))[logits.argmax()]
    return slow_probs(logits, **settings)


def text_law(logits: np.ndarray, settings: dict, count: int) -> np.ndarray:
    """The law [V] * count of the first tokens after the prompt 0, by the chain rule.

    Row t of logits [V, V] gives the token after t.
    """
    vocab = len(logits)
    law = np.zeros((vocab,) * count)
    for text in product(range(vocab), repeat=count):
        probability = 1.0
        for index, token in enumerate(text):
            if probability:
                last = (0, *text)[index]
                probability *= next_law(logits[last], settings, (0,), text[:index])[token]
        law[text] = probability
    return law
