"""Rounds of an engine as a picture: the target's lane above, those of draft workers below.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart;
misses are hatched, too, for print.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.roles.activity import FORWARDS
from ssd_jax.system.atomic import new_file
from ssd_jax.system.files import brief
from ssd_jax.traces.read import EngineLanes, Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP, ROUNDS = 4, 12
"""Rounds that are left out at first, and rounds that are drawn, by default."""


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
_TARGET_LANE, _HEIGHT = 0, 0.72
"""The lane of draft worker n, from 1 on, is at -n."""
_NARROW = 0.022  # of the width: a narrower slice has no room for a word


def choose(engines: Sequence[EngineLanes], name: str | None) -> EngineLanes:
    """The engine of this name; without a name the last one with a draft of its own.

    Raises:
      InputError: there is none with rounds.
    """
    drawn = [engine for engine in engines if engine.rounds]
    if not drawn:
        raise InputError("the trace has no rounds; trace a run that generates more than one token")
    if name is None:
        return next((engine for engine in reversed(drawn) if engine.drafts), drawn[-1])
    for engine in drawn:
        if engine.name == name:
            return engine
    names = ", ".join(repr(engine.name) for engine in drawn)
    raise InputError(f"engine = {name!r} is not in the trace; one of {names}")


def window(engine: EngineLanes, first: int | None, count: int) -> list[Slice]:
    """Rounds `first` to `first` + `count` - 1, one or more; by default those after the warm-up.

    Raises:
      InputError: the trace has none of them.
    """
    rounds = engine.rounds
    if first is None:
        first = max(0, min(WARM_UP, len(rounds) - count))
    if not 0 <= first < len(rounds):
        raise InputError(f"from = {first}: the trace has rounds 0 to {len(rounds) - 1}")
    return rounds[first : first + count]


def draw(engine: EngineLanes, rounds: Sequence[Slice], path: Path) -> None:
    """Draws these rounds into a file, whose ending names the kind of picture.

    Raises:
      InputError: matplotlib is missing, or the kind cannot be written.
      OSError: the file cannot be written there.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise InputError(
            "drawing needs matplotlib; pip install 'ssd-jax[plot]', or open the trace at "
            "https://ui.perfetto.dev"
        ) from None
    except ValueError as error:  # of MPLBACKEND
        raise InputError(f"matplotlib does not start: {brief(error)}") from None
    zero, end = rounds[0].begin, rounds[-1].end
    margin = 0.01 * (end - zero)
    bars = list(_bars(engine, zero - margin, end + margin))
    workers = len(engine.drafts)
    lanes = ["target", *("draft" if n == 1 else f"draft {n}" for n in range(1, workers + 1))]
    figure = Figure(figsize=(12, 3.6 + 0.9 * max(workers - 1, 0)), layout="constrained")
    axes = figure.subplots()
    for bar in bars:
        _draw_bar(axes, bar, zero, _NARROW * (end - zero + 2 * margin))
    axes.set_yticks([-n for n in range(len(lanes))], labels=lanes, fontsize=12)
    axes.set_ylim(-workers - 0.5, _TARGET_LANE + 0.5)
    axes.set_xlim(-margin, end + margin - zero)
    axes.set_xlabel("ms (+n: tokens that a round committed)")
    axes.set_title(title(engine, rounds), loc="left", fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    used = list(dict.fromkeys(bar.style for bar in bars))
    figure.legend(
        [Rectangle((0, 0), 1, 1, fc=style.color, hatch=style.hatch, ec="white") for style in used],
        [style.label for style in used],
        loc="outside lower center",
        ncols=min(len(used), 6),
        frameon=False,
        fontsize=10,
    )
    try:
        with new_file(path) as file:
            figure.savefig(file, format=path.suffix[1:] or None, dpi=150)
    except (
        ValueError,
        RuntimeError,
    ) as error:  # no such format; a program that it needs is missing
        raise InputError(f"output = '{path}' cannot be written: {error}") from None


def title(engine: EngineLanes, rounds: Sequence[Slice]) -> str:
    """The rounds that are drawn, the share of the draft's work hidden, and the tokens committed."""
    first, last = rounds[0], rounds[-1]
    parts = [f"{engine.name}, rounds {first.args['round']} to {last.args['round']}"]
    here, whole = engine.hidden_share(first.begin, last.end), engine.hidden_share()
    if here is not None and whole is not None:
        parts.append(f"{here:.0%} of the draft's time hidden ({whole:.0%} in the whole run)")
    tokens = sum(each.committed for each in rounds)
    parts.append(f"{tokens} tokens in {last.end - first.begin:.0f} ms")
    return "; ".join(parts)


class _Bar(NamedTuple):
    """The drawn part of a slice; with `part` it lies on another bar and has no outline."""

    begin: float
    end: float
    lane: int
    style: _Style
    words: str = ""
    part: bool = False


def _bars(engine: EngineLanes, first: float, last: float) -> Iterator[_Bar]:
    """The bars between two times."""
    for n, slices in enumerate((engine.target, *engine.drafts)):
        lane = -n
        for each in slices:
            begin, end = max(each.begin, first), min(each.end, last)
            if begin >= end:
                continue
            if lane == _TARGET_LANE:
                words = f"+{each.committed}" if "round" in each.args else ""
                yield _Bar(begin, end, lane, _round_style(each), words)
                continue
            yield _Bar(begin, end, lane, _DRAFT.get(each.name, _PLAIN))
            if each.name in FORWARDS:
                for gap in gaps(engine.target, begin, end):
                    yield _Bar(*gap, lane, _EXPOSED, part=True)


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


def _draw_bar(axes: Axes, bar: _Bar, zero: float, narrow: float) -> None:
    axes.broken_barh(
        [(bar.begin - zero, bar.end - bar.begin)],
        (bar.lane - _HEIGHT / 2, _HEIGHT),
        facecolor=bar.style.color,
        edgecolor="white",
        linewidth=0 if bar.part else 0.8,
        hatch=bar.style.hatch,
    )
    if bar.words and bar.end - bar.begin > narrow:
        axes.text(
            (bar.begin + bar.end) / 2 - zero,
            bar.lane,
            bar.words,
            ha="center",
            va="center",
            fontsize=11,
            color="black" if bar.style is _SOME else "white",
            bbox={"facecolor": bar.style.color, "edgecolor": "none", "pad": 1.5},
        )
