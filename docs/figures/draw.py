"""Draws the figures of docs/algorithm.md: `python docs/figures/draw.py`."""

from __future__ import annotations

from math import log
from pathlib import Path
from random import Random

import formulas as f

BLUE, ORANGE, GREEN = "#3b6fb6", "#d98a2b", "#3d9660"
RED, GREY, INK = "#c2504c", "#b9bec6", "#23272e"
WIDTH = 720
TOKENS = "abcdefgh"
A, K, T_SD, T_P = 0.8, 4, 0.6, 0.75  # of the timeline; see the table of the page


class Picture:
    """An SVG on a light ground."""

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "") -> None:
        """A filled rectangle with white text in its middle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="2" fill="{fill}"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4.5, text, fill="#ffffff", anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        fill: str = INK,
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """A line of text from (x, y)."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}>{text}</text>'
        )

    def line(self, *points: float, stroke: str = INK, width: float = 1.2, dash: str = "") -> None:
        """A polyline through x, y, x, y, ..."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        where = " ".join(f"{point:.1f}" for point in points)
        self._parts.append(
            f'<polyline points="{where}" fill="none" stroke="{stroke}" '
            f'stroke-width="{width}"{dashed}/>'
        )

    def save(self, name: str) -> None:
        """Writes it."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
            f'width="{WIDTH}" height="{self._height}" role="img" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
        )
        ground = f'<rect width="{WIDTH}" height="{self._height}" rx="6" fill="#fbfbf9"/>'
        lines = [head, f"<title>{self._title}</title>", ground, *self._parts, "</svg>"]
        (Path(__file__).parent / name).write_text("\n".join(lines) + "\n")


def timeline() -> None:
    """Who works when in AR, SD and SSD."""
    picture = Picture(296, "Timelines of AR, SD and SSD")
    left, unit, end = 106, 84.0, 6.4
    e = f.length(A, K)

    def span(row: float, start: float, duration: float, fill: str, text: str) -> None:
        picture.box(left + start * unit + 0.8, row, duration * unit - 1.6, 24, fill, text)

    def lanes(name: str, top: float, *who: str) -> None:
        picture.text(12, top + 17, name, bold=True, size=15)
        for index, role in enumerate(who):
            picture.text(left - 8, top + 17 + 28 * index, role, anchor="end")

    lanes("AR", 14, "target")
    for at in range(6):
        span(14, at, 1, BLUE, "1 token")
    lanes("SD", 64, "draft", "target")
    for turn in range(4):
        start = turn * (1 + T_SD)
        span(64, start, T_SD, ORANGE, "K")
        span(92, start + T_SD, 1, BLUE, "verify")
    lanes("SSD", 144, "draft", "target")
    span(144, 0, T_SD, ORANGE, "K")
    start = T_SD
    for outcome in ("hit", "hit", "miss", "hit", "hit"):
        span(172, start, 1, BLUE, "verify")
        span(144, start, T_P, GREEN if outcome == "hit" else GREY, "branches")
        middle = left + (start + 1) * unit
        colour = GREEN if outcome == "hit" else RED
        picture.line(middle, 140, middle, 200, stroke=colour, width=2)
        picture.text(middle, 216, outcome, fill=colour, anchor="middle", bold=True)
        start += 1
        if outcome == "miss":
            span(144, start, T_SD, ORANGE, "K")
            start += T_SD
    axis = 236
    picture.line(left, axis, left + (end + 0.6) * unit, axis)
    for tick in range(7):
        picture.line(left + tick * unit, axis, left + tick * unit, axis + 5)
        picture.text(left + tick * unit, axis + 19, str(tick), anchor="middle")
    picture.text(12, axis + 19, "verifications")
    sd = e / (1 + T_SD)
    hit = 1 - f.missed(A, K, 16)
    ssd = f.speed(hit, e, e, T_P, T_SD)
    summary = (
        f"Expected tokens a verification time (a = {A}, K = {K}, drafting {T_SD}, hit rate "
        f"{hit:.2f}): AR 1, SD {sd:.2f}, SSD {ssd:.2f}"
    )
    picture.text(12, 284, summary, size=12)
    picture.save("timeline.svg")


def cache() -> None:
    """The outcomes of one verification that are prepared for, and the one that comes true."""
    k, budget = 3, 8
    counts = f.fan_out(A, k, budget)
    bonus = (("old", "man"), ("ran", "is"), ("by",), ("the", "a", "my"))
    next_tokens = (
        ("cat sat on", "sat on a"),
        ("to the door", "on the mat"),
        ("the fire and",),
        ("mat .", "mat and", "bed ,"),
    )
    assert tuple(map(len, bonus)) == counts
    picture = Picture(346, "The speculation cache: a tree of outcomes")
    xs = (66, 216, 366, 516)
    y = 44
    labels = ("The", "cat", "sat", "on")
    names = ("pending t*", "s₁", "s₂", "s₃")
    for index, x in enumerate(xs):
        picture.text(x, y - 24, names[index], anchor="middle", size=12)
        if index:
            picture.line(xs[index - 1] + 32, y, x - 32, y, width=2)
        picture.box(x - 32, y - 14, 64, 28, BLUE, labels[index])
    for index, x in enumerate(xs):
        said = f"k = {index}: F = {counts[index]}"
        picture.text(x + 14, y + 38, said, size=13, bold=True)
        trunk = y + 70 + 62 * (counts[index] - 1)
        picture.line(x, y + 14, x, trunk, width=1.5)
        for rank, token in enumerate(bonus[index]):
            top = y + 56 + 62 * rank
            won = (index, rank) == (2, 0)
            colour = GREEN if won else ORANGE
            picture.line(x, top + 14, x + 14, top + 14, width=1.5)
            picture.box(x + 14, top, 50, 28, colour, token)
            picture.text(x + 14, top + 44, next_tokens[index][rank], size=12)
    for row, said in enumerate(
        ("a hit if t* = by", "after cat sat:", "cat sat by", "is committed")
    ):
        picture.text(xs[2] + 14, y + 128 + 17 * row, said, fill=GREEN, bold=True)
    picture.text(12, 300, "Blue: the record under verification. Orange: bonus tokens t* with a")
    picture.text(12, 318, "branch; below each, what the branch proposes (K = 3 tokens, after k = 3")
    picture.text(12, 336, f"one less). F: Theorem 12 for a = {A}, r = 1, M = {budget}.")
    picture.save("cache.svg")


def fan_out() -> None:
    """Theorem 12 for several a."""
    rates, budget = (0.5, 0.7, 0.8, 0.9), 16
    picture = Picture(248, "Fan-out of Theorem 12 for four acceptance rates")
    base, unit = 176, 17.0
    for panel, a in enumerate(rates):
        left = 26 + 174 * panel
        counts = f.fan_out(a, K, budget)
        picture.text(left + 70, 24, f"a = {a}", anchor="middle", bold=True)
        even = base - unit * budget / (K + 1)
        for k, count in enumerate(counts):
            x = left + 29 * k
            fill = ORANGE if k == K else BLUE
            picture.box(x, base - unit * count, 23, unit * count, fill)
            picture.text(x + 11.5, base - 8, str(count), fill="#ffffff", anchor="middle")
            picture.text(x + 11.5, base + 17, str(k), anchor="middle")
        picture.line(left - 4, even, left + 144, even, stroke=INK, dash="4 3")
        picture.line(left - 4, base, left + 144, base)
        miss = f.missed(a, K, budget)
        uniform = (K + 1) / budget
        picture.text(
            left + 70, base + 37, f"miss {miss:.2f} ({uniform:.2f})", anchor="middle", size=12
        )
    picture.text(
        12,
        238,
        f"Branches F_k for k = 0..{K} accepted tokens, M = {budget}, r = 1. Dashed, and in "
        "brackets: uniform fan-out.",
        size=12,
    )
    picture.save("fan_out.svg")


def saguaro() -> None:
    """The residual with and without Saguaro sampling."""
    picture = Picture(292, "Residual under Saguaro sampling")
    prepared = set(range(f.PREPARED + 1))
    for panel, c in enumerate((1.0, 0.5)):
        left, base, unit = 22 + 352 * panel, 146, 290
        q = f.lowered(f.Q, f.PREPARED + 1, c)
        rest = f.residual(f.P, q)
        hit = f.hit_after_rejection(f.P, q, f.Q, f.PREPARED, noise=False)
        name = "C = 1: plain sampling" if c == 1 else f"C = {c}"
        picture.text(left, 22, name, bold=True)
        for token in range(len(q)):
            x = left + 41 * token
            picture.box(x, base - unit * f.P[token], 15, unit * f.P[token], BLUE)
            picture.box(x + 16, base - unit * q[token], 15, unit * q[token], ORANGE)
            height = 2 * unit * rest[token]
            fill = GREEN if token in prepared else RED
            if rest[token]:
                picture.box(x, 232 - height, 31, height, fill)
            bold = token in prepared
            picture.text(x + 15.5, 248, TOKENS[token], anchor="middle", bold=bold)
        for y in (base, 232):
            picture.line(left - 4, y, left + 324, y)
        figures = f"accepted {f.accepted(f.P, q):.2f}; bonus prepared once rejected {hit:.2f}"
        picture.text(left, 268, figures, size=13)
    x = 12
    for fill, label in (
        (BLUE, "p"),
        (ORANGE, "q"),
        (GREEN, "residual, in the lowered set"),
        (RED, "residual elsewhere (residuals at twice the scale)"),
    ):
        picture.box(x, 276, 10, 10, fill)
        picture.text(x + 14, 286, label, size=12)
        x += 34 + 7.2 * len(label)
    picture.save("saguaro.svg")


def noise() -> None:
    """Candidates ranked by q and by q and noise."""
    picture = Picture(282, "Noise-aware ranking of bonus tokens")

    def clocks(seed: int) -> list[float]:
        return [-log(Random(f"{seed}{token}").expovariate(1.0)) for token in TOKENS]

    def scores(probs: f.Probs, gumbel: list[float]) -> list[float]:
        return [log(p) + g for p, g in zip(probs, gumbel, strict=True)]

    def best(values: list[float] | f.Probs) -> list[int]:
        return sorted(range(len(TOKENS)), key=lambda token: -values[token])

    # The first noise that draws a token which q alone does not prepare.
    seed = next(s for s in range(99) if best(scores(f.P, clocks(s)))[0] not in best(f.Q)[:3])
    gumbel = clocks(seed)
    drawn = best(scores(f.P, gumbel))[0]
    rows = (
        ("draft: log q", [log(q) for q in f.Q], ORANGE),
        ("draft: log q + G", scores(f.Q, gumbel), GREEN),
        ("target: log p + G", scores(f.P, gumbel), BLUE),
    )
    for index, (label, values, colour) in enumerate(rows):
        top, low, high = 34 + 70 * index, min(values), max(values)
        picture.text(12, top + 24, label, bold=True)
        shown = best(values)[: 1 if colour == BLUE else f.PREPARED]
        for token, value in enumerate(values):
            x, height = 180 + 66 * token, 4 + 38 * (value - low) / (high - low)
            picture.box(x, top + 42 - height, 40, height, colour if token in shown else GREY)
            picture.text(x + 20, top + 57, f"{value:.2f}", anchor="middle", size=12)
    for token, name in enumerate(TOKENS):
        bold = token == drawn
        fill = BLUE if bold else INK
        picture.text(200 + 66 * token, 20, name, anchor="middle", bold=bold, fill=fill, size=15)
    plain = f.among_best(f.P, f.Q, f.PREPARED, noise=False)
    aware = f.among_best(f.P, f.Q, f.PREPARED, noise=True)
    picture.text(
        12,
        256,
        f"Coloured: the {f.PREPARED} tokens that the draft prepares, and the one that the target "
        "draws. Over all noise the",
        size=12,
    )
    picture.text(
        12,
        272,
        f"drawn token (k = K) is prepared with probability {plain:.3f} if ranked by q, "
        f"{aware:.3f} by q and noise.",
        size=12,
    )
    picture.save("noise.svg")


if __name__ == "__main__":
    for draw in (timeline, cache, fan_out, saguaro, noise):
        draw()
