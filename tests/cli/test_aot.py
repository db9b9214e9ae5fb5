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
    monkeypatch.setattr("ssd_jax.devices.programs.program_spec.ProgramSpec.compile", None)


@pytest.mark.usefixtures("_any_jax")
@pytest.mark.parametrize(
    ("changes", "message"),
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
        ({"tree_nodes": "auto"}, "tree_nodes = 'auto' needs measured costs; give a number"),
        ({"tree_nodes": "4"}, "tree_nodes = 4 leaves no node beside a chain of k = 4"),
        ({"k": "17"}, "k = 17 is impossible"),
        ({"fan_out": "1,2,3"}, "has 3 entries, and k = 0..4 needs 5"),
        ({"context": "200000"}, "context = 200000 is more than the 131072 positions"),
        ({"draft_devices": "8"}, "draft_devices = 8: there is no device 8; there are 0 to 7"),
        ({"mode": "sd"}, "mode means nothing for aot"),
        ({"weights": "int4", "dtype": "int8"}, "weights = 'int4' are multiplied in bfloat16, and"),
        ({"draft_weights": "int4", "draft_dtype": "int8"}, "and draft_dtype = 'int8'; leave out"),
        ({"weights": "mxfp4"}, "weights = 'mxfp4' are those of experts, and llama-3.1-8b has none"),
        (
            {"draft_weights": "mxfp4"},
            "of experts, and llama-3.2-1b has none; leave it out, or give",
        ),
        (
            {"mesh": "tensor=16"},
            "mesh = data=1,tensor=16 has 16 devices, and the target can have 8",
        ),
        ({"mesh": "data=2"}, "slots = 1 cannot be shared evenly by the 2 groups of mesh"),
        ({"expert_parallel": "true", "compile": "false"}, "here 0 experts and 8 devices: leave"),
        ({"devices": "5000", "compile": "false"}, "devices = 5000 is out of range; give 1 to 4096"),
        ({"mesh": "tensor=7", "devices": None, "compile": "false"}, "7 devices divide nothing"),
    ],
)
def test_impossible_flags_of_aot_are_refused(changes, message, capsys):
    assert main(flags(**changes)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ssd-jax aot: ")
    assert message in line


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


@pytest.mark.parametrize(
    ("changes", "modes", "memory"),
    [
        ({"devices": "2"}, ["ar 2", "ar 1", "sd 2", "sd 1", "ssd 1 + 1"], "v5e"),
        ({"devices": "512", "mesh": "data=256,tensor=2"}, ["ar 512", "sd 512"], "v5e"),
        ({"devices": None, "mesh": "tensor=2"}, ["ar 2", "sd 2"], "h100"),
        ({"devices": "3", "mesh": "tensor=2"}, ["ar 2", "sd 2", "ssd 2 + 1"], "h100"),
    ],
)
def test_aot_says_what_fits_without_a_compiler(config, changes, modes, memory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("ssd_jax.devices.programs.program_spec.ProgramSpec.compile", None)
    given = {"target": config, "draft": config, "chip": memory, "context": "256"} | changes
    assert main(flags(**given, slots="256", compile="false")) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.partition(":")[0] for line in lines if line.endswith(" yes")]
    assert list(dict.fromkeys(rows)) == modes
    assert f"have room for weights and pages of {', '.join(modes)};" in " ".join(lines)


def test_aot_says_what_does_not_fit_with_sizes_and_a_remedy(capsys):
    large = {"target": "llama-3.1-70b", "devices": "4", "compile": "false"}
    assert main(flags(**large)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "ar 4 does not fit: target on 4: weights and pages are 33." in printed
    assert printed.endswith("take more devices, fewer slots, less context or int8")


@pytest.mark.parametrize("parallel", [False, True])
def test_aot_says_how_many_experts_the_busiest_device_reads(parallel, capsys):
    of_experts = {"target": "qwen3-30b-a3b", "draft": "qwen3-0.6b", "compile": "false"}
    assert main(flags(**of_experts, expert_parallel=str(parallel).lower())) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("budget = 16, expert_parallel" in printed) == parallel
    assert ("1 row uses 8 (2.5 of one device's 16), 5 rows use 35" in printed) == parallel
    assert ("1 row uses 8, 5 rows use 35, if all are chosen alike" in printed) != parallel


def test_both_models_of_a_pair_may_have_weights_of_few_bits(capsys):
    """In bfloat16 neither would fit."""
    mxfp4 = {"weights": "mxfp4", "draft_weights": "mxfp4", "compile": "false"}
    given = {"target": "gpt-oss-120b", "draft": "gpt-oss-20b", "devices": "8"}
    assert main(flags(**given, **mxfp4)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("gpt-oss-120b (mxfp4) with gpt-oss-20b (mxfp4) on 8 v5e: ")
    assert "have room for weights and pages of ar 8, sd 8; programs need more" in printed
    assert main(flags(**given, compile="false")) == 0
    assert "nothing fits 8 v5e" in " ".join(capsys.readouterr().out.split())


def test_plan_mesh_names_the_command_that_says_it_now(capsys):
    assert main(["plan-mesh", "--mesh=tensor=4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ssd-jax aot --compile=false --mesh=... says what fits" in line


@pytest.mark.aot
@pytest.mark.slow
def test_aot_writes_a_page_of_a_grid_that_shares_slots(config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    given = {"target": config, "draft": config, "chip": "v5e", "devices": "3", "k": "2"}
    assert main(flags(**given, context="256", budget="4", slots="2", mesh="data=2")) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.partition(":")[0] for line in lines if line.endswith(" yes")}
    assert rows == {"ar 2", "sd 2", "ssd 2 + 1"}
    assert any(line.startswith("target on 2  accept 2 2 sampled ") for line in lines)


@pytest.mark.aot
@pytest.mark.shipped
def test_aot_writes_a_page_of_a_pair_and_a_split(config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    given = {"target": config, "draft": config, "chip": "v5e", "devices": "2", "k": "2"}
    assert main(flags(**given, context="256", draft_devices="1", budget="4")) == 0
    printed = capsys.readouterr().out
    for line in ("ar 2: target", "sd 2: target and draft", "ssd 1 + 1: draft", "ssd 1 + 1 "):
        assert line in printed
    for program in (
        "forward 0",
        "forward 2",
        "accept 1 2 sampled",
        "expand 2 sampled",
        "promote 2",
    ):
        assert program in printed
    assert "0.6  " in printed
    verdicts = ("SSD pays on 2 v5e", "SSD does not pay on 2 v5e")
    assert sum(line.startswith(verdicts) for line in printed.splitlines()) == 1


@pytest.mark.aot
def test_devices_that_divide_nothing_are_refused_before_any_compile(config, capsys, monkeypatch):
    monkeypatch.setattr("ssd_jax.devices.programs.program_spec.ProgramSpec.compile", None)
    assert main(flags(target=config, draft=config, devices="7", context="256")) == 2
    assert "7 devices divide nothing of a model with" in capsys.readouterr().err
