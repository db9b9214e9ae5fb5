"""The suites of `ssd-jax bench`: each measures one thing and gives tables and a document."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssd_jax.cli.loading import progress_bar
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.bench import costs, perplexity, report
from ssd_jax.tools.bench.acceptance import acceptance, acceptance_table
from ssd_jax.tools.bench.bandwidth import measure_bandwidth
from ssd_jax.tools.bench.prompts import BenchPrompt
from ssd_jax.tools.bench.run import BenchResult, prompt_result, run_paired
from ssd_jax.tools.bench.step import step_table, time_steps
from ssd_jax.tools.bench.table import Page

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM

_POSITIVE = re.compile("[1-9][0-9]{0,8}")


class SuiteReport(NamedTuple):
    """Results of a suite.

    Attributes:
      document: for `json.dumps`.
      failures: runs that ended with finish_reason `error`, out of `runs`.
    """

    tables: list[Page]
    document: dict[str, Any]
    failures: Sequence[str] = ()
    runs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchJob:
    """Inputs of a suite.

    Attributes:
      llm: loaded.
      prompts: of the suites that have them.
      ks: values of K to compare; empty for the configured one.
      text: tokens of the text of suite perplexity.
      options: every flag's value.
      params: of every request.
      environment: from `environment.describe`.
    """

    llm: LLM
    prompts: Sequence[BenchPrompt]
    ks: Sequence[int]
    text: Sequence[int]
    options: Mapping[str, Any]
    params: SamplingParams
    environment: Mapping[str, Any]

    def document(self, **content: Any) -> dict[str, Any]:
        """An object for `json.dumps`, with the settings worth recording."""
        recorded = {name: v for name, v in self.options.items() if name != "help" and v != []}
        suite = self.options["suite"]
        return report.document(suite, settings=recorded, environment=self.environment, **content)

    def runs(self, result: BenchResult, tables: list[Page], **content: Any) -> SuiteReport:
        """The report of prompts run through variants."""
        if entries := acceptance(result):
            tables.insert(0, acceptance_table(entries))
            content["acceptance"] = entries
        document = self.document(**report.bench_content(result), **content)
        runs = sum(len(run.results) for run in result.runs)
        return SuiteReport([report.bench_table(result), *tables], document, result.failures, runs)


def prompts(job: BenchJob) -> SuiteReport:
    """Runs prompt sets in every mode, paired; then times the parts of a round, but on one host."""
    llm, modes = job.llm, _modes(job)
    variants = {
        name: lambda prompt, mode=mode, k=k: prompt_result(llm, prompt, job.params, mode, k)
        for name, (mode, k) in modes.items()
    }
    with progress_bar("prompts", unit="runs") as progress:
        result = run_paired(
            variants,
            job.prompts,
            warmup=job.options["warmup"],
            repeats=job.options["repeats"],
            progress=progress,
        )
    rounds = {}
    for name, (mode, k) in modes.items():
        if mode == "sd" and k is not None and job.llm.config.hosts is None:
            ssd = name.replace("sd", "ssd", 1)
            gain = report.speed_ratio(result, ssd, name) if ssd in variants else None
            rounds[name] = dataclasses.replace(_costs(job, mode, k), gain=gain)
    if not rounds:
        return job.runs(result, [])
    return job.runs(result, [costs.costs_table(rounds)], costs=rounds)


def _modes(job: BenchJob) -> dict[str, tuple[str, int | None]]:
    """(mode, K) by name; K is None where it is not given."""
    config = job.llm.config
    modes: dict[str, tuple[str, int | None]] = {}
    for mode in job.options["modes"]:
        if mode in ("ar", "auto"):
            modes[mode] = (mode, None)
            continue
        for k in job.ks or [config.speculated]:
            is_auto = config.chooses_k and k == config.speculated
            modes[f"{mode} k={'auto' if is_auto else k}"] = (mode, None if is_auto else k)
    return modes


def _costs(job: BenchJob, mode: str, k: int) -> costs.RoundCosts:
    from ssd_jax.tuning.role_runs import draft_run, varied_proposals, verify_run

    # Always k tokens, and no tuner: these rounds belong to no text.
    loaded = dataclasses.replace(job.llm.local, tuner=None)
    programs, roles = loaded.programs, loaded.roles(mode, k)
    assert roles.drafter is not None
    proposals = varied_proposals(programs, programs.slots, [k])
    trees = programs.verification.nodes > 0
    ids = programs.ids
    verify = verify_run(roles.target, proposals, job.params, ids=ids, trees=trees)
    draft = draft_run(roles.drafter, programs.slots, job.llm.context, job.params, ids=ids)
    return costs.time_round(draft, partial(verify, k))


def steps(job: BenchJob) -> SuiteReport:
    """Times forwards of 1, 2, 3, ... tokens."""
    import jax

    from ssd_jax.devices.opening.sizes import bytes_read
    from ssd_jax.tuning.role_runs import varied_tokens

    llm = job.llm
    programs, parameters = llm.local.programs, llm.local.parameters
    pages, table = programs.new_pages(), programs.any_table()
    lengths = np.full(programs.slots, programs.context // 8, np.int32)
    pending = varied_tokens(programs.ids, programs.slots, 1)[:, 0]

    def forward(width: int) -> Callable[[], Callable[[], object]]:
        program = programs.compile_forward(width - 1)
        max_width = max(width - 1, programs.verification.widths[-1])
        tokens = varied_tokens(programs.ids, programs.slots, max_width, first=programs.slots)

        def dispatch() -> Callable[[], object]:
            nonlocal pages
            logits, pages = program(parameters, pages, table, pending, tokens, lengths)
            return partial(jax.block_until_ready, logits)

        return dispatch

    with progress_bar("forwards of every width", unit="rounds") as progress:
        result = time_steps(
            forward,
            weight_bytes=lambda width: bytes_read(programs.model, width * programs.local_slots),
            widths=numbers(job.options, "widths"),
            repeats=job.options["step_repeats"],
            progress=progress,
        )
    memory = measure_bandwidth(jax.devices()[0])
    document = job.document(**dataclasses.asdict(result), bandwidth=memory)
    return SuiteReport([step_table(result, memory)], document)


def perplexities(job: BenchJob) -> SuiteReport:
    """Measures how well the model predicts a text."""
    llm, window = job.llm, job.options["window"]
    model, parameters = llm.local.programs.model, llm.local.parameters
    score = perplexity.TextScorer(model, parameters, window=window, tokens=llm.tokenizer.size)
    with progress_bar("perplexity", unit="windows") as progress:
        result = perplexity.measure_perplexity(
            score, job.text, window=window, windows=job.options["windows"], progress=progress
        )
    figures = {"perplexity": result.value, "predicted": result.num_predicted}
    document = job.document(**figures, **dataclasses.asdict(result))
    return SuiteReport([perplexity.perplexity_table(result, dtype=llm.resolved.dtype)], document)


def numbers(options: Mapping[str, Any], name: str) -> list[int]:
    """A flag's list of positive numbers.

    Raises:
      InputError: anything else.
    """
    if not options[name] or not all(_POSITIVE.fullmatch(item) for item in options[name]):
        raise InputError(
            f"{name} = {','.join(options[name])!r}: give numbers from 1, such as 16,64"
        )
    return [int(item) for item in options[name]]


class Suite(NamedTuple):
    """A suite's function, and its flags, which suites that do not name them refuse."""

    measure: Callable[[BenchJob], SuiteReport]
    flags: tuple[str, ...] = ()


SUITES = {
    "prompts": Suite(prompts, ("modes", "ks", "prompts", "warmup", "repeats")),
    "step": Suite(steps, ("widths", "step_repeats")),
    "perplexity": Suite(perplexities, ("text", "window", "windows")),
}
