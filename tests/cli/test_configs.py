"""The configuration files that are shipped say what the program understands."""

from pathlib import Path

import pytest

from ssd_jax.cli import settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    given = settings.parse(settings.new_flags(), "generate", [f"--config={path}"])
    assert settings.config_of(given).target
    assert settings.params_of(given).max_tokens > 0


def test_there_are_some():
    assert CONFIGS
