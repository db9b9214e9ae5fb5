"""Rounds of an engine as a picture: the target's lane above, the draft's below.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart;
misses are hatched, too, for print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.roles.activity import FORWARDS
from ssd_jax.traces.read import EngineLanes, Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP, ROUNDS = 4, 12
"""Rounds that are left out at first, and rounds that are drawn, where nobody says otherwise."""


class _Style(NamedTuple):
    label: str
    color: str
    hatch: str = ""


_HIT = _Style("verification, hit", "#009E73")
_SOME = _Style("verification, some rows hit", "#F0E442")
_MISS = _Style("verification, miss", "#D55E00", "//")
_PLAIN = _Style("target forward", "#999999")
_PREFILL = _Style("prefill", "#D9D9D9")
_DRAFT = {
    "expand": _Style("draft forward", "#0072B2"),
    "grow": _Style("draft forward", "#0072B2"),
    "draft": _Style("just-in-time draft", "#CC79A7"),
    "promote": _Style("promotion", "#E69F00"),
    "prefill": _PREFILL,
}
_EXPOSED = _Style("draft forward, not hidden", "#56B4E9")
_TARGET_LANE, _DRAFT_LANE, _HEIGHT = 1.0, 0.0, 0.72
_NARROW = 0.022  # of the width: a slice that has no room for a word


def choose(engines: Sequence[EngineLanes], name: str | None) -> EngineLanes:
    """The engine of this name; without a name the last one with a draft of its own.

    Raises:
      InputError: there is none with rounds.
    """
    drawn = [engine for engine in engines if engine.rounds]
    if not drawn:
        raise InputError("the trace has no rounds; trace a run that generates more than one token")
    if name is None:
        return next((engine for engine in reversed(drawn) if engine.draft), drawn[-1])
    for engine in drawn:
        if engine.name == name:
            return engine
    names = ", ".join(repr(engine.name) for engine in drawn)
    raise InputError(f"engine = {name!r} is not in the trace; one of {names}")


def window(engine: EngineLanes, first: int | None, count: int) -> list[Slice]:
    """Rounds `first` to `first` + `count` - 1; by default those after the warm-up.

    Raises:
      InputError: the trace has none of them.
    """
    rounds = engine.rounds
    if first is None:
        first = max(0, min(WARM_UP, len(rounds) - count))
    if not 0 <= first < len(rounds):
        raise InputError(f"from = {first}: the trace has rounds 0 to {len(rounds) - 1}")
    if count < 1:
        raise InputError(f"rounds = {count}: draw at least 1")
    return rounds[first : first + count]


def draw(engine: EngineLanes, rounds: Sequence[Slice], path: Path) -> None:
    """Draws these rounds into a file, whose name says the kind of picture.

    Raises:
      InputError: without matplotlib, or a kind or place that cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Rectangle
    except ImportError:
        raise InputError(
            "drawing needs matplotlib; pip install 'ssd-jax[plot]', or open the trace at "
            "https://ui.perfetto.dev"
        ) from None
    start, end = rounds[0].begin, rounds[-1].end
    margin = 0.01 * (end - start)
    begin, end = start - margin, end + margin
    figure, axes = plt.subplots(figsize=(12, 3.6), layout="constrained")
    used = _target(axes, engine.target, (begin, end), start)
    if engine.draft:
        used |= _draft(axes, engine, (begin, end), start)
    axes.set_yticks([_TARGET_LANE, _DRAFT_LANE][: 1 + bool(engine.draft)])
    axes.set_yticklabels(["target", "draft"][: 1 + bool(engine.draft)], fontsize=12)
    bottom = _DRAFT_LANE if engine.draft else _TARGET_LANE
    axes.set_ylim(bottom - 0.5, _TARGET_LANE + 0.5)
    axes.set_xlim(begin - start, end - start)
    axes.set_xlabel("ms (+n: tokens that a round committed)")
    axes.set_title(title(engine, rounds), loc="left", fontsize=12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    patches = [
        Rectangle((0, 0), 1, 1, facecolor=style.color, hatch=style.hatch, edgecolor="white")
        for style in used
    ]
    labels = [style.label for style in used]
    figure.legend(
        patches,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 6),
        frameon=False,
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"output = '{path}' cannot be written: {error}") from None
    finally:
        plt.close(figure)


def title(engine: EngineLanes, rounds: Sequence[Slice]) -> str:
    """What is drawn, how much of the draft's work it hides, and what was committed."""
    first, last = rounds[0].args["round"], rounds[-1].args["round"]
    parts = [f"{engine.name}, rounds {first} to {last}"]
    here = engine.hidden_share(rounds[0].begin, rounds[-1].end)
    whole = engine.hidden_share()
    if here is not None and whole is not None:
        parts.append(f"{here:.0%} of the draft's time hidden ({whole:.0%} in the whole run)")
    milliseconds = rounds[-1].end - rounds[0].begin
    tokens = sum(each.committed for each in rounds)
    parts.append(f"{tokens} tokens in {milliseconds:.0f} ms")
    return "; ".join(parts)


def _target(
    axes: Axes, slices: Iterable[Slice], between: tuple[float, float], zero: float
) -> dict[_Style, None]:
    used: dict[_Style, None] = {}
    for each in _within(slices, between):
        style = _round_style(each)
        used[style] = None
        words = f"+{each.committed}" if "round" in each.args else ""
        _bar(axes, each, style, _TARGET_LANE, between, zero, words)
    return used


def _draft(
    axes: Axes, engine: EngineLanes, between: tuple[float, float], zero: float
) -> dict[_Style, None]:
    used: dict[_Style, None] = {}
    for each in _within(engine.draft, between):
        style = _DRAFT.get(each.name, _PLAIN)
        used[style] = None
        _bar(axes, each, style, _DRAFT_LANE, between, zero, "")
        if each.name in FORWARDS:
            for gap in gaps(engine.target, max(each.begin, between[0]), min(each.end, between[1])):
                used[_EXPOSED] = None
                _bar(axes, Slice("", *gap, {}), _EXPOSED, _DRAFT_LANE, between, zero, None)
    return used


def gaps(target: Iterable[Slice], begin: float, end: float) -> list[tuple[float, float]]:
    """When the target was idle between two times; its slices are in order."""
    found = []
    for each in target:
        if each.end > begin and each.begin < end:
            if each.begin > begin:
                found.append((begin, each.begin))
            begin = each.end
    return [*found, (begin, end)] if begin < end else found


def _round_style(each: Slice) -> _Style:
    if "round" not in each.args:
        return _PREFILL
    sources = each.sources
    if not sources:
        return _PLAIN
    hits = sources.count("hit")
    return _HIT if hits == len(sources) else _SOME if hits else _MISS


def _within(slices: Iterable[Slice], between: tuple[float, float]) -> list[Slice]:
    return [each for each in slices if each.begin < between[1] and each.end > between[0]]


def _bar(
    axes: Axes,
    each: Slice,
    style: _Style,
    lane: float,
    between: tuple[float, float],
    zero: float,
    words: str | None,
) -> None:
    """Draws a slice; with None for words as a part of another, without an outline."""
    begin, end = max(each.begin, between[0]), min(each.end, between[1])
    axes.broken_barh(
        [(begin - zero, end - begin)],
        (lane - _HEIGHT / 2, _HEIGHT),
        facecolor=style.color,
        edgecolor="white",
        linewidth=0 if words is None else 0.8,
        hatch=style.hatch,
    )
    if words and end - begin > _NARROW * (between[1] - between[0]):
        axes.text(
            (begin + end) / 2 - zero,
            lane,
            words,
            ha="center",
            va="center",
            fontsize=11,
            color="black" if style is _SOME else "white",
            bbox={"facecolor": style.color, "edgecolor": "none", "pad": 1.5},
        )
