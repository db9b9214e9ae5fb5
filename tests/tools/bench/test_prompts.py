from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.bench.prompts import BUILT_IN, HUMANEVAL_REQUEST, BenchPrompt, load_prompts


def write(path, *lines) -> str:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("line", "text", "messages"),
    [
        ({"prompt": "Hi", "note": 1}, "Hi", None),
        ({"prompt": "Hi", "question": "which?"}, "Hi", None),
        ({"messages": user("Hi"), "id": 7}, None, user("Hi")),
        ({"question_id": 81, "category": "x", "turns": ["One", "Two"]}, None, user("One")),
        ({"question": "1 + 1?", "answer": "2"}, None, user("1 + 1?")),
        (
            {"task_id": "HumanEval/0", "prompt": "\n\ndef f():\n", "test": "..."},
            None,
            user(HUMANEVAL_REQUEST.format(code="def f():")),
        ),
        ({"task_id": 11, "text": "Write f.", "code": "def f():"}, None, user("Write f.")),
        ({"instruction": "Do it.", "instances": []}, None, user("Do it.")),
        (
            {"instruction": "Do it.", "instances": [{"input": "this", "output": "done"}]},
            None,
            user("Do it.\n\nthis"),
        ),
    ],
)
def test_every_format_is_read(tmp_path, line, text, messages):
    path = write(tmp_path / "p.jsonl", line)
    assert load_prompts(path) == [BenchPrompt(set=path, index=0, prompt=text, messages=messages)]


def test_a_gzipped_file_is_read(tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"task_id": "t", "prompt": "def g():"}).encode()))
    (prompt,) = load_prompts(str(path))
    assert prompt.messages[0]["content"] == HUMANEVAL_REQUEST.format(code="def g():")


def test_the_code_of_a_prompt_may_have_braces(tmp_path):
    path = write(tmp_path / "p.jsonl", {"task_id": "t", "prompt": 'x = {"a": {code}}'})
    assert 'x = {"a": {code}}' in load_prompts(path)[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("name", "count"),
    [("mt_bench", 80), ("humaneval", 40), ("gsm8k", 40), ("eight_kinds", 80), ("demo", 5)],
)
def test_the_built_in_sets_are_complete(name, count):
    prompts = load_prompts(name)
    assert [(prompt.set, prompt.index) for prompt in prompts] == [(name, i) for i in range(count)]
    assert len({str(prompt.content) for prompt in prompts}) == count


def test_the_built_in_files_are_those_whose_hashes_the_licenses_page_names():
    folder = importlib.resources.files("ssd_jax.tools.bench") / "prompt_sets"
    page = (folder / "LICENSES.md").read_text()
    for name in BUILT_IN:
        data = (folder / f"{name}.jsonl").read_bytes()
        assert re.search(rf"`{name}.jsonl` \| \d+ \| `{hashlib.sha256(data).hexdigest()}`", page)
    assert "Apache License" in page
    assert page.count("Permission is hereby granted") == 2


def _categories(name):
    data = importlib.resources.files("ssd_jax.tools.bench") / "prompt_sets" / f"{name}.jsonl"
    return [json.loads(line)["category"] for line in data.read_text().splitlines()]


@pytest.mark.parametrize("name", ["mt_bench", "eight_kinds"])
def test_the_first_of_a_set_of_categories_are_one_of_each(name):
    assert len(set(_categories(name)[:8])) == 8


def test_the_demo_asks_five_kinds_of_prompts_which_drafts_are_not_trained_with():
    assert len(set(_categories("demo"))) == 5
    configs = sorted((Path(__file__).parents[3] / "configs/distill").glob("smollm2-wide-*.toml"))
    held_out = [tomllib.loads(path.read_text())["prompts"]["held_out"] for path in configs]
    assert [("demo" in names) for names in held_out] == [True, True]


def test_every_second_of_the_eight_kinds_are_of_all_kinds():
    assert set(Counter(_categories("eight_kinds")).values()) == {10}
    assert set(Counter(_categories("eight_kinds")[::2]).values()) == {5}


def test_prompts_may_be_the_first_n_of_a_set_or_several_sets(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, "", {"prompt": "b"}, {"prompt": "c"})
    prompts = load_prompts(f"humaneval:3, {path}:2")
    assert [(prompt.set, prompt.index) for prompt in prompts] == [
        ("humaneval", 0),
        ("humaneval", 1),
        ("humaneval", 2),
        (path, 0),
        (path, 1),
    ]
    assert prompts[:3] == load_prompts("humaneval")[:3]


def test_a_path_may_have_commas_and_colons(tmp_path):
    path = write(tmp_path / "a,b:3", {"prompt": "a"})
    assert len(load_prompts(path)) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mtbench", "did you mean mt_bench"),
        ("nothing.jsonl", "neither built in nor a file"),
        ("gsm8k:0", "at least 1"),
        ("gsm8k:41", "its 40 prompts"),
        ("gsm8k:x", "neither built in nor a file"),
        ("gsm8k,,humaneval", "empty name"),
        ("", "empty name"),
        ("gsm8k:2,gsm8k:3", "given twice"),
    ],
)
def test_a_bad_choice_is_explained(spec, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_prompts(spec)


def test_every_bad_line_of_every_file_is_named_in_one_error(tmp_path):
    one = write(tmp_path / "one.jsonl", {"prompt": "good"}, "{", "", {"turns": []}, {"turns": [3]})
    two = write(tmp_path / "two.jsonl", {"question": 5}, {"text": "?"}, {"prompt": "good"})
    with pytest.raises(InputError) as error:
        load_prompts(f"{one}:1,{two}")
    listed = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert [line.partition(": ")[0] for line in listed] == [
        f"{one}:2",
        f"{one}:4",
        f"{one}:5",
        f"{two}:1",
        f"{two}:2",
    ]
    assert '"turns" must be' in listed[1]
    assert "turns[0] must be a string, not a number" in listed[2]
    assert "no prompt in it" in listed[4]


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(InputError, match="no prompts in the file"):
        load_prompts(write(tmp_path / "p.jsonl", "", "  "))


def test_sampling_settings_of_a_line_are_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "Hi", "temperature": 1})
    with pytest.raises(InputError, match='"temperature" is the same for all prompts here'):
        load_prompts(path)
