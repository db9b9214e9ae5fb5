"""Thousands of seeded command lines: each runs, or is refused in one line, and none loads weights.

What a command does after its checks is cut off, so that a line takes a millisecond.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import random
import signal
import sys

import pytest

from ssd_jax.checkpoints import orbax
from ssd_jax.cli.main import COMMANDS, main
from ssd_jax.config.config import Config
from ssd_jax.llm import llm
from ssd_jax.loading import resolve
from ssd_jax.placement.remote import serving
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server import lifecycle
from ssd_jax.system import compile_cache, cores
from ssd_jax.tools.aot import pair
from ssd_jax.tools.distill import stages

SETTINGS = [field.name for kind in (Config, SamplingParams) for field in dataclasses.fields(kind)]
VALUES = {
    "generate": ["prompt", "prompt_file", "json", "compare"],
    "serve": ["port", "max_queue", "max_body", "drain_seconds"],
    "chat": ["system", "history"],
    "compare": ["prompt_file"],
    "bench": [
        *("suite", "modes", "ks", "prompts", "warmup", "repeats", "step_repeats"),
        *("text", "window", "windows", "json"),
    ],
    "convert": ["out"],
    "distill": ["stage", "out", "data", "draft", "compile_cache", "compile_cache_secret"],
    "demo": ["prompt"],
    "trace": ["output", "from", "rounds", "engine"],
    "aot": ["draft", "chip", "devices", "compile", "mesh", "target_devices", "draft_devices"],
    "models": ["json"],
    "follower": ["hosts", "host_timeout", "target_cores", "compile_cache", "compile_cache_secret"],
    "draft-worker": [
        *("listen", "draft", "target", "token_file", "tls_cert", "tls_key", "tls_client_ca"),
        *("engines", "draft_cores", "compile_cache", "compile_cache_secret"),
    ],
}
NO_MODEL = ("trace", "distill", "models", "follower", "draft-worker")
FILES = {
    "good.jsonl": b'{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n',
    "long.jsonl": json.dumps({"prompt": "a" * 3000}).encode(),
    "latin.jsonl": b'{"prompt":"\xff"}\n',
    "empty.jsonl": b"",
    "text.txt": b"All work and no play. " * 50,
    "a.jsonl": b'{"prompt_index": 0, "token_ids": [1, 2], "finish_reason": "length"}\n',
    "b.jsonl": b'{"prompt_index": 0, "token_ids": [1, 3], "finish_reason": "length"}\n',
    "c.jsonl": b'{"prompt_index": 0, "token_ids": [1, 3], "finish_reason": "error"}\n',
    "good.toml": b"max_tokens = 3\n",
    "bad.toml": b'top_p = 3\ntarget = "a\\u0000b"\nslots = true\n',
}
WORDS = [
    *("", "0", "-1", "1", "2", "3", "8", "17", "0.5", "nan", "inf", "-inf", "1e309", "1e-320"),
    *("\uff19\uff19", "\u00b2", "\u0663", "1_0", "0x10", "9" * 20, "9" * 5000, "1e5000"),
    *("true", "False", "none", "auto", "off", "a\nb", "a\0b", "\udcff", "x y", "a" * 300),
    *("/", "/dev/null", "/dev/null/x", "/nope/x", "~no-one/x", "~", ".", "?", "-", "--", "="),
    *(",", "1,2", "1-3", "3-1", "0-99999", ":", "5:1", "5:nan", "4,3,3,2,4/1,1,1,1,12", "[]", "{}"),
    *("mt_bench:0", "mt_bench:1", "mt_bench:" + "9" * 5000, "gsm8k:2,mt_bench:1"),
    *("ngram", "default", "pip:", "hf:", "pip:a", "hf:a", "ar", "sd", "ssd", "ar,sd", "int8"),
    *(
        "coupled",
        "bitwise",
        "process",
        "submesh",
        "remote:a:1",
        "uniform",
        "full",
        "step",
        "prompts",
    ),
]


class LoadingError(Exception):
    """All checks have passed."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_checkpoint):
    directory = tmp_path_factory.mktemp("fuzz")
    for name, data in FILES.items():
        (directory / name).write_bytes(data)
    (directory / "distill.toml").write_text(
        f'[target]\nsource = "{tiny_checkpoint}"\n'
        '[prompts]\ntrain = ["good.jsonl"]\nheld_out = ["long.jsonl"]\n'
    )
    return directory


@pytest.fixture
def shallow(monkeypatch, tmp_path):
    """Nothing loads, is pinned or is kept; a model is opened once."""

    def load(*_args, **_kwargs):
        raise LoadingError

    @functools.cache
    def opened(source, dtype, **how):
        return open_model(source, dtype, **how)

    def open_once(source, dtype, *, progress=None, **how):
        del progress
        return opened(source, dtype, **how)

    open_model = resolve.open_model
    monkeypatch.setattr(resolve, "open_model", open_once)
    for owner, name in (
        (llm.LLM, "load"),
        (orbax, "write_checkpoint"),
        (stages, "run"),
        (pair, "modes_of"),
        (serving, "serve"),
        (lifecycle.HttpServer, "start"),
    ):
        monkeypatch.setattr(owner, name, load)
    monkeypatch.setattr(cores, "pin", lambda _cores: lambda: None)
    monkeypatch.setattr(compile_cache, "use_store", lambda _store: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def starts(command, place, target):
    """Beginnings of a command line, which has nothing wrong in it yet."""
    answers = [f"{place}/a.jsonl", f"{place}/b.jsonl"]
    return {
        "generate": [["--prompt=x"], [f"--prompt_file={place}/good.jsonl"]],
        "chat": [[]],
        "serve": [["--port=0"]],
        "compare": [answers, [*answers, f"--prompt_file={place}/good.jsonl"]],
        "bench": [
            ["--prompts=mt_bench:1"],
            ["--suite=step"],
            ["--suite=perplexity", f"--text={place}/text.txt", "--window=64"],
            ["--modes=ar,sd,ssd", f"--draft={target}", "--prompts=mt_bench:1"],
        ],
        "convert": [["--out=converted"]],
        "distill": [[f"--config={place}/distill.toml"]],
        "demo": [[]],
        "trace": [[answers[0]]],
        "aot": [
            ["--draft=llama-3.2-1b", "--chip=v5e", f"--{more}=4"]
            for more in ("devices", "mesh=tensor")
        ],
        "models": [[]],
        "follower": [[], ["--hosts=auto"]],
        "draft-worker": [["--listen=127.0.0.1:0", f"--draft={target}"]],
    }[command]


def command_line(rng, place, target):
    command = rng.choice(list(COMMANDS))
    values = [*WORDS, str(target), str(place), *(f"{place}/{name}" for name in FILES)]
    arguments = [*rng.choice(starts(command, place, target))]
    names = VALUES[command]
    if command not in NO_MODEL:
        arguments.insert(0, f"--target={target}")
        names = rng.choice([names, [*SETTINGS, "config"]])
        if rng.random() < 0.4:
            draft = rng.choice(["ngram", str(target)])
            arguments += [f"--mode={rng.choice(['sd', 'ssd', 'auto'])}", f"--draft={draft}"]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name, value = rng.choice(names), rng.choice(values)
        arguments += rng.choice(
            [
                *[[f"--{name}={value}"]] * 12,
                [f"--{name}", value],
                [f"--no{name}={value}"],
                [f"--no{name}"],
                [f"-{name}={value}"],
                [f"--{name[:-1]}={value}"],
                [f"--{name}"],
                [value],
                [f"--{rng.choice(['flagfile', 'undefok', 'help', 'h'])}={value}"],
            ]
        )
    if rng.random() < 0.1:
        rng.shuffle(arguments)
    # Without a target of its own a command would download the default one.
    tail = [] if command in NO_MODEL else [f"--slots={rng.choice([1, 1, 1, 2])}"]
    has_target = any(argument.startswith("--target=") for argument in arguments)
    return command, arguments + tail + ([] if has_target or not tail else [f"--target={target}"])


def outcome(command, arguments, capsys, monkeypatch):
    """Exit status, None where weights would have loaded, and what was said."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    try:
        status = main([command, *arguments])
    except LoadingError:
        status = None
    except SystemExit as ended:  # --help
        status = ended.code
    return status, *capsys.readouterr()


@pytest.mark.more
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.usefixtures("shallow")
def test_no_command_line_ends_in_a_traceback(seed, place, tiny_checkpoint, capsys, monkeypatch):
    rng, statuses, before = random.Random(seed), set(), signal.getsignal(signal.SIGTERM)
    for _ in range(1000):
        command, arguments = command_line(rng, place, tiny_checkpoint)
        status, _, err = outcome(command, arguments, capsys, monkeypatch)
        statuses.add(status)
        shown = f"{command} {arguments!r:.600}: {status} {err!r:.600}"
        assert status in (None, 0, 1, 2), shown
        assert "Errno" not in err, shown
        assert "Traceback" not in err, shown
        if status == 1:
            assert (command, err) == ("compare", ""), shown  # two runs differ
        if status == 2 and not any("a\nb" in argument for argument in arguments):
            assert err or command == "compare", shown  # which may say it in its table
            starts_of_lines = (f"ssd-jax {command}: ", "prompt ", "  ")  # a bad line of a file
            assert all(line.startswith(starts_of_lines) for line in err.splitlines()), shown
    assert {None, 2} <= statuses
    assert signal.getsignal(signal.SIGTERM) == before, "a command has left its handler behind"
