"""The configuration files that are shipped say what the program understands."""

from pathlib import Path

import pytest

from ssd_jax.cli import settings
from ssd_jax.config.settings import SPECULATIVE

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    given = settings.parse(settings.new_flags(), "generate", [f"--config={path}"])
    assert settings.config_of(given).target
    assert settings.params_of(given).max_tokens > 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--mode=ar"], {}),
        (["--mode=sd"], {"draft": "d", "k": 3, "draft_dtype": "int8"}),
        (["--mode=sd", "--draft=ngram", "--k=2"], {"draft": "ngram", "k": 2}),
    ],
)
def test_a_flag_for_the_mode_leaves_out_what_the_file_has_for_another(tmp_path, flags, expected):
    (tmp_path / "ssd.toml").write_text(
        'mode = "ssd"\ndraft = "d"\nk = 3\nbudget = 8\ndraft_dtype = "int8"\nslots = 3\n'
    )
    flags = [f"--config={tmp_path}/ssd.toml", *flags]
    given = settings.parse(settings.new_flags(), "generate", flags)
    config = settings.config_of(given)
    assert {
        n: getattr(config, n) for n in SPECULATIVE if getattr(config, n) is not None
    } == expected
    assert config.slots == 3


def test_shipped_configurations_are_found():
    assert CONFIGS
