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
from ssd_jax.system.files import printable

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM


_COMPARE_MODES = [mode for mode in MODES if mode != "auto"]
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
        _COMPARE_MODES,
    ),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS)
    options = settings.parse(values, "generate", arguments)
    mode, compared_mode = options["mode"], options["compare"]
    if mode == "ar" and compared_mode in ("sd", "ssd"):
        # Before what that mode needs is refused beside this one.
        raise _needs_settings(compared_mode, mode)
    config = settings.config_of(options)
    _check_compared_mode(config, options["compare"])
    prompts = _prompts(options)
    params = params_of(config, options, values)
    _check_shown(params, json=options["json"])
    write = (_JsonLines if options["json"] else _TextLines)(prompts, params.n)
    good: list[tuple[int, FilePrompt, SamplingParams]] = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, BadLine):
            write.refuse(index, f"{prompt.where}: {prompt.error}")
            continue
        try:
            good.append((index, prompt, _params(prompt, params, json=options["json"])))
        except InputError as error:
            write.refuse(index, str(error))
    if not good:
        return InputError.exit_status
    if config.logprobs_of != "raw" and all(
        prompt_params.logprobs is None for _, _, prompt_params in good
    ):
        raise InputError(
            f"logprobs_of = {config.logprobs_of!r} means nothing without logprobs; give both"
        )
    with open_llm(config) as llm:
        requests: list[Request] = []
        for index, prompt, prompt_params in good:
            try:
                requests += llm.request(prompt.content, prompt_params, index).split(len(prompts))
            except InputError as error:
                write.refuse(index, as_flags(str(error)))
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
        if options["compare"] is not None:
            return _compare(llm, requests, outputs, options["compare"]) or status
        return status


def _check_compared_mode(config: Config, compared_mode: str | None) -> None:
    """Refuses a mode to compare with that is the same, unknown, or not prepared."""
    if compared_mode is None:
        return
    if compared_mode not in MODES:
        raise InputError(
            f"compare = {compared_mode!r} is unknown; one of {', '.join(_COMPARE_MODES)}"
        )
    if compared_mode == config.mode:
        raise InputError(f"compare = {compared_mode!r} is the mode that runs anyway; name another")
    if compared_mode == "auto":
        raise InputError(
            "compare = 'auto' names no mode; use --mode=auto, and --compare=ar for example"
        )
    # Every model can decode one token at a time; a draft that branches can draft without branches.
    prepared = {"ssd": ("sd", "ssd"), "sd": ("sd",)}.get(config.prepared, ())
    if compared_mode != "ar" and compared_mode not in prepared:
        raise _needs_settings(compared_mode, config.mode)


def _needs_settings(compared_mode: str, mode: str) -> InputError:
    return InputError(
        f"compare = {compared_mode!r} needs the settings of that mode; use "
        f"--mode={compared_mode} --compare={mode}"
    )


def _compare(
    llm: LLM, requests: Sequence[Request], outputs: Sequence[RequestOutput], compared_mode: str
) -> int:
    """Runs the requests in another mode and reports; returns the report's exit status."""
    from rich.console import Console

    from ssd_jax.cli.compare import judge_pairs
    from ssd_jax.tools.compare.judges import Finding, ModelJudge, without_model
    from ssd_jax.tools.compare.pairs import Output, Pair, pair_up
    from ssd_jax.tools.compare.report import compare, comparison_table

    compared_outputs: list[RequestOutput] = []
    with progress_bar(f"the same in mode {compared_mode}", unit="prompts") as progress:
        for event in llm.run(requests, compared_mode):
            if event.output is not None:
                compared_outputs.append(event.output)
                progress(len(compared_outputs), len(requests))
    _require_all(compared_outputs)
    a, b = (
        {out.prompt_index: Output.of(out) for out in run} for run in (outputs, compared_outputs)
    )
    names, pairs = (llm.mode, compared_mode), pair_up(a, b)
    by_index = {request.index: request for request in requests}
    if llm.config.hosts is None:
        comparison = judge_pairs(names, pairs, ModelJudge(llm, by_index, certain=True))
    else:  # programs of hosts only run together, in an engine

        def judge(pair: Pair) -> Finding:
            return without_model(by_index[pair.prompt_index].params, llm.config.verify)(pair)

        comparison = compare(names, pairs, judge)
    Console(stderr=True).print(comparison_table(comparison))
    return comparison.exit_status


def _require_all(outputs: Sequence[RequestOutput]) -> None:
    """Raises: SsdError: some requests ended with an error."""
    failures = [f"prompt {out.prompt_index}" for out in outputs if out.finish_reason == "error"]
    if failures:
        raise failure(failures, len(outputs), "prompts")


def _prompts(options: Mapping[str, Any]) -> list[FilePrompt | BadLine]:
    if (options["prompt"] is None) == (options["prompt_file"] is None):
        raise InputError("give one of --prompt=TEXT and --prompt_file=FILE.jsonl")
    if options["prompt"] is not None:
        return [FilePrompt(prompt=options["prompt"])]
    return read_prompt_file(options["prompt_file"])


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
        self._rows = [{} if isinstance(prompt, BadLine) else prompt.row for prompt in prompts]
        self._prompts, self._texts = len(prompts), texts
        self._lines: dict[int, dict[str, Any]] = {}
        self._next = 0

    def refuse(self, index: int, error: str) -> None:
        print(f"prompt {index}: {error}", file=sys.stderr)
        for text in range(self._texts):
            self._print(index + text * self._prompts, {"error": error})

    def event(self, event: TokenEvent) -> None:
        if event.output is not None:
            (text,) = event.output.outputs
            line = dataclasses.asdict(dataclasses.replace(text, error=None))
            del line["error"]  # standard error has it
            if line["logprobs"] is None:
                del line["logprobs"]
            scores = event.output.prompt_logprobs
            if scores is not None:
                line["prompt_logprobs"] = [score and dataclasses.asdict(score) for score in scores]
            self._print(event.prompt_index, line)

    def _print(self, index: int, line: dict[str, Any]) -> None:
        text, prompt = divmod(index, self._prompts)
        numbers = {"prompt_index": index, "index": text}
        self._lines[index] = {**numbers, **line, **numbers, **self._rows[prompt]}
        while self._next in self._lines:
            print(json.dumps(self._lines.pop(self._next)), flush=True)
            self._next += 1


class _TextLines:
    """Prints text for people: a single prompt streams; of several, each is printed when it ends."""

    def __init__(self, prompts: Sequence[FilePrompt | BadLine], texts: int) -> None:
        self._prompts, self._texts = len(prompts), texts
        self._stream = self._prompts == texts == 1
        # A model's text must not move the cursor or rename the window.
        self._printable = printable if sys.stdout.isatty() else str

    def refuse(self, index: int, error: str) -> None:
        print(f"prompt {index}: {error}", file=sys.stderr)

    def event(self, event: TokenEvent) -> None:
        if self._stream:
            print(self._printable(event.text), end="", flush=True)
        elif event.output is not None:
            text, prompt = divmod(event.prompt_index, self._prompts)
            name = f"prompt {prompt}" + (f", text {text}" if self._texts > 1 else "")
            print(f"--- {name}\n{self._printable(event.output.text)}", flush=True)
        output = event.output
        if output is None:
            return
        if self._stream:
            print(flush=True)
        speed, ttft_ms = output.metrics["tokens_per_second"], output.metrics["ttft_ms"]
        reason = (
            f"{output.finish_reason} ({output.limit})" if output.limit else output.finish_reason
        )
        items = [f"{len(output.token_ids)} tokens", reason]
        items += [f"{speed:.1f} tokens/s"] if speed else []
        items += [f"first token after {ttft_ms:.0f} ms"] if ttft_ms else []
        print(f"[{', '.join(items)}]", file=sys.stderr)
