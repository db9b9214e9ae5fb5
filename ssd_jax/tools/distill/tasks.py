"""Tasks made by templates over passages of plain text: summarise, translate, answer, and so on.

The wordings are in `tasks.toml`. The passages, and the tasks over each, are a function of the text,
its name and the number of tasks alone.
"""

from __future__ import annotations

import importlib.resources
import itertools
import re
import tomllib
from typing import NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.order import permutation

TEMPLATES = importlib.resources.files("ssd_jax.tools.distill") / "tasks.toml"

_GOALS = (25, 45, 70, 100)
"""Goals for the words of passages, in turn."""

_MAX_OVERRUN = 40
"""Words that a passage may go on beyond its goal to end with a paragraph."""

_UNKNOWN = "<unk>"
"""WikiText's word for rare words; a sentence with it is left out."""

_HEADINGS = ("=", "#")

_SENTENCE = re.compile(r".+?(?:[.!?][\"')\]]*(?=\s)|(?=\n\s*\n)|\Z)\s*", re.DOTALL)
_PARAGRAPH_END = re.compile(r"\n\s*\n\s*\Z")
_SPEAKER = re.compile(r"^([A-Z][\w ]+):$", re.MULTILINE)
_NAME = re.compile(r"(?<=[a-z,;] )(?:[A-Z][a-z]+ )+[A-Z][a-z]+")

_SPELLINGS = [
    (re.compile(pattern), usual)
    for pattern, usual in (
        (r" @(.)@ ", r"\1"),
        (r" +([.,;:!?%)\]])", r"\1"),
        (r"([(\[]) +", r"\1"),
        (r" '(s|t|d|m|ll|re|ve)\b", r"'\1"),
        (r'" ([^"\n]*) "', r'"\1"'),
        (r"“ ?([^“”\n]*?) ?”", r"“\1”"),
        (r"[ \t]+", " "),
        (r" ?\n ?", "\n"),
    )
]
"""WikiText's own spellings, which set punctuation apart as words, and the usual ones."""


class Task(NamedTuple):
    """A prompt over a passage, its kind, and the passage as the file has it."""

    prompt: str
    kind: str
    passage: str


def make_tasks(text: str, count: int, source: str) -> list[Task]:
    """Tasks over passages of a text; a passage gets each kind of task at most once.

    Args:
      source: name of the text, which keys the choice.

    Raises:
      InputError: more tasks than passages and kinds allow.
    """
    templates = tomllib.loads(TEMPLATES.read_text(encoding="utf-8"))
    kinds, passages = list(templates), cut(text)
    limit = len(kinds) * len(passages)
    if count > limit:
        raise InputError(
            f"prompts {source!r}: tasks = {count} is more than the {limit} that {len(passages)} "
            f"passages and {len(kinds)} kinds of tasks allow; lower it or give a longer text"
        )
    order = permutation(len(passages), source)
    tasks = []
    for i in range(count):
        pass_index, rank = divmod(i, len(passages))
        passage = passages[order[rank]]
        spelled, name = usual_spelling(passage), _name(passage)
        kind = kinds[(rank + pass_index) % len(kinds)]
        fitting = [wording for wording in templates[kind] if name or "{name}" not in wording]
        wording = fitting[permutation(len(fitting), f"{source}/{i}")[0]]
        prompt = wording.replace("{name}", name).replace("{passage}", spelled)
        tasks.append(Task(prompt, kind, passage))
    return tasks


def cut(text: str) -> list[str]:
    """Passages of whole sentences, which end with a paragraph where one ends nearby.

    They do not cross a heading, and sentences with unknown words are left out.
    """
    passages, sentences, goals = [], [], itertools.cycle(_GOALS)
    goal = next(goals)
    for sentence in [*_SENTENCE.findall(text), _HEADINGS[0]]:  # the end acts as a heading
        heading = sentence.startswith(_HEADINGS)
        if not heading and _UNKNOWN not in sentence:
            sentences.append(sentence)
        words = sum(len(text.split()) for text in sentences)
        ended = _PARAGRAPH_END.search(sentence) and words >= goal
        if heading or ended or words >= goal + _MAX_OVERRUN:
            if words >= _GOALS[0]:
                passages.append("".join(sentences).strip())
                goal = next(goals)
            sentences = []
    return passages


def usual_spelling(passage: str) -> str:
    """A passage without WikiText's spaces around punctuation."""
    for pattern, usual in _SPELLINGS:
        passage = pattern.sub(usual, passage)
    return passage.strip()


def _name(passage: str) -> str:
    """Who speaks in a passage, or else a name of several words in it; empty where there is none."""
    match = _SPEAKER.search(passage)
    if match:
        return match[1]
    match = _NAME.search(passage)
    return match[0] if match else ""
