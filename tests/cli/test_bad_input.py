"""What cannot be is refused in one line, with exit status 2, before weights load."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_jax.cli import settings
from ssd_jax.cli.main import main
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams

LONG = "word " * 200
NO_LOAD = ("--dtype=float32", "--context=300", "--compile_cache=off")


@pytest.fixture
def refused(tiny_checkpoint, capsys, unloaded):
    """The one line about a command that is refused."""
    del unloaded

    def run(command, *arguments, target=tiny_checkpoint):
        given = [] if command in ("trace", "distill") else [f"--target={target}"]
        status = main([command, *given, *arguments])
        out, err = capsys.readouterr()
        assert (status, err.count("\n")) == (2, 1), err
        return out + err

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": LONG}) + "\n")
    return path


def outputs(path, *texts):
    lines = [{"prompt_index": 0, "token_ids": ids, "finish_reason": "length"} for ids in texts]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([f"--prompt={LONG}"], "prompt 0: the prompt has 1017 tokens; the context is 300"),
        (["--prompt=", "--chat_template=false"], "prompt 0: the prompt is empty"),
        (["--prompt=x", "--stop_token_ids=999"], "prompt 0: stop_token_ids: token id 999 is not"),
        (["--prompt=x", "--logit_bias=999:1"], "prompt 0: logit_bias: token id 999 is not"),
        (["--prompt=x", "--bad_words=far too long"], "prompt 0: bad_words: 'far too long' has 12"),
        (["--prompt=x\udcff"], "prompt 0: the text is not valid Unicode"),
        (["--prompt=x", *(f"--stop_token_ids={n}" for n in range(33))], "35 stop ids"),
    ],
)
@pytest.mark.parametrize("also", [[], ["--json"], ["--mode=sd", "--draft=ngram", "--compare=ar"]])
def test_a_prompt_that_cannot_run_loads_nothing(refused, flags, message, also):
    assert message in refused("generate", *NO_LOAD, *flags, *also)


def test_good_prompts_of_a_file_run_beside_refused_ones(tiny_checkpoint, prompts, capsys, unloaded):
    with prompts.open("a") as file:
        file.write('{"prompt": "short"}\n')
    with pytest.raises(unloaded):
        main(["generate", f"--target={tiny_checkpoint}", f"--prompt_file={prompts}", *NO_LOAD])
    assert capsys.readouterr().err.startswith("prompt 0: the prompt has")


def test_the_python_interface_loads_nothing_for_a_refused_prompt(tiny_checkpoint, unloaded):
    llm = LLM(str(tiny_checkpoint), load=False, context=300, compile_cache="off")
    for prompt in (LONG, [999], []):
        with pytest.raises(InputError):
            llm.generate([prompt])
        with pytest.raises(InputError):
            llm.stream(prompt)
    assert llm.generate([]) == []
    with pytest.raises(InputError, match="stop_token_ids: token id 999"):
        llm.generate("x", SamplingParams(stop_token_ids=(999,)))
    with pytest.raises(unloaded):
        llm.generate("x")


@pytest.mark.parametrize("data", ["", f"{LONG}\n", "/foo\n/stats\n"])
def test_a_pipe_without_an_entry_to_answer_loads_nothing(
    tiny_checkpoint, capsys, monkeypatch, unloaded, data
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(data))
    assert main(["chat", f"--target={tiny_checkpoint}", *NO_LOAD]) == (2 if data else 0)
    assert ("the prompt has" in capsys.readouterr().err) == (LONG in data)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{data}hello\n"))
    with pytest.raises(unloaded):
        main(["chat", f"--target={tiny_checkpoint}", *NO_LOAD])


@pytest.mark.parametrize("command", ["/load ~no-one/x", "/load a\0b", "/load /", "/load"])
@pytest.mark.usefixtures("unloaded")
def test_a_bad_file_does_not_end_a_chat(tiny_checkpoint, capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{command}\n/foo\n"))
    assert main(["chat", f"--target={tiny_checkpoint}", *NO_LOAD]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "unknown command /foo" in lines[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([f"--system={LONG}"], "the prompt has"),
        (["--stop_token_ids=999"], "stop_token_ids: token id 999"),
        (["--history=/dev/null"], "history = '/dev/null' is a device or a pipe; give a file"),
        (["--history=/dev/null/x"], "history = '/dev/null/x' cannot be written: Not a directory"),
        (["--history=/"], "history = '/' is a directory"),
        (["--history=~no-one/x"], "~no-one has no home directory"),
    ],
)
def test_chat_refuses_messages_that_leave_no_room_for_an_answer(refused, flags, message):
    assert message in refused("chat", *NO_LOAD, *flags)


def test_bench_names_the_prompt_that_does_not_fit(refused, prompts):
    error = refused("bench", *NO_LOAD, f"--prompts={prompts}")
    assert f"prompt {prompts}:0: the prompt has 1017 tokens" in error


def test_demo_checks_its_prompt(refused):
    assert "the prompt has" in refused("demo", *NO_LOAD, f"--prompt={LONG}")


def test_compare_names_the_prompt_that_does_not_fit(refused, tmp_path, prompts):
    files = [str(outputs(tmp_path / name, [1, n])) for n, name in enumerate(("a", "b"))]
    error = refused("compare", *files, f"--prompt_file={prompts}", *NO_LOAD)
    assert f"prompt_index 0 of {prompts}: the prompt has 1017 tokens" in error


def test_bench_checks_that_its_text_has_a_window(refused, tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    flags = ["--suite=perplexity", f"--text={tmp_path / 'text.txt'}", "--window=64"]
    assert "the text has 9 tokens, window = 64" in refused("bench", *NO_LOAD, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nojson=3"], "--nojson=3 does not take an argument"),
        (["--json=3"], "json = '3' is not understood; give true or false"),
        (["--slots=many"], "slots = 'many' is not understood; give an integer"),
        (["--slots=1\n2"], r"slots = '1\n2' is not understood; give an integer"),
        (["--temperature=hot"], "temperature = 'hot' is not understood; give a number"),
        (["--stop_token_ids=x"], "stop_token_ids = 'x' is not understood; give an integer"),
        (["--temprature=1"], "there is no flag --temprature; did you mean --temperature?"),
        (["--nobudgett"], "there is no flag --nobudgett; did you mean --budget?"),
        (["-p", "x"], "there is no flag -p; write --prompt=..."),
        (["-t", "0.5"], "there is no flag -t; write --temperature=..."),
        (
            ["--prompt=y"],
            "--prompt is given twice; give one, or a file of prompts by --prompt_file",
        ),
        (["--mode=sd", "--draft=ngrams"], "draft = 'ngrams' does not exist; did you mean 'ngram'?"),
        (["--mode=sd", "--draft=defualt"], "does not exist; did you mean 'default'?"),
        (["--mode=sd"], "needs a draft: --draft=ngram, --draft=default (the one that comes with"),
        (["--mode=ssd"], "needs a draft model: --draft=default (the one"),
        (["--mode=fast"], "mode = 'fast' is unknown; one of ar, sd, ssd, auto\n"),
        (["--mdoel=x"], "there is no flag --mdoel; did you mean --model?"),
        (["--kv_memory=1KiB"], "needs 3 ("),
        (["--context=999999"], "positions that {target} was made for; lower --context\n"),
        (["--dtype=native"], "give --dtype=bfloat16 or --dtype=int8 (--draft_dtype of a draft)\n"),
        (["--stop_token_ids=[7,x]"], "stop_token_ids = '[7,x]' is not understood; give an integer"),
        (["--logit_bias=x"], "logit_bias = 'x' is not understood; give id:bias"),
        (["--logit_bias=1:2", "--logit_bias=1:3"], "logit_bias = '1:2', '1:3' names an id twice"),
        (["--logit_bias=1:1e9"], "logit_bias = '1:1e9' must be from -"),
        (["--stop=a", "--stop="], "stop = 'a', '': each stop is a string"),
        (["-zzz"], "there is no flag --zzz; ssd-jax generate --help lists them"),
        (["--temperature"], "Missing value for flag --temperature; flags are given as"),
        (["--flagfile=/dev/zero"], "there is no flag --flagfile"),
        (["--flagfile"], "there is no flag --flagfile"),
        (["--undefok=foo", "--foo=1"], "there is no flag --undefok"),
        ([f"--k={'9' * 5000}"], "is impossible; give auto or 1 to 16"),
        (["--k=\u0664"], "is impossible; give auto or 1 to 16"),
        (["--target=a\0b"], "has a character of code 0"),
        (["--target=~no-one/x"], "~no-one has no home directory"),
        ([f"--target={'x' * 300}"], "File name too long"),
        (["--compile_cache="], "compile_cache is empty; give a directory, auto or off"),
        (["--trace=/dev/null"], "trace = '/dev/null' is a device or a pipe; give a file"),
        (["--trace=/dev/null/x"], "trace = '/dev/null/x' cannot be written: Not a dir"),
        (["--trace=/proc/x.json"], "trace = '/proc/x.json' cannot be written: "),
        ([f"--trace={'x' * 300}"], "cannot be written: File name too long"),
    ],
)
def test_bad_flags_are_refused_with_their_limits(refused, flags, message, tiny_checkpoint):
    wanted = message.replace("{target}", str(tiny_checkpoint))
    assert wanted in refused("generate", *NO_LOAD, "--prompt=x", *flags)


@pytest.mark.parametrize(
    ("flag", "same"),
    [
        ("--stop_token_ids=[7, 8]", ["--stop_token_ids=7", "--stop_token_ids=8"]),
        ("--stop-token-ids=(7,8)", ["--stop_token_ids=7", "--stop_token_ids=8"]),
        ("--logit_bias={7: 1.5, 8: -2}", ["--logit_bias=7:1.5", "--logit_bias=8:-2"]),
        ("--fan_out=[4, 3, 3]", ["--fan_out=4,3,3"]),
        ("--stop=[1]", ["--stop=[1]"]),
    ],
)
def test_numbers_in_brackets_are_lists(flag, same):
    one, other = (
        settings.parse(settings.new_flags(), "generate", arguments) for arguments in ([flag], same)
    )
    assert one == other


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("top_p = 7", [], "{path}: top_p = 7.0 is out of range"),
        ("slots = true", [], "{path}: slots = true is a boolean"),
        ("slots = [1]", [], "{path}: slots = "),
        ("draft = true", [], "{path}: draft = true is a boolean"),
        ("json = 3", [], "{path}: json = '3' is not understood; give true or false"),
        ("[target]\nsource = 'x'", [], "{path}: [target] is a section"),
        ("draft = 'ngram'", [], "{path}: draft = 'ngram' means nothing with mode = 'ar'"),
        ("mode = 'sd'", [], "{path}: mode = 'sd' needs a draft"),
        ("temperature = nan", [], "{path}: temperature = nan is out of range"),
        ("slots = 2", ["--top_p=7"], "generate: top_p = 7.0 is out of range"),
        ("top_p = 0.5", ["--top_p=7"], "generate: top_p = 7.0 is out of range"),
        ('target = "a\\u0000b"', [], "has a character of code 0"),
    ],
)
def test_settings_of_a_file_name_it_and_the_key(tmp_path, capsys, text, flags, message):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    assert main(["generate", "--prompt=x", f"--config={path}", *flags]) == 2
    stderr = capsys.readouterr().err
    assert message.format(path=path) in stderr
    assert stderr.count("\n") == 1
    assert (str(path) in stderr) == ("{path}" in message)


def test_numbers_of_bench_name_the_file_too(tmp_path, refused):
    path = tmp_path / "settings.toml"
    path.write_text("repeats = 0")
    assert f"config {path}: repeats = 0 is out" in refused("bench", f"--config={path}")


def test_a_file_of_settings_may_serve_several_suites(tmp_path, tiny_checkpoint, unloaded):
    path = tmp_path / "settings.toml"
    path.write_text(f"repeats = 2\ntarget = '{tiny_checkpoint}'\n")
    with pytest.raises(unloaded):
        main(["bench", "--suite=step", f"--config={path}", *NO_LOAD])


def test_distill_tries_its_places_first(tmp_path, capsys):
    (tmp_path / "c.toml").write_text(
        '[target]\nsource = "does-not-exist"\n[prompts]\ntrain = ["a"]\nheld_out = ["b"]\n'
    )
    for flag, message in (
        ("--out=/dev/null/x", "out = '/dev/null/x' cannot be written"),
        (f"--data={tmp_path / 'c.toml'}", "is no directory; give that of the prompt files"),
        ("--compile_cache=", "compile_cache is empty; give a directory, auto or off"),
    ):
        assert main(["distill", f"--config={tmp_path / 'c.toml'}", flag]) == 2
        assert message in capsys.readouterr().err


def test_convert_takes_what_it_needs_of_a_file_for_several_commands(tmp_path, capsys):
    path = tmp_path / "settings.toml"
    path.write_text('seed = 1\ntarget = "does-not-exist"\n')
    assert main(["convert", f"--config={path}", f"--out={tmp_path / 'new'}"]) == 2
    assert "'does-not-exist' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["generate", "--help"]])
def test_lost_output_ends_a_command_in_silence_or_in_a_line(arguments):
    command = [sys.executable, "-m", "ssd_jax", *arguments]
    read, write = os.pipe()
    os.close(read)
    gone = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (gone.returncode, gone.stderr) == (1, b"")
    with Path("/dev/full").open("w") as full:
        lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert lost.returncode == 1
    assert lost.stderr.count(b"\n") == 1
    assert b"standard input or output: No space left on device" in lost.stderr
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], check=False, stdin=subprocess.DEVNULL
    )
    assert closed.returncode == (0 if arguments else 2)


def test_a_follower_takes_a_file_of_settings(tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text("slots = 2\n")
    assert main(["follower", f"--config={path}"]) == 2
    assert "follower needs hosts" in capsys.readouterr().err
