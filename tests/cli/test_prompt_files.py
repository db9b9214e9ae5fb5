"""Lines of prompt files: what they say about their prompt, their sampling and themselves."""

from __future__ import annotations

import io
import json
import sys

import pytest

from ssd_jax.cli.main import main
from ssd_jax.cli.prompt_files import file_prompt, read_prompt_file
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.llm.prompt_files import BadLine
from ssd_jax.sampling.params import SamplingParams

FLAGS = SamplingParams(max_tokens=7, temperature=0.5)
COMMON = ("--dtype=float32", "--context=300", "--compile_cache=off", "--max_tokens=5")


class Input:
    """Standard input with these bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.fixture
def generate(tiny_checkpoint, capsys):
    def run(*arguments):
        status = main(["generate", f"--target={tiny_checkpoint}", *COMMON, "--json", *arguments])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


def test_a_lines_settings_override_the_flags_and_leave_the_others():
    prompt = file_prompt({"prompt": "a", "max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1}})
    assert prompt.params(FLAGS) == SamplingParams(
        max_tokens=3, temperature=0.5, stop=("x",), logit_bias={5: 1}
    )
    assert file_prompt({"prompt": "a"}).params(FLAGS) is not None
    assert file_prompt({"prompt": "a"}).params(FLAGS) == FLAGS


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("max_token", 'unknown key "max_token"; did you mean "max_tokens"?'),
        ("answer", 'unknown key "answer"; leave it out'),
        ("n", '"n" is the same for all prompts: give --n'),
    ],
)
def test_an_unknown_key_is_refused_by_name(key, message):
    with pytest.raises(ValueError, match='"') as error:
        file_prompt({"prompt": "a", key: 1})
    assert str(error.value) == message


def test_impossible_settings_of_a_line_are_named():
    with pytest.raises(InputError, match="max_tokens = 0 is out of range"):
        file_prompt({"prompt": "a", "max_tokens": 0}).params(FLAGS)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_a_prompt_file(monkeypatch, name):
    monkeypatch.setattr(sys, "stdin", Input(b'\xef\xbb\xbf{"prompt": "a"}\n{\n'))
    good, bad = read_prompt_file(name)
    assert good.content == "a"
    assert isinstance(bad, BadLine)
    assert bad.where == "standard input:2"


@pytest.mark.parametrize(
    ("stream", "message"), [(Input(b""), "-: no prompts"), (None, "there is no standard input")]
)
def test_standard_input_without_prompts_is_refused(monkeypatch, stream, message):
    monkeypatch.setattr(sys, "stdin", stream)
    with pytest.raises(InputError, match=message):
        read_prompt_file("-")


def test_lines_run_as_they_say_and_answers_have_what_identifies_them(generate, monkeypatch):
    lines = [
        {"prompt": "a", "ignore_eos": True, "id": "first", "category": "x"},
        {"prompt": "a", "ignore_eos": True, "max_tokens": 2},
        {"prompt": "a", "max_tokens": 0, "id": 7},
        {"prompt": "a", "answer": "b"},
    ]
    monkeypatch.setattr(sys, "stdin", Input("\n".join(map(json.dumps, lines)).encode()))
    status, answers, err = generate("--prompt_file=-")
    assert status == 2
    assert (answers[0]["id"], answers[0]["category"]) == ("first", "x")
    assert [len(answer["token_ids"]) for answer in answers[:2]] == [5, 2]
    assert answers[1]["token_ids"] == answers[0]["token_ids"][:2]
    refused = {"prompt_index": 2, "index": 0, "error": answers[2]["error"], "id": 7}
    assert answers[2] == refused
    assert "max_tokens = 0" in answers[2]["error"]
    assert 'standard input:4: unknown key "answer"' in err


def test_a_file_gives_the_ids_that_python_gives(tiny_checkpoint, tmp_path):
    template = (
        "{% for m in messages %}{{ m.name }}{{ m.tool_calls | default([]) | tojson }}"
        "{{ m.content }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "name": "Ann", "content": "a"},
        {"role": "assistant", "name": "f", "content": None, "tool_calls": [call]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": messages, "chat_template": template}))
    llm = LLM(tiny_checkpoint, dtype="float32", context=300, load=False)
    (line,) = read_prompt_file(str(path))
    ids = llm.encode(line.content)
    assert ids == llm.encode({"messages": messages, "chat_template": template})
    assert '[{"type": "function"' in llm.get_tokenizer().decode(ids)
    llm.close()
