"""`ssd-jax generate`: the fixed contract of flags, JSON lines and exit statuses."""

import json
import os
import subprocess
import sys

import pytest

from ssd_jax.cli.main import main
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request_metrics import REQUEST_KEYS
from ssd_jax.errors import DeviceError
from ssd_jax.testing.fakes import FakeTarget, Letters
from tests.fakes.instrument import instrument

COMMON = ("--dtype=float32", "--context=300", "--max_tokens=5", "--compile_cache=off")


@pytest.fixture
def generate(tiny_checkpoint, capsys):
    def run(*arguments, target=tiny_checkpoint):
        status = main(["generate", f"--target={target}", *COMMON, *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_json_has_every_key_and_nothing_else_on_standard_output(generate):
    status, out, _ = generate("--prompt=hello", "--json", "--ignore_eos")
    (line,) = out.splitlines()
    answer = json.loads(line)
    assert status == 0
    ends = ["finish_reason", "stop_reason", "limit"]
    assert list(answer) == ["prompt_index", "index", "seed", "token_ids", "text", *ends, "metrics"]
    assert (answer["prompt_index"], answer["index"], answer["seed"]) == (0, 0, 0)
    assert [answer[name] for name in ends] == ["length", None, "max_tokens"]
    assert len(answer["token_ids"]) == 5
    assert set(answer["metrics"]) == set(REQUEST_KEYS)
    assert answer["metrics"]["ttft_ms"] > 0
    assert answer["metrics"]["hit_rate"] is None


@pytest.mark.more
def test_text_mode_streams_text_and_puts_figures_on_standard_error(generate):
    _, out, _ = generate("--prompt=hello", "--json", "--ignore_eos")
    status, text, err = generate("--prompt=hello", "--ignore_eos")
    assert status == 0
    assert text.rstrip("\n") == json.loads(out)["text"].rstrip("\n")
    assert "5 tokens" in err


def test_a_tilde_is_the_home_as_shells_leave_it_in_flags(generate, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    status, out, _ = generate("--prompt_file=~/prompts.jsonl", "--json")
    assert status == 0
    assert json.loads(out)["prompt_index"] == 0


@pytest.mark.more
def test_answers_come_in_prompt_order(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "long " * 20}, {"messages": [{"role": "user", "content": "x"}]}]
    path.write_text("\n".join(json.dumps(line) for line in lines * 3))
    status, out, _ = generate(f"--prompt_file={path}", "--json", "--slots=4")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [answer["prompt_index"] for answer in answers] == list(range(6))
    assert answers[0]["token_ids"] == answers[2]["token_ids"] == answers[4]["token_ids"]


def test_bad_lines_are_reported_and_good_ones_still_run(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a"}\nnot json\n{"prompt": 3}\n' + json.dumps({"prompt": "b" * 300})
    )
    status, out, err = generate(f"--prompt_file={path}", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 2
    assert [answer["prompt_index"] for answer in answers] == [0, 1, 2, 3]
    assert ["error" in answer for answer in answers] == [False, True, True, True]
    assert f"{path}:2" in err
    assert f"{path}:3" in err
    assert "the context is 300" in answers[3]["error"]


def test_a_file_without_a_good_line_fails_at_once(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": 1}\n{"prompts": "x"}\n')
    status, out, err = generate(f"--prompt_file={path}", "--json", target="does-not-exist")
    assert status == 2
    assert [json.loads(line)["prompt_index"] for line in out.splitlines()] == [0, 1]
    assert f"{path}:2" in err
    assert "does-not-exist" not in err


def test_several_texts_of_each_prompt_are_lines_in_order(generate, tmp_path, capsys):
    path, lines = tmp_path / "prompts.jsonl", tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "a"}\nnot json\n')
    flags = (f"--prompt_file={path}", "--temperature=1", "--seed=5", "--ignore_eos")
    status, out, err = generate(*flags, "--n=2", "--json", "--slots=2")
    answers = [json.loads(line) for line in out.splitlines()]
    assert (status, err.count(f"{path}:2")) == (2, 1)
    assert [answer["prompt_index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["index"] for answer in answers] == [0, 0, 1, 1]
    assert ["error" in answer for answer in answers] == [False, True] * 2
    assert answers[0]["token_ids"] != answers[2]["token_ids"]
    # The texts of one prompt are compared by its line of the prompt file.
    lines.write_text(out)
    assert main(["compare", str(lines), str(lines), f"--prompt_file={path}"]) == 0
    assert "2 of 2 prompts identical" in capsys.readouterr().out


def test_seed_and_max_tokens_may_be_none(generate):
    flags = ("--prompt=hello", "--json", "--temperature=1", "--context=64", "--ignore_eos")
    _, out, err = generate(*flags, "--seed=none", "--max_tokens=none")
    answer = json.loads(out)
    assert err.splitlines()[0] == f"seed = {answer['seed']}"
    assert answer["limit"] == "context"
    _, again, _ = generate(*flags, f"--seed={answer['seed']}", "--max_tokens=5")
    assert json.loads(again)["token_ids"] == answer["token_ids"][:5]
    assert json.loads(again)["limit"] == "max_tokens"


@pytest.mark.more
def test_chat_template_can_be_switched_off(generate):
    _, templated, _ = generate("--prompt=hello", "--json")
    _, plain, _ = generate("--prompt=hello", "--json", "--chat_template=false")
    assert json.loads(templated)["token_ids"] != json.loads(plain)["token_ids"]


@pytest.mark.more
def test_settings_come_from_toml_and_flags_override(generate, tmp_path):
    path = tmp_path / "settings.toml"
    lines = "max_tokens = 2\nignore_eos = true\ntemperature = 2.0\nseed = 4\nslots = 4\n"
    path.write_text(lines, encoding="utf-8-sig")  # as editors on Windows write it

    def generated(*arguments):
        status, out, _ = generate("--prompt=hello", "--json", *arguments)
        assert status == 0
        return json.loads(out)["token_ids"]

    sampled = generated("--ignore_eos", "--temperature=2", "--seed=4")
    assert generated(f"--config={path}") == sampled  # COMMON has --max_tokens
    assert len(sampled) == 5
    assert generated(f"--config={path}", "--temperature=0") == generated("--ignore_eos") != sampled


def test_unknown_keys_of_a_config_file_name_the_nearest_one(tmp_path, capsys):
    path = tmp_path / "settings.toml"
    path.write_text("temprature = 1.0\n")
    assert main(["generate", f"--config={path}", "--prompt=x"]) == 2
    assert "unknown key 'temprature'; did you mean 'temperature'" in capsys.readouterr().err


def test_a_target_that_does_not_exist_is_named(capsys):
    assert main(["generate", "--target=no/such/model", "--prompt=x"]) == 2
    assert "no/such/model" in capsys.readouterr().err


@pytest.fixture(scope="session")
def shared(pytestconfig):
    """An environment in which a process finds the programs that this one has compiled."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(pytestconfig.cache.mkdir("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


@pytest.mark.more
@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.slow)])
def test_json_is_the_same_on_a_terminal_of_any_encoding(tiny_checkpoint, shared, encoding):
    command = [sys.executable, "-m", "ssd_jax", "generate", f"--target={tiny_checkpoint}"]
    command += ["--prompt=h\u00e9llo \u20ac", "--json", "--ignore_eos", *COMMON]
    environment = shared | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert len(json.loads(done.stdout)["token_ids"]) == 5


@pytest.mark.more
def test_a_reader_that_goes_away_ends_quietly(tiny_checkpoint, shared):
    command = [sys.executable, "-m", "ssd_jax", "generate", f"--target={tiny_checkpoint}"]
    command += ["--prompt=x", "--json", *COMMON]
    process = subprocess.Popen(command, env=shared, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == 1
    assert b"Traceback" not in err


def test_commands_are_listed_and_misspelt_ones_corrected(capsys):
    assert main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert main(["generte"]) == 2
    assert "did you mean 'generate'" in capsys.readouterr().err
    assert main([]) == 2


class Mute(Letters):
    """Can tell no text."""

    def push(self, ids):
        raise ValueError("no such token")


@pytest.mark.parametrize(
    ("fail", "decoder", "words"),
    [
        ({"forward": DeviceError("out of memory")}, Letters, "open the model again"),
        ({}, Mute, "no such token"),
    ],
)
def test_an_answer_that_ends_by_an_error_is_printed_and_the_status_is_1(
    generate, monkeypatch, caplog, fail, decoder, words
):
    def load(llm):
        target = instrument(FakeTarget(lambda *_: 65, context=300, max_chunk=200), fail=fail)
        llm._engines[0] = Engine(target, decoder, frozenset())

    monkeypatch.setattr("ssd_jax.cli.generate.load", load)
    status, out, err = generate("--prompt=hello", "--json")
    assert status == 1
    assert json.loads(out)["finish_reason"] == "error"
    assert words in err + caplog.text
