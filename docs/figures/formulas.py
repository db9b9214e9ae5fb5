"""Numbers of docs/algorithm.md, from its formulas: `python docs/figures/formulas.py`."""

from __future__ import annotations

import itertools
import math

from ssd_jax.speculation.fan_out import GeometricFanOut

Probs = tuple[float, ...]

P: Probs = (0.33, 0.22, 0.14, 0.12, 0.04, 0.08, 0.04, 0.03)
"""A target's distribution of the next token, ids 0..7, and below a draft's."""
Q: Probs = (0.36, 0.21, 0.15, 0.10, 0.08, 0.05, 0.03, 0.02)
PREPARED = 3
"""Bonus tokens that get a branch in the pictures of P and Q."""


def outcomes(a: float, k: int) -> Probs:
    """P(0)..P(K), where each token is accepted with probability a."""
    return (*(a**i * (1 - a) for i in range(k)), a**k)


def length(a: float, k: int) -> float:
    """E: tokens a round, the bonus token included."""
    return (1 - a ** (k + 1)) / (1 - a)


def missed(a: float, k: int, budget: int, r: float = 1.0) -> float:
    """Chance of a miss of Theorem 12's fan-out, not rounded, under the power law."""
    return sum(p ** (1 / (1 + r)) for p in outcomes(a, k)) ** (1 + r) / budget**r


def fan_out(a: float, k: int, budget: int) -> tuple[int, ...]:
    """F_0..F_K as the engine rounds them."""
    return GeometricFanOut(acceptance=a).counts(k, budget, "hit")


def lowered(q: Probs, count: int, c: float) -> Probs:
    """Saguaro sampling: the `count` likeliest tokens of q times C, renormalised."""
    order = sorted(range(len(q)), key=lambda token: -q[token])[:count]
    weights = [c * x if token in order else x for token, x in enumerate(q)]
    return tuple(weight / sum(weights) for weight in weights)


def accepted(p: Probs, q: Probs) -> float:
    """Chance that a token drawn from q is accepted."""
    return sum(map(min, p, q))


def residual(p: Probs, q: Probs) -> Probs:
    """max(p - q, 0), not normalised."""
    return tuple(max(a - b, 0.0) for a, b in zip(p, q, strict=True))


def hit_after_rejection(
    p: Probs, drafted: Probs, plain: Probs, count: int, *, noise: bool
) -> float:
    """Chance that the bonus token is prepared, once a token drawn from `drafted` is rejected.

    The `count` best candidates other than the rejected token are prepared: by `plain`, the draft's
    q before Saguaro sampling, or by log of it plus the noise that draws the bonus token.
    """
    left, total = residual(p, drafted), 0.0
    for token, (a, b) in enumerate(zip(p, drafted, strict=True)):
        others = tuple(0.0 if v == token else x for v, x in enumerate(plain))
        total += max(b - a, 0.0) * among_best(left, others, count, noise=noise)
    return total / sum(left)


def among_best(p: Probs, q: Probs, count: int, *, noise: bool) -> float:
    """Chance that the token drawn from p is among the `count` best by q.

    With noise: best by log q + Gumbel, the token drawn being the best by log p + Gumbel, the same.
    Gumbel noise is -log E for an exponential clock E, so v is drawn if E_u / p_u > E_v / p_v for
    all u, and u is before v if E_u / q_u < E_v / q_v. Given E_v all are products of exponentials.
    """
    if not noise:
        order = sorted(range(len(q)), key=lambda token: -q[token])
        return sum(p[v] for v in order[:count]) / sum(p)
    total = 0.0
    for v in range(len(p)):
        if p[v] == 0 or q[v] == 0:
            continue
        others = [u for u in range(len(p)) if u != v]
        drawn = {u: p[u] / p[v] for u in others}
        behind = {u: max(p[u] / p[v], q[u] / q[v]) for u in others}
        for size in range(count):
            for ahead in itertools.combinations(others, size):
                fixed = 1 + sum(behind[u] for u in others if u not in ahead)
                for late in itertools.product((False, True), repeat=size):
                    pairs = zip(ahead, late, strict=True)
                    rate = fixed + sum(behind[u] if is_late else drawn[u] for u, is_late in pairs)
                    total += (-1) ** sum(late) / rate
    return total


def speed(
    hit: float, on_hit: float, on_miss: float, t_p: float, t_b: float, rows: int = 1
) -> float:
    """Theorem 7, tokens per verification time; with rows > 1 Corollary 16."""
    tokens = hit * on_hit + (1 - hit) * on_miss
    all_hit = hit**rows
    return tokens / (all_hit * max(1, t_p) + (1 - all_hit) * (1 + t_b))


CASES = (  # a, K, M, T_SD, T_p, backup
    (0.8, 4, 16, 0.1, 0.12, "draft"),
    (0.8, 4, 16, 0.6, 0.75, "draft"),
    (0.8, 4, 16, 0.6, 0.75, "none"),
    (0.8, 4, 32, 0.6, 0.75, "draft"),
    (0.5, 4, 16, 0.6, 0.75, "draft"),
    (0.8, 2, 16, 0.8, 1.0, "draft"),
    (0.8, 4, 16, 1.6, 2.0, "draft"),
)


def main() -> None:
    """Prints the tables."""
    print("| a | K | M | T_SD | T_p | backup | p_hit | SD/AR | SSD/AR | SSD/SD | ceiling |")
    for a, k, budget, t_sd, t_p, backup in CASES:
        hit, e = 1 - missed(a, k, budget), length(a, k)
        on_miss, t_b = (e, t_sd) if backup == "draft" else (1.0, 0.0)
        sd, ssd = e / (1 + t_sd), speed(hit, e, on_miss, t_p, t_b)
        ceiling = (1 + t_sd) / max(1, t_p)
        figures = " | ".join(f"{x:.2f}" for x in (hit, sd, ssd, ssd / sd, ceiling))
        print(f"| {a} | {k} | {budget} | {t_sd} | {t_p} | {backup} | {figures} |")
    print("E", length(0.8, 4), "E of K - 1", length(0.8, 3))
    hit, e = 1 - missed(0.8, 4, 16), length(0.8, 4)
    for rows in (1, 2, 4, 8, 16):
        slow = speed(hit, e, e, 0.75, 0.6, rows)
        fast = speed(hit, e, 1.0, 0.75, 0.0, rows)
        print(f"| {rows} | {hit**rows:.2f} | {slow:.2f} | {fast:.2f} | {e / 1.6:.2f} |")
    better = e - (hit * e + 1 - hit)
    m = better / ((hit * e + 1 - hit) * 0.6)
    print("b*", math.log(1 - m) / math.log(hit))
    for a in (0.5, 0.7, 0.8, 0.9):
        print(a, fan_out(a, 4, 16), f"{missed(a, 4, 16):.3f}", f"uniform {5 / 16:.3f}")
    for c in (1.0, 0.5, 0.0):
        q = lowered(Q, PREPARED + 1, c)
        hit = hit_after_rejection(P, q, Q, PREPARED, noise=False)
        print("C", c, "accepted", f"{accepted(P, q):.3f}", "hit after rejection", f"{hit:.3f}")
    for noise in (False, True):
        last = among_best(P, Q, PREPARED, noise=noise)
        before = hit_after_rejection(P, Q, Q, PREPARED, noise=noise)
        print("noise", noise, "k = K", f"{last:.3f}", "k < K", f"{before:.3f}")


if __name__ == "__main__":
    main()
