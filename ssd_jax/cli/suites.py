"""The suites of `ssd-jax bench`: each measures one thing and gives tables and a document."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table

from ssd_jax.bench import accounting, overhead, perplexity, report, step, support
from ssd_jax.bench.acceptance import acceptance, acceptance_json, acceptance_table
from ssd_jax.bench.bandwidth import measure_bandwidth
from ssd_jax.bench.costs import costs_json, costs_table, time_round
from ssd_jax.bench.generation import prompt_result
from ssd_jax.bench.prompts import Prompt
from ssd_jax.bench.run import BenchResult, Variant, run_paired
from ssd_jax.bench.summary import speed_ratio
from ssd_jax.cli.failed import failure
from ssd_jax.cli.loading import progress_bar
from ssd_jax.cli.settings import params_of
from ssd_jax.errors import InputError
from ssd_jax.runtime.cores import Cores, require_usable, shown, usable_cores
from ssd_jax.runtime.request import SamplingParams

if TYPE_CHECKING:
    from ssd_jax.llm import LLM

OVERHEAD_PROMPT = [1] * 40
"""Of the sequences of suite overhead."""


class Report(NamedTuple):
    """What a suite has found.

    Attributes:
      document: for `json.dumps`.
      failures: runs that ended with finish_reason `error`, of `runs`.
    """

    tables: list[Table]
    document: dict[str, Any]
    failures: Sequence[str] = ()
    runs: int = 0

    @classmethod
    def of_runs(cls, tables: list[Table], document: dict[str, Any], result: BenchResult) -> Report:
        """Of prompts through variants."""
        runs = sum(len(each.results) for each in result.runs)
        return cls(tables, document, result.failures, runs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a suite works with.

    Attributes:
      llm: loaded.
      prompts: of the suites that have them.
      ks: values of K to compare; empty for the configured one.
      text: tokens of the text of suite perplexity.
      given: every flag's value.
      settings: those worth recording.
      environment: from `environment.describe`.
    """

    llm: LLM
    prompts: Sequence[Prompt]
    ks: Sequence[int]
    text: Sequence[int]
    given: Mapping[str, Any]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]


def prompts(job: Job) -> Report:
    """Prompt sets in every mode, paired; then what a round costs by its parts."""
    variants = {name: _variant(job, mode, k) for name, (mode, k) in _variants(job).items()}
    with progress_bar("prompts", unit="runs") as progress:
        result = run_paired(
            variants,
            job.prompts,
            warmup=job.given["warmup"],
            repeats=job.given["repeats"],
            progress=progress,
        )
    document = report.bench_json(result, settings=job.settings, environment=job.environment)
    tables = [report.bench_table(result)]
    if accepted := acceptance(result):
        tables.append(acceptance_table(accepted))
        document["acceptance"] = acceptance_json(accepted)
    costs = {}
    for name, (mode, k) in _variants(job).items():
        if mode == "sd":
            found, ssd = _costs(job, mode, k), name.replace("sd", "ssd", 1)
            gain = speed_ratio(result, ssd, name) if ssd in variants else None
            costs[name] = dataclasses.replace(found, gain=gain)
    if costs:
        tables.append(costs_table(costs))
        document["costs"] = costs_json(costs)
    return Report.of_runs(tables, document, result)


def _variants(job: Job) -> dict[str, tuple[str, int | None]]:
    """(mode, K) by name; K is None without a draft."""
    found: dict[str, tuple[str, int | None]] = {}
    for mode in job.given["modes"]:
        if mode == "ar":
            found["ar"] = ("ar", None)
            continue
        if mode == "auto":
            found["auto"] = ("auto", None)
            continue
        for k in job.ks or [job.llm.config.speculated]:
            chosen = job.llm.config.chooses_k and k == job.llm.config.speculated
            found[f"{mode} k={'auto' if chosen else k}"] = (mode, k)
    return found


def _variant(job: Job, mode: str, k: int | None) -> Variant:
    params = params_of(job.given)
    return lambda prompt: prompt_result(job.llm, prompt, params, mode, k)


def accountings(job: Job) -> Report:
    """AR, SD and SSD with the cores counted in two ways, in processes of their own."""
    config, given = job.llm.config, job.given
    ks = tuple(job.ks) or (config.speculated,)
    plan = accounting.Plan(config=config, groups=core_groups(given), ks=ks, params=params_of(given))
    with progress_bar("prompts", unit="runs") as progress:
        result = accounting.measure(plan, job.prompts, warmup=given["warmup"], progress=progress)
    found = accounting.gains(result)
    document = report.bench_json(result, settings=job.settings, environment=job.environment)
    document |= {"suite": "accounting", "gains": accounting.gains_json(found)}
    tables = [report.bench_table(result), accounting.gains_table(found)]
    if accepted := acceptance(result):
        tables.insert(1, acceptance_table(accepted))
        document["acceptance"] = acceptance_json(accepted)
    return Report.of_runs(tables, document, result)


def core_groups(given: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores of the two roles, as given; else the halves of those that can be used.

    Raises:
      InputError: cores that overlap or cannot be used, or fewer than two.
    """
    cores = Cores.parse(given["target_cores"], given["draft_cores"])
    for name, asked in (("target_cores", cores.target), ("draft_cores", cores.draft)):
        if asked is not None:
            require_usable(name, asked)
    usable = usable_cores()
    if len(usable) < 2:
        raise InputError(
            f"suite = 'accounting' gives target and draft cores of their own, and there "
            f"{'is core ' + shown(usable) if usable else 'are none that can be set'}; use "
            "--suite=prompts"
        )
    if cores.target is None and cores.draft is None:
        half = sorted(usable)[: len(usable) // 2]
        return tuple(half), tuple(sorted(usable - {*half}))
    target = cores.target or tuple(sorted(usable - {*(cores.draft or ())}))
    draft = cores.draft or tuple(sorted(usable - {*target}))
    if not target or not draft:
        raise InputError(
            f"target_cores = {given['target_cores']!r} and draft_cores = {given['draft_cores']!r} "
            f"leave one of the two without cores; there are {shown(usable)}"
        )
    return target, draft


def _costs(job: Job, mode: str, k: int | None):
    import jax

    # Always k tokens, and nothing to learn from: these rounds are no text's.
    roles = dataclasses.replace(job.llm.loaded, tuner=None).roles(mode, k or 0)
    assert roles.drafter is not None
    return time_round(
        roles.target,
        roles.drafter,
        jax.block_until_ready,
        params_of(job.given),
    )


def steps(job: Job) -> Report:
    """A forward of 1, 2, 3, ... tokens."""
    import jax

    llm = job.llm
    programs, parameters = llm.loaded.programs, llm.loaded.parameters
    pages = programs.new_pages()
    lengths = np.full(programs.slots, programs.context // 8, np.int32)
    pending = np.zeros(programs.slots, np.int32)

    def forward(width: int) -> Callable[[], None]:
        compiled = programs.compile_forward(width - 1)
        room = max(width - 1, programs.verification.widths[-1])
        tokens = np.zeros((programs.slots, room), np.int32)

        def run_once() -> None:
            nonlocal pages
            logits, pages = compiled(parameters, pages, pending, tokens, lengths)
            jax.block_until_ready(logits)

        return run_once

    with progress_bar("forwards of every width", unit="rounds") as progress:
        result = step.time_steps(
            forward,
            weight_bytes=sum(parameter.nbytes for parameter in parameters),
            repeats=job.given["step_repeats"],
            progress=progress,
        )
    bandwidth = measure_bandwidth(jax.devices()[0])
    document = step.step_json(result, bandwidth, settings=job.settings, environment=job.environment)
    return Report([step.step_table(result, bandwidth)], document)


def check_overhead(llm: LLM) -> None:
    """Raises: InputError: the context is too short for suite overhead."""
    try:
        llm.request(OVERHEAD_PROMPT)
    except InputError as error:
        raise InputError(f"suite = 'overhead': {error}") from None


def overheads(job: Job) -> Report:
    """The engine's decode step against its own programs in a bare loop."""
    from ssd_jax.runtime.rows import SamplingRows

    llm = job.llm
    programs, parameters = llm.loaded.programs, llm.loaded.parameters
    pages, prompt = programs.new_pages(), len(OVERHEAD_PROMPT)
    length = prompt  # of the engine's sequences; the bare loop works at the same length
    forward, accept = programs["forward", 0], programs["accept", programs.slots, 0]
    nothing = programs.verification.blank(programs.slots)
    rows = SamplingRows(programs.slots, programs.model.config.vocab_size).on_device()
    history = programs.new_history()
    pending = np.zeros(programs.slots, np.int32)
    endless = SamplingParams(max_tokens=programs.context, ignore_eos=True)

    def engine_step() -> None:
        nonlocal length
        length += 1
        if not llm.engine.has_work:
            length = prompt
            for slot in range(programs.slots):
                llm.engine.add(llm.request(OVERHEAD_PROMPT, endless, slot))
            for _ in range(2 * programs.slots):
                llm.engine.step()
        llm.engine.step()

    def bare_step() -> None:
        nonlocal pages, history
        lengths = np.full(programs.slots, length, np.int32)
        logits, pages = forward(parameters, pages, pending, nothing.tokens, lengths)
        outcome, history, _ = accept(logits, nothing, rows, lengths, history, np.int32(0))
        np.asarray(outcome)

    for _ in range(3):
        engine_step()
        bare_step()
    result = overhead.time_overhead(engine_step, bare_step)
    document = overhead.overhead_json(result, settings=job.settings, environment=job.environment)
    return Report([overhead.overhead_table(result)], document)


def perplexities(job: Job) -> Report:
    """How well the model predicts a text."""
    llm, window = job.llm, job.given["window"]
    score = perplexity.Scorer(
        llm.loaded.programs.model,
        llm.loaded.parameters,
        window=window,
        tokens=llm.tokenizer.size,
    )
    with progress_bar("perplexity", unit="windows") as progress:
        result = perplexity.measure_perplexity(
            score,
            job.text,
            window=window,
            windows=job.given["windows"],
            progress=progress,
        )
    document = perplexity.perplexity_json(
        result, settings=job.settings, environment=job.environment
    )
    return Report([perplexity.perplexity_table(result, dtype=llm.config.dtype)], document)


def supports(job: Job) -> Report:
    """What cutting q to its likeliest tokens costs, on texts that the target writes."""
    llm, params, sizes = job.llm, params_of(job.given), numbers(job.given, "supports")
    requests = [
        llm.request(prompt.content, params, index) for index, prompt in enumerate(job.prompts)
    ]
    texts, failed = {}, []
    with progress_bar("texts", unit="texts") as progress:
        for event in llm.run(requests, "ar"):
            if event.output is not None and event.output.finish_reason == "error":
                failed.append(f"prompt {event.prompt_index}")
            elif event.output is not None and event.output.token_ids:
                index = event.output.prompt_index
                prompt = requests[index].prompt_ids
                tokens = np.array([*prompt, *event.output.token_ids], np.int32)
                texts[index] = support.Text(tokens, len(prompt))
                progress(len(texts), len(requests))
    if len(failed) == len(requests):
        raise failure(failed, len(requests), "texts")
    if not texts:
        raise InputError("every text ended at its first token; give other prompts or settings")
    loaded, draft = llm.loaded, llm.draft
    assert loaded.inline is not None
    assert draft is not None
    overlaps = support.Overlaps(
        (loaded.programs.model, loaded.parameters),
        (draft.model, loaded.inline.parameters()),
        tokens=llm.tokenizer.size,
        longest=max(len(text.tokens) for text in texts.values()),
        supports=sizes,
        params=params,
        draft_temperature=llm.config.draft_temperature,
    )
    with progress_bar("acceptance", unit="texts") as progress:
        found = support.measure_supports(
            overlaps, [texts[index] for index in sorted(texts)], sizes, progress
        )
    judged = sum(len(text.tokens) - text.prompt for text in texts.values())
    document = support.supports_json(
        found, judged=judged, settings=job.settings, environment=job.environment
    )
    return Report([support.supports_table(found, judged=judged)], document, failed, len(requests))


_POSITIVE = re.compile("[1-9][0-9]{0,8}")


def numbers(given: Mapping[str, Any], name: str) -> list[int]:
    """A flag's list of positive numbers.

    Raises:
      InputError: something else.
    """
    if not given[name] or not all(_POSITIVE.fullmatch(each) for each in given[name]):
        raise InputError(f"{name} = {','.join(given[name])!r}: give numbers from 1, such as 16,64")
    return [int(each) for each in given[name]]


SUITES: dict[str, Callable[[Job], Report]] = {
    "prompts": prompts,
    "accounting": accountings,
    "step": steps,
    "overhead": overheads,
    "perplexity": perplexities,
    "support": supports,
}
