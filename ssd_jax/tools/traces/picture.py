"""Rounds of an engine as a picture: the target's lane above, those of draft workers below.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart;
misses are hatched, too, for print.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.roles.activity import FORWARDS
from ssd_jax.system.atomic import new_file
from ssd_jax.system.files import brief
from ssd_jax.tools.traces.read import EngineLanes, Slice
from ssd_jax.tools.traces.time_axis import TimeAxis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP, ROUNDS = 4, 12
"""Rounds that are left out behind a prefill, and rounds that are drawn, by default."""
_LONG_GAP = 2.0
"""Rounds, by their median: a longer time in which nothing happened is cut out."""


class _Style(NamedTuple):
    label: str
    color: str
    hatch: str = ""


_HIT = _Style("verification, hit", "#009E73")
_PARTIAL_HIT = _Style("verification, some rows hit", "#F0E442")
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
    with_rounds = [engine for engine in engines if engine.rounds]
    if not with_rounds:
        raise InputError("the trace has no rounds; trace a run that generates more than one token")
    if name is None:
        return next((engine for engine in reversed(with_rounds) if engine.drafts), with_rounds[-1])
    for engine in with_rounds:
        if engine.name == name:
            return engine
    names = ", ".join(repr(engine.name) for engine in with_rounds)
    raise InputError(f"engine = {name!r} is not in the trace; one of {names}")


def window(engine: EngineLanes, first: int | None, count: int) -> list[Slice]:
    """Rounds `first` to `first` + `count` - 1, one or more.

    By default they lie behind the last prefill and a warm-up or, where too few do, in the longest
    run of rounds without a prefill.

    Raises:
      InputError: the trace has none of them.
    """
    rounds = engine.rounds
    if first is None:
        runs = _runs(engine)
        begin, length = runs[-1]
        if length < count:
            begin, length = max(runs, key=lambda run: run[1])
            count = min(count, length)
        first = begin + min(WARM_UP, length - count)
    if not 0 <= first < len(rounds):
        raise InputError(f"from = {first}: the trace has rounds 0 to {len(rounds) - 1}")
    return rounds[first : first + count]


def _runs(engine: EngineLanes) -> list[tuple[int, int]]:
    """First round and length of each run of rounds without a prefill; a last one may be empty."""
    runs, rounds = [(0, 0)], 0
    for slice_ in engine.target:
        if "round" in slice_.args:
            rounds += 1
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((rounds, 0))
    return runs


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
    axis = _time_axis(engine, rounds)
    margin = 0.01 * (end - zero - axis.left_out)
    bars = [
        bar
        for bar in _bars(engine, zero - margin, end + margin)
        if bar.end > zero and bar.begin < end  # what only reaches into the margin says nothing
    ]
    left, right = axis.position(zero - margin), axis.position(end + margin)
    workers = len(engine.drafts)
    lanes = ["target", *("draft" if n == 1 else f"draft {n}" for n in range(1, workers + 1))]
    figure = Figure(figsize=(12, 3.6 + 0.9 * max(workers - 1, 0)), layout="constrained")
    axes = figure.subplots()
    for bar in bars:
        begin, end = (axis.position(time) - left - margin for time in (bar.begin, bar.end))
        _draw_bar(axes, bar._replace(begin=begin, end=end), _NARROW * (right - left))
    for x, lost in axis.cuts:
        _draw_cut(axes, x - left - margin, lost)
    axes.set_yticks([-n for n in range(len(lanes))], labels=lanes, fontsize=12)
    axes.set_ylim(-workers - 0.5, _TARGET_LANE + 0.5)
    axes.set_xlim(-margin, right - left - margin)
    axes.set_xlabel("ms (+n: tokens that a round committed)")
    axes.set_title(title(engine, rounds), loc="left", fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    styles = list(dict.fromkeys(bar.style for bar in bars))
    figure.legend(
        [
            Rectangle((0, 0), 1, 1, fc=style.color, hatch=style.hatch, ec="white")
            for style in styles
        ],
        [style.label for style in styles],
        loc="outside lower center",
        ncols=min(len(styles), 6),
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
    window_share, run_share = engine.hidden_share(first.begin, last.end), engine.hidden_share()
    if window_share is not None and run_share is not None:
        parts.append(
            f"{window_share:.0%} of the draft's time hidden ({run_share:.0%} in the whole run)"
        )
    tokens = sum(slice_.committed for slice_ in rounds)
    lost = _time_axis(engine, rounds).left_out
    parts.append(f"{tokens} tokens in {last.end - first.begin - lost:.0f} ms")
    return "; ".join(parts)


def _time_axis(engine: EngineLanes, rounds: Sequence[Slice]) -> TimeAxis:
    """Time from the first to the last of these rounds, without long gaps."""
    begin, end = rounds[0].begin, rounds[-1].end
    lanes = [slice_ for lane in (engine.target, *engine.drafts) for slice_ in lane]
    spans = [(max(s.begin, begin), min(s.end, end)) for s in lanes if s.begin < end > begin < s.end]
    median = statistics.median(slice_.end - slice_.begin for slice_ in rounds)
    return TimeAxis(spans, longest=_LONG_GAP * median, remaining=median / 2)


class _Bar(NamedTuple):
    """The drawn part of a slice; with `part` it lies on another bar and has no outline."""

    begin: float
    end: float
    lane: int
    style: _Style
    label: str = ""
    part: bool = False


def _bars(engine: EngineLanes, first: float, last: float) -> Iterator[_Bar]:
    """The bars between two times."""
    for n, slices in enumerate((engine.target, *engine.drafts)):
        lane = -n
        for slice_ in slices:
            begin, end = max(slice_.begin, first), min(slice_.end, last)
            if begin >= end:
                continue
            if lane == _TARGET_LANE:
                label = f"+{slice_.committed}" if "round" in slice_.args else ""
                yield _Bar(begin, end, lane, _round_style(slice_), label)
                continue
            yield _Bar(begin, end, lane, _DRAFT.get(slice_.name, _PLAIN))
            if slice_.name in FORWARDS:
                for gap in gaps(engine.target, begin, end):
                    yield _Bar(*gap, lane, _EXPOSED, part=True)


def gaps(target: Iterable[Slice], begin: float, end: float) -> list[tuple[float, float]]:
    """When the target was idle between two times; its slices are in order."""
    idle = []
    for slice_ in target:
        if slice_.end > begin and slice_.begin < end:
            if slice_.begin > begin:
                idle.append((begin, slice_.begin))
            begin = slice_.end
    return [*idle, (begin, end)] if begin < end else idle


def _round_style(slice_: Slice) -> _Style:
    if "round" not in slice_.args:
        return _PREFILL
    sources = slice_.sources
    if not sources:
        return _PLAIN
    hits = sources.count("hit")
    return _HIT if hits == len(sources) else _PARTIAL_HIT if hits else _MISS


def _draw_cut(axes: Axes, x: float, lost: float) -> None:
    """Marks where the axis leaves out so many milliseconds."""
    axes.axvline(x, color="#999999", linestyle=(0, (2, 2)), linewidth=1)
    duration = f"{lost / 1e3:.1f} s" if lost >= 1e3 else f"{lost:.0f} ms"
    style = {"ha": "center", "va": "center", "rotation": 90, "fontsize": 8, "color": "#666666"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(x, _TARGET_LANE - 0.5, f"{duration} idle", bbox=box, **style)


def _draw_bar(axes: Axes, bar: _Bar, narrow: float) -> None:
    """Draws a bar whose times are places on the axis."""
    axes.broken_barh(
        [(bar.begin, bar.end - bar.begin)],
        (bar.lane - _HEIGHT / 2, _HEIGHT),
        facecolor=bar.style.color,
        edgecolor="white",
        linewidth=0 if bar.part else 0.8,
        hatch=bar.style.hatch,
    )
    if bar.label and bar.end - bar.begin > narrow:
        axes.text(
            (bar.begin + bar.end) / 2,
            bar.lane,
            bar.label,
            ha="center",
            va="center",
            fontsize=11,
            color="black" if bar.style is _PARTIAL_HIT else "white",
            bbox={"facecolor": bar.style.color, "edgecolor": "none", "pad": 1.5},
        )
