"""What a user sees of work that takes long."""

from unittest import mock

from ssd_jax.cli import loading


def test_where_there_is_no_terminal_a_line_comes_every_half_minute(capsys):
    clock = mock.Mock(side_effect=[0.0, 1.0, 29.0, 31.0, 32.0, 70.0])
    with (
        mock.patch.object(loading.time, "monotonic", clock),
        loading.progress_bar("prompts", unit="runs") as progress,
    ):
        for done in range(1, 6):
            progress(done, 5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["prompts: 3 of 5 runs", "prompts: 5 of 5 runs"]
