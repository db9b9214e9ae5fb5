"""`ssd-jax aot`: what is refused before any compile, and a whole page."""

import json

import pytest

from ssd_jax.cli import aot
from ssd_jax.cli.main import main
from ssd_jax.testing import tiny

GIVEN = {
    "target": "llama-3.1-8b",
    "draft": "llama-3.2-1b",
    "chip": "v5e",
    "devices": "8",
}


def flags(**changes):
    given = GIVEN | changes
    return ["aot", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


@pytest.fixture
def _any_jax(monkeypatch):
    """Whatever version this is, and nothing is compiled for any device."""
    monkeypatch.setattr(aot, "require_whole_programs", lambda: None)
    monkeypatch.setattr("ssd_jax.devices.program_spec.ProgramSpec.compile", None)


@pytest.mark.usefixtures("_any_jax")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": None}, "give --target, as in ssd-jax aot --target="),
        ({"draft": None}, "give --draft, as in"),
        ({"draft": "ngram"}, "a draft without a model has no programs; name a model"),
        ({"chip": None}, "give --chip, as in"),
        ({"devices": None}, "give --devices, as in"),
        ({"devices": "0"}, "devices = 0 is out of range; give 1 or more"),
        ({"devices": "32"}, "devices = 32 are more than the largest slice of v5e"),
        ({"chip": "v5x"}, "chip = 'v5x' is unknown; did you mean 'v5"),
        ({"target": "llama-3.1-9b"}, "did you mean 'llama-3.1-8b'?"),
        ({"draft": "./none/config.json"}, "'./none/config.json' does not exist"),
        ({"draft": "qwen3-0.6b"}, "qwen3-0.6b has 151936 words and the target llama-3.1-8b 128256"),
        ({"dtype": "native"}, "dtype = 'native' is for processors"),
        ({"k": "auto"}, "k = 'auto' needs measured costs; give a number"),
        ({"budget": "auto"}, "budget = 'auto' needs measured costs; give a number"),
        ({"k": "17"}, "k = 17 is impossible"),
        ({"fan_out": "1,2,3"}, "has 3 entries, and k = 0..4 needs 5"),
        ({"context": "200000"}, "context = 200000 is more than the 131072 positions"),
        ({"draft_devices": "8"}, "draft_devices = 8: there is no device 8; there are 0 to 7"),
        ({"mode": "sd"}, "mode means nothing for aot"),
    ],
)
def test_what_cannot_be_is_refused(changes, said, capsys):
    assert main(flags(**changes)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ssd-jax aot: ")
    assert said in line


def test_jax_that_compiles_kernels_alone_is_refused_in_a_line(capsys, monkeypatch):
    monkeypatch.setattr("jax.__version_info__", (0, 10, 2))
    assert main(flags()) == 2
    assert "ssd-jax aot: this needs JAX 0.12, so Python 3.12 or newer" in capsys.readouterr().err


@pytest.fixture
def config(tmp_path):
    """Of a tiny model, without weights."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.config("llama")))
    return path


@pytest.mark.aot
@pytest.mark.shipped
def test_a_page_of_a_pair_and_a_split(config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    given = {"target": config, "draft": config, "chip": "v5e", "devices": "2", "k": "2"}
    assert main(flags(**given, context="256", draft_devices="1", budget="4")) == 0
    said = capsys.readouterr().out
    for line in ("ar 2: target", "sd 2: target and draft", "ssd 1 + 1: draft", "ssd 1 + 1 "):
        assert line in said
    for program in (
        "forward 0",
        "forward 2",
        "accept 1 2 sampled",
        "expand 2 sampled",
        "promote 2",
    ):
        assert program in said
    assert "0.6  " in said
    verdicts = ("SSD pays on 2 v5e", "SSD does not pay on 2 v5e")
    assert sum(line.startswith(verdicts) for line in said.splitlines()) == 1


@pytest.mark.aot
def test_devices_that_divide_nothing_are_refused_before_any_compile(config, capsys, monkeypatch):
    monkeypatch.setattr("ssd_jax.devices.program_spec.ProgramSpec.compile", None)
    assert main(flags(target=config, draft=config, devices="7", context="256")) == 2
    assert "7 devices divide nothing of a model with" in capsys.readouterr().err
