"""Reading a trace file and choosing what to draw of it."""

from __future__ import annotations

import json
import sys

import pytest
from matplotlib.axes import Axes

from ssd_jax.cli.main import main
from ssd_jax.engine.rounds.trace import RowTrace, Trace
from ssd_jax.errors import InputError
from ssd_jax.roles.activity import Busy
from ssd_jax.tools.traces import picture
from ssd_jax.tools.traces.picture import choose, gaps, title, window
from ssd_jax.tools.traces.read import EngineLanes, Slice, read_trace
from ssd_jax.tools.traces.time_axis import TimeAxis
from tests.system.full_disk import files_of_at_most

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def path(tmp_path):
    """Two engines; in the second each round takes 8 s of 10, the draft works from 5 s into one
    until 1 s into the next: half of that is hidden."""
    trace = Trace(tmp_path / "trace.json", zero=0.0)
    plain, ssd = trace.engine("ar"), trace.engine("ssd k=2")
    for number in range(20):
        plain.round((float(number), number + 1.0), [RowTrace(0, 0, None, 0, 0, [7])])
    ssd.prefill((90.0, 95.0), 3, 17)
    for number in range(20):
        begin = 100.0 + 10 * number
        source = "miss" if number % 5 == 4 else "hit"
        ssd.round((begin, begin + 8), [RowTrace(0, 3, source, 2, 1, [7, 8])])
        ssd.draft([Busy("expand", begin + 5, begin + 9, [0]), Busy("grow", begin + 9, begin + 11)])
    trace.write()
    return trace.path


def test_engines_lanes_and_rounds_come_back(path):
    plain, ssd = read_trace(path)
    assert (plain.name, ssd.name) == ("ar", "ssd k=2")
    assert [len(ssd.target), len(ssd.rounds), *map(len, ssd.drafts)] == [21, 20, 40]
    assert ssd.target[0][:3] == ("prefill", 90_000, 95_000)
    assert ssd.rounds[4].sources == ["miss"]
    assert ssd.rounds[4].committed == 2
    assert (plain.drafts, plain.hidden_share()) == ([], None)


def test_each_draft_worker_has_a_lane(tmp_path, monkeypatch):
    trace = Trace(tmp_path / "trace.json", zero=0.0)
    ssd = trace.engine("ssd k=2")
    ssd.round((0.0, 4.0), [RowTrace(0, 3, "hit", 2, 1, [7])])
    ssd.draft([Busy("grow", 1.0, 2.0, worker=2), Busy("expand", 2.0, 6.0, worker=2)])
    ssd.draft([Busy("expand", 0.0, 2.0)])
    trace.write()
    [engine] = read_trace(trace.path)
    found = [[(span.name, span.begin) for span in worker] for worker in engine.drafts]
    assert found == [[("expand", 0)], [], [("grow", 1000), ("expand", 2000)]]
    assert engine.hidden_share() == 5 / 7
    bars = [*picture._bars(engine, 0, 6000)]
    assert sorted({bar.lane for bar in bars}) == [-3, -1, 0]
    labels, set_yticks = [], Axes.set_yticks

    def set_and_note(self, ticks, labels_=None, **settings):
        labels.extend(zip(ticks, settings["labels"], strict=True))
        return set_yticks(self, ticks, **settings)

    monkeypatch.setattr(Axes, "set_yticks", set_and_note)
    picture.draw(engine, engine.rounds, tmp_path / "lanes.png")
    assert labels == [(0, "target"), (-1, "draft"), (-2, "draft 2"), (-3, "draft 3")]


def test_the_hidden_share_is_of_the_drafts_time_in_the_window(path):
    _, ssd = read_trace(path)
    # Of each 6 s: 3 s to the end of the round, and 1 s of the next, which the last has not.
    assert ssd.hidden_share() == pytest.approx((20 * 3 + 19) / 120)
    assert ssd.hidden_share(140_000, 148_000) == pytest.approx((1 + 3) / (1 + 3))
    assert ssd.hidden_share(148_000, 150_000) == 0
    assert ssd.hidden_share(0, 10) is None
    rounds = window(ssd, 4, 2)
    assert title(ssd, rounds) == (
        "ssd k=2, rounds 4 to 5; 80% of the draft's time hidden (66% in the whole run); "
        "4 tokens in 18000 ms"
    )


def test_the_window_is_after_a_warm_up_where_there_is_room(path):
    _, ssd = read_trace(path)
    numbers = [round_.args["round"] for round_ in window(ssd, None, 12)]
    assert numbers == list(range(4, 16))
    assert [round_.args["round"] for round_ in window(ssd, None, 18)] == list(range(2, 20))
    assert [round_.args["round"] for round_ in window(ssd, 19, 12)] == [19]
    for first in (20, -1):
        with pytest.raises(InputError):
            window(ssd, first, 1)


def run_of(*counts):
    """Lanes of a prefill of ten seconds before each of these numbers of rounds of a second."""
    target, now, number = [], 0, 0
    for count in counts:
        target.append(Slice("prefill", 1e3 * now, 1e3 * (now + 10), {}))
        now += 10
        for _ in range(count):
            target.append(Slice("verify", 1e3 * now, 1e3 * (now + 1), {"round": number}))
            now, number = now + 1, number + 1
    return EngineLanes(name="ssd", target=target, drafts=[])


@pytest.mark.parametrize(
    ("counts", "first", "length"),
    [
        ((5, 40), 5 + picture.WARM_UP, 12),
        ((40, 14), 40 + 2, 12),
        ((40, 3), picture.WARM_UP, 12),
        ((2, 5, 3), 2, 5),
        ((3, 0), 0, 3),
    ],
)
def test_the_window_is_behind_the_last_prefill_and_has_none_within(counts, first, length):
    found = [round_.args["round"] for round_ in window(run_of(*counts), None, 12)]
    assert found == list(range(first, first + length))


def test_long_gaps_are_cut_out_of_the_picture(path, monkeypatch):
    drawn = []
    kind = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(kind, "savefig", lambda figure, *_, **__: drawn.append(figure))
    lanes = EngineLanes(
        name="ssd",
        target=[Slice("", b, b + 10, {"round": n}) for n, b in enumerate((0, 10, 5020, 5030))],
        drafts=[[Slice("expand", 20, 22, {})]],
    )
    picture.draw(lanes, lanes.rounds, path)
    (axes,) = drawn[0].axes
    assert axes.get_xlim()[1] < 60
    assert "5.0 s idle" in [text.get_text() for text in axes.texts]
    assert title(lanes, lanes.rounds).endswith("0 tokens in 47 ms")


def test_an_axis_without_gaps_is_time_itself():
    axis = TimeAxis([(3, 4), (4, 9), (10, 11)], longest=1, remaining=0.5)
    assert (axis.position(3), axis.position(10.5), axis.cuts, axis.left_out) == (3, 10.5, [], 0)
    axis = TimeAxis([(0, 9), (1, 2), (20, 21), (40, 41)], longest=1, remaining=0.5)
    assert axis.left_out == 10.5 + 18.5
    assert axis.position(21) == 21 - 10.5
    assert axis.cuts == [(9.25, 10.5), (10.75, 18.5)]


def test_an_engine_with_a_draft_of_its_own_is_drawn_unless_another_is_named(path):
    engines = read_trace(path)
    assert choose(engines, None).name == "ssd k=2"
    assert choose(engines, "ar").name == "ar"
    assert choose(engines[:1], None).name == "ar"
    with pytest.raises(InputError, match="one of 'ar', 'ssd k=2'"):
        choose(engines, "sd")


def test_draft_work_that_is_not_hidden_lies_between_the_targets_slices():
    target = [Slice("", 0, 4, {}), Slice("", 6, 8, {}), Slice("", 8, 9, {})]
    assert gaps(target, 1, 3) == []
    assert gaps(target, 3, 7) == [(4, 6)]
    assert gaps(target, 5, 10) == [(5, 6), (9, 10)]
    assert gaps(target, 10, 12) == [(10, 12)]


def changed(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def first_slice(document):
    return next(event for event in document["traceEvents"] if event["ph"] == "X")


BAD = {
    "no numbers": (lambda d: first_slice(d).update(ts="soon"), "damaged"),
    "no time": (lambda d: first_slice(d).update(ts=float("nan")), "damaged"),
    "backwards": (lambda d: first_slice(d).update(dur=-1), "damaged"),
    "no worker": (lambda d: first_slice(d).update(tid=10**10 + 1), "damaged"),
    "no lane": (lambda d: first_slice(d).update(tid=9), "damaged"),
    "no rows": (lambda d: first_slice(d)["args"].update(rows=[{}]), "damaged"),
    "no events": (lambda d: d.pop("traceEvents"), "no traceEvents"),
    "another tool": (lambda d: d.pop("otherData"), "another program's"),
    "another format": (lambda d: d["otherData"].update(format=2), "has format 2, .* reads 1"),
    "nothing happened": (lambda d: d["traceEvents"].clear(), "no rounds"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_trace_of_ours_is_refused_with_its_name(path, capsys, what):
    change, words = BAD[what]
    changed(path, change)
    with pytest.raises(InputError, match=words):
        choose(read_trace(path), None)
    assert main(["trace", str(path)]) == 2
    assert capsys.readouterr().err.startswith("ssd-jax trace: ")


@pytest.mark.parametrize("text", ["", "GGUF", "[1, 2]", "\xff"], ids=repr)
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="give a file that --trace wrote"):
        read_trace(path)
    with pytest.raises(InputError, match="does not exist"):
        read_trace(tmp_path / "none.json")


def test_the_command_draws_a_picture_and_says_where(path, tmp_path, capsys):
    assert main(["trace", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("ssd k=2, rounds 4 to 15; ")
    assert out[1] == f"{path}.png"
    assert (tmp_path / "trace.json.png").read_bytes().startswith(PNG)
    other = tmp_path / "other.png"
    arguments = ("trace", f"--output={other}", "--from=0", "--rounds=3", "--engine=ar", str(path))
    assert main(list(arguments)) == 0
    assert other.read_bytes().startswith(PNG)
    assert "ar, rounds 0 to 2; 3 tokens in 3000 ms" in capsys.readouterr().out


@pytest.mark.more
def test_a_full_disk_leaves_the_picture_that_was_there(path, tmp_path, capsys):
    (tmp_path / "old.png").write_bytes(PNG)
    with files_of_at_most(4096):
        assert main(["trace", str(path), f"--output={tmp_path}/old.png"]) == 1
    assert f"{tmp_path}/old.png: File too large" in capsys.readouterr().err
    assert (tmp_path / "old.png").read_bytes() == PNG
    assert {file.name for file in tmp_path.iterdir()} == {"old.png", path.name}


@pytest.mark.more
def test_a_picture_without_a_kind_is_written_where_it_was_to_be(path, tmp_path, capsys):
    assert main(["trace", str(path), f"--output={tmp_path}/drawn"]) == 0
    assert (tmp_path / "drawn").read_bytes().startswith(PNG)


def test_the_picture_has_lanes_colours_and_a_legend_that_say_what_happened(path, monkeypatch):
    drawn = []
    kind = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(kind, "savefig", lambda figure, *_, **__: drawn.append(figure))
    _, ssd = read_trace(path)
    picture.draw(ssd, window(ssd, 4, 2), path.with_suffix(".png"))
    (figure,) = drawn
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["target", "draft"]
    assert axes.get_yticks()[0] > axes.get_yticks()[1]  # the target is above
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "verification, miss",
        "verification, hit",
        "draft forward",
        "draft forward, not hidden",
    ]
    assert [text.get_text() for text in axes.texts] == ["+2", "+2"]


def test_without_matplotlib_the_remedy_is_named(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["trace", str(path)]) == 2
    assert "pip install 'ssd-jax[plot]'" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_an_error(path, tmp_path, capsys):
    assert main(["trace", str(path), f"--output={tmp_path}/none/a.png"]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert main(["trace", str(path), f"--output={tmp_path}/a.xyz"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["trace"]) == 2
    assert "FILE is missing" in capsys.readouterr().err
