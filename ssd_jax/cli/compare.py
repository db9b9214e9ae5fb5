"""`ssd-jax compare A.jsonl B.jsonl`: where two runs of the same prompts part, and why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ssd_jax.cli import settings
from ssd_jax.cli.loading import load, open_llm, params_of, progress_bar
from ssd_jax.cli.prompt_files import FilePrompt, read_prompt_file
from ssd_jax.config.config import Config
from ssd_jax.config.settings import SPECULATIVE
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import BadLine
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.paths import user_path
from ssd_jax.tools.compare.judges import Finding, ModelJudge, check_fits, without_model
from ssd_jax.tools.compare.pairs import Pair, pair_up, read_outputs
from ssd_jax.tools.compare.report import Comparison, compare, comparison_table

_FILES = ("A.jsonl", "B.jsonl")
_FLAGS: settings.FlagSpecs = {
    "prompt_file": "prompts of both runs; with the runs' settings, adds margins and verdicts",
}
_OF_A_MODE = frozenset({"mode", *SPECULATIVE, "slots", "trace"})
"""Settings of a run that affect no verdict: they are accepted and ignored."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS)
    options = settings.parse(values, "compare", arguments, files=_FILES, hidden=_OF_A_MODE)
    config = settings.config_of({**options, "trace": None})
    if config.hosts is not None and options["prompt_file"] is not None:
        raise InputError(
            f"hosts = {config.hosts!r}: one process computes margins; leave it or prompt_file out"
        )
    params = params_of(config, options, values)
    pairs = pair_up(*(read_outputs(user_path(options[name])) for name in _FILES))
    names = _names(options)
    if options["prompt_file"] is None:
        comparison = compare(names, pairs, without_model(params, config.verify))
    else:
        comparison = _with_model(
            names, pairs, _without_mode(config), params, options["prompt_file"]
        )
    Console().print(comparison_table(comparison))
    return comparison.exit_status


def judge_pairs(names: tuple[str, str], pairs: Sequence[Pair], judge: ModelJudge) -> Comparison:
    """Judges pairs with a model, with a progress bar."""
    num_different = sum(pair.kind != "identical" for pair in pairs)
    with progress_bar("scoring forks", unit="prompts") as progress:
        counter = itertools.count(1)

        def judge_pair(pair: Pair) -> Finding:
            finding = judge(pair)
            progress(next(counter), num_different)
            return finding

        return compare(names, pairs, judge_pair, limit=judge.limit, bitwise=judge.bitwise)


def _with_model(
    names: tuple[str, str],
    pairs: Sequence[Pair],
    config: Config,
    params: SamplingParams,
    prompts: str,
) -> Comparison:
    lines = read_prompt_file(prompts)
    by_index = {p.prompt_index: _prompt(lines, p, prompts) for p in pairs if p.compared}
    llm = open_llm(config)
    requests = {}
    for index, prompt in by_index.items():
        try:
            requests[index] = llm.request(prompt.content, prompt.params(params), index)
        except InputError as error:
            raise InputError(f"prompt_index {index} of {prompts}: {error}") from None
    check_fits(llm, pairs, requests)
    if any(pair.kind == "fork" for pair in pairs):
        load(llm)
    return judge_pairs(names, pairs, ModelJudge(llm, requests, certain=False))


def _prompt(lines: Sequence[FilePrompt | BadLine], pair: Pair, path: str) -> FilePrompt:
    index = pair.prompt_index
    indices = {index - output.index * len(lines) for output in pair.answers}
    if len(indices) != 1 or not 0 <= min(indices) < len(lines):
        raise InputError(
            f"prompt_index {index} has answers, but {path} has {len(lines)} prompts; give the "
            "prompt file of both runs"
        )
    line = lines[indices.pop()]
    if isinstance(line, BadLine):
        raise InputError(f"prompt_index {index} has answers, but {line.where}: {line.error}")
    return line


def _without_mode(config: Config) -> Config:
    """The configuration of the target in mode ar, without settings of speculation."""
    slots = 1 if config.grid is None else config.grid.data
    return dataclasses.replace(config, mode="ar", slots=slots, **dict.fromkeys(SPECULATIVE))


def _names(options: Mapping[str, Any]) -> tuple[str, str]:
    """Titles of A and B: file names, or the paths where the names are the same."""
    a, b = (user_path(options[name]) for name in _FILES)
    return (a.name, b.name) if a.name != b.name else (str(a), str(b))
