"""Two runs' outputs side by side, prompt by prompt, from engines or from files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ssd_jax.engine.request import RequestOutput
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import BadLine, read_json_lines, string
from ssd_jax.tools.bench.run import first_difference

Kind = Literal["identical", "fork", "end", "refused", "missing"]
"""identical: the same ids. fork: both have a token where they part. end: one text goes on where
the other ended. refused: one run or both refused the prompt or failed amid it. missing: one run has
no line for it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a run for one prompt.

    Attributes:
      token_ids: generated ids; empty if the prompt was refused.
      finish_reason: why the text ended; None if the prompt was refused.
      error: why there is no answer, or only a part of one.
      index: place among the texts of its prompt; text s of prompt p has the `prompt_index` p + s P.
    """

    prompt_index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    index: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> Output:
        """Made from an engine's output."""
        return cls._ended(output.prompt_index, tuple(output.token_ids), output.finish_reason)

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Output:
        """Made from a line that `ssd-jax generate --json` wrote.

        Raises:
          ValueError: it is something else.
        """
        index = _id(line.get("prompt_index"), '"prompt_index"')
        text = _id(line.get("index", 0), '"index"')
        if "error" in line:
            error = string(line["error"], '"error"')
            return cls(prompt_index=index, index=text, error=error)
        ids = line.get("token_ids")
        if not isinstance(ids, list):
            raise ValueError('"token_ids" must be a list of token ids')
        tokens = tuple(_id(token, f"token_ids[{place}]") for place, token in enumerate(ids))
        ended = cls._ended(index, tokens, string(line.get("finish_reason"), '"finish_reason"'))
        return dataclasses.replace(ended, index=text)

    @classmethod
    def _ended(cls, index: int, tokens: tuple[int, ...], reason: str) -> Output:
        error = "the run failed amid its text" if reason == "error" else None
        return cls(prompt_index=index, token_ids=tokens, finish_reason=reason, error=error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The outputs of two runs for one prompt; None where a run has no line for it."""

    prompt_index: int
    a: Output | None
    b: Output | None

    @property
    def answers(self) -> list[Output]:
        """Outputs of the runs that answered."""
        answers = (self.a, self.b)
        return [answer for answer in answers if answer is not None and answer.error is None]

    @property
    def compared(self) -> bool:
        """Whether both runs answered."""
        return len(self.answers) == 2

    @functools.cached_property
    def position(self) -> int | None:
        """Index from 0 of the first output token that differs or is missing in one text."""
        if not self.compared:
            return None
        a, b = self.answers
        return first_difference(a.token_ids, b.token_ids)

    @property
    def kind(self) -> Kind:
        """Whether and how the two outputs differ."""
        if self.a is None or self.b is None:
            return "missing"
        if not self.compared:
            return "refused"
        if self.position is None:
            return "identical"
        return "end" if None in self.tokens else "fork"

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """The tokens of A and B where they part; None for a text that has ended there."""
        if self.position is None:
            return None, None
        a, b = (output.token_ids[self.position :][:1] for output in self.answers)
        return next(iter(a), None), next(iter(b), None)

    @property
    def common(self) -> tuple[int, ...]:
        """The output ids before the first difference."""
        return () if self.a is None else self.a.token_ids[: self.position]


def read_outputs(path: Path) -> dict[int, Output]:
    """The outputs of a file of JSON lines by prompt index.

    Raises:
      InputError: the file cannot be read, has no output, has one twice, or has a line that is
        none, with its number.
    """
    outputs: dict[int, Output] = {}
    for line in read_json_lines(path, Output.of_line):
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


def pair_up(a: Mapping[int, Output], b: Mapping[int, Output]) -> list[Pair]:
    """Pairs of all prompts that either run has, in prompt order.

    Raises:
      InputError: there is no prompt that both answered.
    """
    pairs = [Pair(prompt_index=index, a=a.get(index), b=b.get(index)) for index in sorted({*a, *b})]
    if not any(pair.compared for pair in pairs):
        spans = (f"{min(run)} to {max(run)}" if run else "none" for run in (a, b))
        raise InputError(
            "no prompt has an answer in both; give two runs of the same prompts "
            f"(prompt_index {' against '.join(spans)})"
        )
    return pairs


def _id(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer from 0 on")
    return value
