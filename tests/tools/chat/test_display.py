"""What is shown of an answer, and what is kept of entries."""

import io

from rich.console import Console

from ssd_jax.tools.chat.screen import Screen, WordWrap, printable
from ssd_jax.tools.chat.terminal import HistoryFile

TEXT = "The quick brown fox\n  jumps over the lazy dog, and then\tsleeps for a while."


def wrapped(text, width, step):
    wrap = WordWrap(width)
    pieces = [wrap.push(text[i : i + step]) for i in range(0, len(text), step)]
    return "".join(pieces) + wrap.flush()


def test_lines_break_between_words_however_the_text_arrives():
    lines = wrapped(TEXT, 20, len(TEXT))
    assert lines.split("\n") == [
        "The quick brown fox",
        "  jumps over the",
        "lazy dog, and then",
        "sleeps for a while.",
    ]
    for step in (1, 2, 5, 17):
        assert wrapped(TEXT, 20, step) == lines


def test_text_that_fits_is_shown_as_it_is():
    assert wrapped(TEXT, 80, 3) == TEXT


def test_a_line_that_ends_at_the_width_is_broken_before_the_next_word():
    assert wrapped("one two three four", 7, 3).split("\n") == ["one two", "three", "four"]
    assert wrapped("x" * 24 + " one two", 12, 5).split("\n") == ["x" * 24, "one two"]


def test_a_long_word_is_left_to_the_terminal_and_not_held_back():
    address = "https://example.org/" + "x" * 60
    wrap = WordWrap(40)
    assert len(wrap.push(address[:50])) == 50
    assert wrapped(f"see {address}", 40, 7).replace("\n", " ") == f"see {address}"


def test_scripts_without_spaces_are_shown_at_once():
    assert WordWrap(20).push("\u4f60\u597d") == "\u4f60\u597d"


def test_control_characters_of_a_model_do_not_reach_the_terminal():
    assert printable("a\x1b[2J\x07\x9bb\tc\r\nd") == "a\ufffd[2J\ufffd\ufffdb\tc\nd"
    assert printable("a\r") + printable("\nb") == "a\nb"


def test_words_go_to_standard_output_as_they_are_and_end_with_a_line():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, Console(file=err, width=20))
    for text in ("no line end", "line end\n", ""):
        with screen.answer("reading"):
            screen.write_answer(text)
    screen.note("[a note that is longer than a line]")
    assert out.getvalue() == "no line end\nline end\n"
    assert err.getvalue() == "[a note that is longer than a line]\n"


def test_control_characters_of_a_loaded_file_do_not_reach_the_terminal():
    shown = io.StringIO()
    screen = Screen(io.StringIO(), Console(file=shown, width=60, force_terminal=True))
    screen.say("a\x1b]0;title\x07b")
    assert "\x1b]" not in shown.getvalue()
    assert "a\ufffd]0;title\ufffdb" in shown.getvalue()


def entries(path):
    """What is in the file, oldest first."""
    return list(HistoryFile(path).load_history_strings())[::-1]


def test_entries_of_several_lines_come_back_in_another_session(tmp_path):
    path = tmp_path / "new" / "history"
    for entry in ("one", "two\nlines", "\udcff"):
        HistoryFile(path).store_string(entry)
    assert entries(path) == ["one", "two\nlines", "\udcff"]
    assert path.stat().st_mode & 0o077 == 0


def test_a_history_that_has_grown_long_is_cut(tmp_path):
    path = tmp_path / "history"
    path.write_text("".join(f'"{i}"\n' for i in range(2500)) + "damaged\n3\n")
    assert entries(path) == [str(i) for i in range(1500, 2500)]
    assert len(path.read_text().splitlines()) == 1000


def test_a_history_that_cannot_be_kept_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    history = HistoryFile(tmp_path / "file" / "history")
    history.store_string("one")
    assert entries(tmp_path / "file" / "history") == []
