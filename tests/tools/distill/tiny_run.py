"""A distillation that is small enough for tests: files, configuration, settings."""

import itertools
import json
from pathlib import Path

from ssd_jax.tools.distill.settings import DistillSettings, read_settings

WORDS = ("red", "owl", "sum", "tree", "nine", "lake", "code", "bird")


def write_lines(path: Path, *lines: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_data(directory: Path) -> Path:
    """Six questions and a text to train with, two questions held out; no two share a span."""
    pairs = enumerate(itertools.pairwise(WORDS))
    questions = [f"{i}{one}{i}{two}{i}?" for i, (one, two) in pairs]
    write_lines(
        directory / "train.jsonl", *({"id": i, "question": q} for i, q in enumerate(questions))
    )
    write_lines(
        directory / "held_out.jsonl", {"question": "Why is it so?"}, {"question": "Who came there?"}
    )
    (directory / "text.txt").write_text(
        "".join(f"{i:03} {word}, " for i, word in enumerate(WORDS * 2))
    )
    return directory


def write_config(directory: Path, target: object = "target", **changes: str) -> Path:
    """A configuration of the files of `write_data`; a change is the TOML text of a key.

    Keys are "section_key", such as generate_seed = "1".
    """
    tables = {
        "target": {"source": json.dumps(str(target)), "dtype": '"float32"'},
        "prompts": {
            "train": '["train.jsonl", "text.txt"]',
            "held_out": '["held_out.jsonl"]',
            "longest": "48",
            "passage_tokens": "24",
        },
        "generate": {
            "completions": "12",
            "max_tokens": "12",
            "slots": "3",
            "shard_tokens": "140",
            "top_n": "8",
        },
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        tables.setdefault(section, {})[name] = value
    text = "".join(
        f"[{section}]\n" + "".join(f"{name} = {value}\n" for name, value in table.items())
        for section, table in tables.items()
    )
    path = directory / "config.toml"
    path.write_text(text)
    return path


def settings(directory: Path, target: object = "target", **changes: str) -> DistillSettings:
    """The settings of `write_config`, whose files `write_data` wrote."""
    return read_settings(write_config(directory, target, **changes))
