"""Prompts to measure with: built-in sets and files in the formats of the common benchmarks."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import (
    PROMPT_KEYS,
    BadLine,
    PromptLine,
    good_lines,
    prompt_line,
    read_json_lines,
    string,
)
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.paths import user_path

BUILT_IN = ("mt_bench", "humaneval", "gsm8k", "eight_kinds", "demo")
"""Names of the sets in the package; `prompt_sets/LICENSES.md` says what is in them."""

HUMANEVAL_REQUEST = (
    "Complete the following Python function. "
    "Answer with the whole function in one code block.\n\n```python\n{code}\n```"
)
"""The user message around a HumanEval prompt, which is the head of a function."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPrompt(PromptLine):
    """One prompt of a set.

    Attributes:
      set: name of the built-in set, or the path as given.
      index: place in the set, from 0, blank lines not counted.
    """

    set: str
    index: int


def load_prompts(spec: str) -> list[BenchPrompt]:
    """Prompts of the built-in sets and files that `spec` names.

    Args:
      spec: names and paths, separated by commas; `:N` after one takes its first N prompts. A file
        holds JSON lines (gzip where its name ends in .gz), each {"prompt"}, {"messages"},
        {"prompt_token_ids"}, MT-Bench's {"turns"} (the first turn is used), HumanEval's
        {"task_id", "prompt"}, MBPP's {"task_id", "text"}, GSM8K's {"question"}, or Self-Instruct's
        {"instruction", "instances"} (with the input of the first instance, if it has one).

    Raises:
      InputError: an unknown name, a bad N, or a file with bad lines; the message lists the bad
        lines of all files.
    """
    specs = [_choose(item.strip()) for item in _items(spec)]
    names = [name for name, _ in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"prompt set {twice[0]} is given twice in {spec!r}; name each set once")
    read = good_lines([read_set(name, parse_line) for name in names])
    sets = zip(specs, read, strict=True)
    return [prompt for (name, limit), lines in sets for prompt in _take_first(name, lines, limit)]


def parse_line(line: Mapping[str, Any]) -> PromptLine:
    """A line of any known format as a prompt.

    Raises:
      ValueError: no known format, or a value of a wrong type.
    """
    if "turns" in line:
        turns = line["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError('"turns" must be a non-empty list of strings')
        return _user(string(turns[0], "turns[0]"))
    if "task_id" in line and "prompt" in line:
        code = string(line["prompt"], '"prompt"').strip("\n")
        return _user(HUMANEVAL_REQUEST.format(code=code))
    if "task_id" in line and "text" in line:
        return _user(string(line["text"], '"text"'))
    if any(key in line for key in PROMPT_KEYS):
        return _without_sampling(prompt_line(line))
    if "instruction" in line:
        return _user(_instruction(line))
    if "question" in line:
        return _user(string(line["question"], '"question"'))
    raise ValueError('no prompt in it; give "prompt", "messages", "turns" or "question"')


def read_set(name: str, parse: Callable[[Mapping[str, Any]], T]) -> list[T | BadLine]:
    """Every line of a built-in set, or of the file at the path `name`; see `read_json_lines`.

    Raises:
      InputError: the file cannot be read or is not UTF-8 text.
    """
    if name not in BUILT_IN:
        return read_json_lines(user_path(name), parse)
    inside = importlib.resources.files("ssd_jax.tools.bench") / "prompt_sets" / f"{name}.jsonl"
    with importlib.resources.as_file(inside) as path:
        return read_json_lines(path, parse)


def _without_sampling(prompt: PromptLine) -> PromptLine:
    """A prompt without the keys of its data set; sampling settings are refused."""
    for field in dataclasses.fields(SamplingParams):
        if field.name in prompt.others:
            raise ValueError(f'"{field.name}" is the same for all prompts here; leave it out')
    return dataclasses.replace(prompt, others={})


def _instruction(line: Mapping[str, Any]) -> str:
    text = string(line["instruction"], '"instruction"')
    instances = line.get("instances") or [{}]
    if not isinstance(instances, list) or not isinstance(instances[0], dict):
        raise ValueError('"instances" must be a list of {"input", "output"}')
    input_text = string(instances[0].get("input", ""), 'instances[0]["input"]')
    return f"{text}\n\n{input_text}" if input_text else text


def _user(text: str) -> PromptLine:
    return PromptLine(messages=[{"role": "user", "content": text}])


def _items(spec: str) -> list[str]:
    if user_path(spec).is_file():  # a path with a comma in it
        return [spec]
    items = spec.split(",")
    if not all(item.strip() for item in items):
        raise InputError(f"prompt sets {spec!r}: empty name; use a list such as mt_bench,gsm8k:8")
    return items


def _choose(item: str) -> tuple[str, int | None]:
    name, colon, count = item.rpartition(":")
    limit = None
    if colon and count.isdecimal() and not user_path(item).is_file():
        limit = int(count)
        if limit < 1:
            raise InputError(f"prompt set {item!r}: N must be at least 1 in name:N")
    else:
        name = item
    if name not in BUILT_IN and not user_path(name).is_file():
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(
            f"prompt set {name!r} is neither built in nor a file{hint}; "
            f"use {', '.join(BUILT_IN)} or the path of a JSONL file"
        )
    return name, limit


def _take_first(name: str, lines: list[PromptLine], limit: int | None) -> list[BenchPrompt]:
    if not lines:
        raise InputError(f"{name}: no prompts in the file")
    if limit is not None and limit > len(lines):
        raise InputError(f"{name}:{limit} asks for more than its {len(lines)} prompts; lower N")
    return [
        BenchPrompt(set=name, index=index, **vars(line)) for index, line in enumerate(lines[:limit])
    ]
