"""`ssd-jax generate`: complete one prompt or a file of prompts."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssd_jax.cli import settings
from ssd_jax.cli.loading import failure, load, open_llm, params_of, progress_bar
from ssd_jax.cli.prompt_files import FilePrompt, read_prompt_file
from ssd_jax.config.config import Config
from ssd_jax.config.settings import MODES
from ssd_jax.engine.request import Request, RequestOutput, TokenEvent
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import BadLine
from ssd_jax.options.wording import as_flags
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.chat.screen import printable

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM


_COMPARED = [mode for mode in MODES if mode != "auto"]
_FLAGS: settings.FlagSpecs = {
    "prompt": "text to complete",
    "prompt_file": 'JSONL file, one {"prompt": ...} or {"messages": [...]} per line, perhaps with '
    "sampling settings, which override the flags; - is standard input",
    "json": ("bool", False, "one JSON line per text on standard output"),
    "n": ("int", 1, SamplingParams.__dataclass_fields__["n"].metadata["help"]),
    "compare": (
        "str",
        None,
        "also run the prompts in this mode, and show on standard error where texts diverge",
        _COMPARED,
    ),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS)
    given = settings.parse(values, "generate", arguments)
    mode, other = given["mode"], given["compare"]
    if mode == "ar" and other in ("sd", "ssd"):
        raise _needs(other, mode)  # before what that mode needs is refused beside this one
    config = settings.config_of(given)
    _check_other(config, given["compare"])
    prompts = _prompts(given)
    params = params_of(config, given, values)
    _check_shown(params, json=given["json"])
    write = (_JsonLines if given["json"] else _TextLines)(prompts, params.n)
    good: list[tuple[int, FilePrompt, SamplingParams]] = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, BadLine):
            write.refused(index, f"{prompt.where}: {prompt.error}")
            continue
        try:
            good.append((index, prompt, _params(prompt, params, json=given["json"])))
        except InputError as error:
            write.refused(index, str(error))
    if not good:
        return InputError.exit_status
    if config.logprobs_of != "raw" and all(own.logprobs is None for _, _, own in good):
        raise InputError(
            f"logprobs_of = {config.logprobs_of!r} means nothing without logprobs; give both"
        )
    with open_llm(config) as llm:
        requests: list[Request] = []
        for index, prompt, own in good:
            try:
                requests += llm.request(prompt.content, own, index).split(len(prompts))
            except InputError as error:
                write.refused(index, as_flags(str(error)))
        if not requests:
            return InputError.exit_status
        load(llm)
        outputs: list[RequestOutput] = []
        for event in llm.run(requests):
            write.event(event)
            if event.output is not None:
                outputs.append(event.output)
        status = InputError.exit_status if len(requests) < params.n * len(prompts) else 0
        _require_all(outputs)
        if given["compare"] is not None:
            return _compare(llm, requests, outputs, given["compare"]) or status
        return status


def _check_other(config: Config, other: str | None) -> None:
    """Refuses a mode to compare with that is the same, unknown, or not prepared."""
    if other is None:
        return
    if other not in MODES:
        raise InputError(f"compare = {other!r} is unknown; one of {', '.join(_COMPARED)}")
    if other == config.mode:
        raise InputError(f"compare = {other!r} is the mode that runs anyway; name another")
    if other == "auto":
        raise InputError(
            "compare = 'auto' names no mode; use --mode=auto, and --compare=ar for example"
        )
    # Every model can decode one token at a time; a draft that branches can draft without branches.
    prepared = {"ssd": ("sd", "ssd"), "sd": ("sd",)}.get(config.prepared, ())
    if other != "ar" and other not in prepared:
        raise _needs(other, config.mode)


def _needs(other: str, mode: str) -> InputError:
    return InputError(
        f"compare = {other!r} needs the settings of that mode; use --mode={other} --compare={mode}"
    )


def _compare(
    llm: LLM, requests: Sequence[Request], outputs: Sequence[RequestOutput], other: str
) -> int:
    """Runs the requests in another mode and reports; returns the report's exit status."""
    from rich.console import Console

    from ssd_jax.cli.compare import judged
    from ssd_jax.tools.compare.judges import ModelJudge
    from ssd_jax.tools.compare.pairs import Output, pair_up
    from ssd_jax.tools.compare.report import comparison_table

    again: list[RequestOutput] = []
    with progress_bar(f"the same in mode {other}", unit="prompts") as progress:
        for event in llm.run(requests, other):
            if event.output is not None:
                again.append(event.output)
                progress(len(again), len(requests))
    _require_all(again)
    one, two = ({out.prompt_index: Output.of(out) for out in run} for run in (outputs, again))
    judge = ModelJudge(llm, {request.index: request for request in requests}, certain=True)
    found = judged((llm.mode, other), pair_up(one, two), judge)
    Console(stderr=True).print(comparison_table(found))
    return found.exit_status


def _require_all(outputs: Sequence[RequestOutput]) -> None:
    """Raises: SsdError: some requests ended with an error."""
    failed = [f"prompt {out.prompt_index}" for out in outputs if out.finish_reason == "error"]
    if failed:
        raise failure(failed, len(outputs), "prompts")


def _prompts(given: Mapping[str, Any]) -> list[FilePrompt | BadLine]:
    if (given["prompt"] is None) == (given["prompt_file"] is None):
        raise InputError("give one of --prompt=TEXT and --prompt_file=FILE.jsonl")
    if given["prompt"] is not None:
        return [FilePrompt(prompt=given["prompt"])]
    return read_prompt_file(given["prompt_file"])


def _params(prompt: FilePrompt, flags: SamplingParams, *, json: bool) -> SamplingParams:
    """The sampling parameters of a prompt.

    Raises:
      InputError: impossible ones, or what only JSON lines show.
    """
    params = prompt.params(flags)
    _check_shown(params, json=json)
    return params


def _check_shown(params: SamplingParams, *, json: bool) -> None:
    """Refuses log-probabilities that would not be shown."""
    for name in sorted(params.reports):
        if not json:
            count = getattr(params, name)
            raise InputError(f"{name} = {count} are shown in JSON lines alone; add --json")


class _JsonLines:
    """Prints texts, finished or refused, as JSON lines by `prompt_index`, each in its turn.

    Args:
      prompts: all P of them; text s of prompt p has the `prompt_index` p + s P.
      texts: of each prompt.
    """

    def __init__(self, prompts: Sequence[FilePrompt | BadLine], texts: int) -> None:
        self._rows = [{} if isinstance(each, BadLine) else each.row for each in prompts]
        self._prompts, self._texts = len(prompts), texts
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0

    def refused(self, index: int, error: str) -> None:
        print(f"prompt {index}: {error}", file=sys.stderr)
        for text in range(self._texts):
            self._print(index + text * self._prompts, {"error": error})

    def event(self, event: TokenEvent) -> None:
        if event.output is not None:
            (text,) = event.output.outputs
            line = dataclasses.asdict(text)
            if line["logprobs"] is None:
                del line["logprobs"]
            scores = event.output.prompt_logprobs
            if scores is not None:
                line["prompt_logprobs"] = [each and dataclasses.asdict(each) for each in scores]
            self._print(event.prompt_index, line)

    def _print(self, index: int, line: dict[str, Any]) -> None:
        text, prompt = divmod(index, self._prompts)
        place = {"prompt_index": index, "index": text}
        self._ready[index] = {**place, **line, **place, **self._rows[prompt]}
        while self._next in self._ready:
            print(json.dumps(self._ready.pop(self._next)), flush=True)
            self._next += 1


class _TextLines:
    """Prints text for people: a single prompt streams; of several, each is printed when it ends."""

    def __init__(self, prompts: Sequence[FilePrompt | BadLine], texts: int) -> None:
        self._prompts, self._texts = len(prompts), texts
        self._stream = self._prompts == texts == 1
        # A model's text must not move the cursor or rename the window.
        self._shown = printable if sys.stdout.isatty() else str

    def refused(self, index: int, error: str) -> None:
        print(f"prompt {index}: {error}", file=sys.stderr)

    def event(self, event: TokenEvent) -> None:
        if self._stream:
            print(self._shown(event.text), end="", flush=True)
        elif event.output is not None:
            text, prompt = divmod(event.prompt_index, self._prompts)
            name = f"prompt {prompt}" + (f", text {text}" if self._texts > 1 else "")
            print(f"--- {name}\n{self._shown(event.output.text)}", flush=True)
        output = event.output
        if output is None:
            return
        if self._stream:
            print(flush=True)
        speed, first = output.metrics["tokens_per_second"], output.metrics["ttft_ms"]
        why = f"{output.finish_reason} ({output.limit})" if output.limit else output.finish_reason
        parts = [f"{len(output.token_ids)} tokens", why]
        parts += [f"{speed:.1f} tokens/s"] if speed else []
        parts += [f"first token after {first:.0f} ms"] if first else []
        print(f"[{', '.join(parts)}]", file=sys.stderr)
