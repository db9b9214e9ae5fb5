"""Outputs of a run, as they came or from a file that `ssd-jax generate --json` wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.prompts import BadLine, read_json_lines, string
from ssd_jax.runtime.request import RequestOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a run said to one prompt.

    Attributes:
      token_ids: generated ids; empty if the prompt was refused.
      finish_reason: why the text ended; None if the prompt was refused.
      error: why there is no answer, or none that is whole.
    """

    prompt_index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Output:
        """From an engine's output."""
        return cls._ended(output.prompt_index, tuple(output.token_ids), output.finish_reason)

    @classmethod
    def _ended(cls, index: int, tokens: tuple[int, ...], reason: str) -> Output:
        error = "the run failed amid its text" if reason == "error" else None
        return cls(prompt_index=index, token_ids=tokens, finish_reason=reason, error=error)


def read_outputs(path: Path) -> dict[int, Output]:
    """The outputs of a file of JSON lines by prompt index.

    Raises:
      InputError: the file cannot be read, has no output, one twice, or a line that is none; with
        the line's number.
    """
    outputs: dict[int, Output] = {}
    for line in read_json_lines(path, _output):
        if isinstance(line, BadLine):
            raise InputError(
                f"{line.where}: {line.error}; give the lines that ssd-jax generate --json wrote"
            )
        if line.prompt_index in outputs:
            raise InputError(
                f"{path}: prompt_index {line.prompt_index} comes twice; give the output of one run"
            )
        outputs[line.prompt_index] = line
    if not outputs:
        raise InputError(f"{path}: no outputs; give what ssd-jax generate --json wrote")
    return outputs


def _output(line: Mapping[str, Any]) -> Output:
    index = _id(line.get("prompt_index"), '"prompt_index"')
    if "error" in line:
        return Output(prompt_index=index, error=string(line["error"], '"error"'))
    ids = line.get("token_ids")
    if not isinstance(ids, list):
        raise ValueError('"token_ids" must be a list of token ids')
    tokens = tuple(_id(token, f"token_ids[{place}]") for place, token in enumerate(ids))
    reason = string(line.get("finish_reason"), '"finish_reason"')
    return Output._ended(index, tokens, reason)


def _id(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer from 0 on")
    return value
