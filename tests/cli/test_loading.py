"""What a user sees of work that takes long."""

import io
import sys
from types import SimpleNamespace
from unittest import mock

from ssd_jax.cli import loading
from tests.waiting import eventually


def test_without_a_terminal_a_line_of_progress_comes_every_half_minute(capsys):
    clock = mock.Mock(side_effect=[0.0, 1.0, 29.0, 31.0, 32.0, 70.0])
    with (
        mock.patch.object(loading, "time", SimpleNamespace(monotonic=clock)),
        loading.progress_bar("prompts", unit="runs") as progress,
    ):
        for done in range(1, 6):
            progress(done, 5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["prompts: 3 of 5 runs", "prompts: 5 of 5 runs"]


def test_progress_on_a_terminal_is_one_line_that_goes_away(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    with loading.loading_line() as (progress, status):
        progress(60_000_000, 270_000_000)
        status("compiling target: 5 of 9 programs")
    shown = screen.getvalue()
    assert "weights 60 of 270 MB, compiling target: 5 of 9 programs" in shown
    assert shown.count("\n") <= 1
    assert shown.endswith("\x1b[2K")  # erases it


def test_without_a_terminal_a_stalled_load_is_reported_again_and_again(capsys, monkeypatch):
    monkeypatch.setattr(loading, "SECONDS_BETWEEN_LINES", 0.01)
    with loading.loading_line() as (progress, status):
        progress(60_000_000, 270_000_000)
        status("compiling target: 5 of 9 programs")
        eventually(lambda: sys.stderr.getvalue().count("programs") >= 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err.splitlines()[-2:]
        == ["loading: weights 60 of 270 MB, compiling target: 5 of 9 programs"] * 2
    )


def test_without_a_terminal_a_quick_load_prints_nothing(capsys):
    with loading.loading_line() as (progress, status):
        progress(60, 270)
        status("checking exactness")
    assert capsys.readouterr() == ("", "")
