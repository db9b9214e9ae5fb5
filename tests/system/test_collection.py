"""Who may change how often Python collects: the command, not a caller in another's process."""

import gc
import sys

from ssd_jax.cli.main import main


def test_a_command_collects_seldom_and_a_call_changes_nothing(monkeypatch, capsys):
    usual = gc.get_threshold()
    try:
        assert main(["--version"]) == 0
        assert gc.get_threshold() == usual
        gc.set_threshold(700, 10, 10)
        monkeypatch.setattr(sys, "argv", ["ssd-jax", "--version"])
        assert main() == 0
        assert gc.get_threshold() == (20_000, 10, 10)
    finally:
        gc.set_threshold(*usual)
