"""Where programs and costs are kept."""

from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.system.cache_dir import cache_dir, compile_cache, costs_cache


def test_by_default_programs_and_costs_lie_beside_each_other():
    assert compile_cache("auto") == cache_dir() / "xla"
    assert costs_cache("auto") == cache_dir() / "costs"


def test_a_directory_is_the_users_and_stays_where_it_was_when_they_named_it():
    for setting, place in (("a", Path.cwd() / "a"), ("~/a", Path.home() / "a")):
        assert compile_cache(setting) == place
        assert costs_cache(setting) == place / "costs"
    for find in (compile_cache, costs_cache):
        with pytest.raises(InputError, match="no path has"):
            find("a\0b")


def test_without_a_home_directory_it_is_said_what_to_set(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(FileNotFoundError, match="set HOME or XDG_CACHE_HOME"):
        cache_dir()
