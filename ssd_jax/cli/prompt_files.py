"""Prompt files of the commands: what each line asks, and how it is sampled."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ssd_jax.cli.flag_help import SAMPLING
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import (
    CHAT_KEYS,
    ROW_KEYS,
    BadLine,
    PromptLine,
    prompt_line,
    read_json_lines,
)
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.paths import user_path

_STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePrompt(PromptLine):
    """A prompt with its sampling settings and the keys that identify it."""

    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Its sampling parameters: the line's settings, and defaults for the others.

        Raises:
          InputError: impossible settings.
        """
        return dataclasses.replace(defaults, **self.sampling)


def read_prompt_file(name: str) -> list[FilePrompt | BadLine]:
    """The prompts of a file, or with the name - of standard input, in order.

    Raises:
      InputError: it cannot be read, or has no prompt.
    """
    if name in _STANDARD_INPUT:
        prompts = read_json_lines(Path("standard input"), file_prompt, stream=_standard_input())
    else:
        prompts = read_json_lines(user_path(name), file_prompt)
    if not prompts:
        raise InputError(f"{name}: no prompts in the file")
    return prompts


def file_prompt(line: Mapping[str, Any]) -> FilePrompt:
    """A prompt from an object of a prompt file.

    Raises:
      ValueError: no prompt (see `prompt_line`), or a key that is none of the prompt, of its
        sampling, or of `ROW_KEYS`.
    """
    prompt = prompt_line(line)
    for key in prompt.others:
        if key == "n":
            raise ValueError('"n" is the same for all prompts: give --n')
        if key not in SAMPLING and key not in ROW_KEYS:
            names = [*SAMPLING, *CHAT_KEYS, *ROW_KEYS]
            near = difflib.get_close_matches(key, names, n=1)
            hint = f'did you mean "{near[0]}"?' if near else "leave it out"
            raise ValueError(f'unknown key "{key[:40]}"; {hint}')
    return FilePrompt(
        **vars(prompt),
        sampling={key: value for key, value in prompt.others.items() if key in SAMPLING},
        row={key: value for key, value in prompt.others.items() if key in ROW_KEYS},
    )


def _standard_input() -> BinaryIO:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise InputError("there is no standard input; give a file")
    return stream
