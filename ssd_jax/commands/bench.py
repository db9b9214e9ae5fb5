"""`ssd-jax bench`: prompt sets, the cost of a forward by width, and the engine's overhead."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from ssd_jax.bench import overhead, report, step
from ssd_jax.bench.bandwidth import measure_bandwidth
from ssd_jax.bench.environment import describe, headline
from ssd_jax.bench.prompts import Prompt, load_prompts
from ssd_jax.bench.run import PromptResult, run_paired
from ssd_jax.commands import settings
from ssd_jax.commands.loading import load, open_llm, progress_bar
from ssd_jax.config import MODES
from ssd_jax.errors import InputError, NotBuiltYetError
from ssd_jax.runtime.request import SamplingParams

if TYPE_CHECKING:
    from ssd_jax.llm import LLM

Report = tuple[Table, dict[str, Any]]


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags()
    _define(values)
    given = settings.parse(values, "bench", arguments)
    if given["suite"] not in _SUITES:
        raise InputError(f"suite = {given['suite']!r} is unknown; one of {list(_SUITES)}")
    unknown = set(given["modes"]) - set(MODES)
    if unknown or not given["modes"]:
        raise InputError(f"modes = {','.join(given['modes'])!r}: each is one of {list(MODES)}")
    if given["modes"] != ["ar"]:
        raise NotBuiltYetError(f"modes = {','.join(given['modes'])}", "modes = ar")
    config = settings.config_of(given)
    prompts = load_prompts(given["prompts"]) if given["suite"] == "prompts" else []
    llm = open_llm(config)
    for prompt in prompts:
        llm.request(prompt.content, settings.params_of(given))
    load(llm)
    environment = describe()
    shown = {
        name: value for name, value in given.items() if name not in ("help", "h") and value != []
    }
    table, document = _SUITES[given["suite"]](llm, prompts, given, shown, environment)
    console = Console(stderr=bool(given["json"]))
    console.print(headline(environment), style="dim", highlight=False)
    console.print(table)
    if given["json"]:
        print(json.dumps(document))
    return 0


def prompt_result(llm: LLM, prompt: Prompt, params: SamplingParams) -> PromptResult:
    """Runs one prompt alone and notes when each token came."""
    request = llm.request(prompt.content, params, prompt.index)
    started, ids, times = time.perf_counter(), [], []
    for event in llm.run([request]):
        now = time.perf_counter()
        ids += event.token_ids
        times += [now] * len(event.token_ids)
        if event.output is not None:
            return PromptResult.from_times(
                ids, started=started, token_times=times, metrics=event.output.metrics
            )
    raise AssertionError("a request ends with an output")


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "suite", "prompts", "what to measure: prompts, step, overhead", flag_values=values
    )
    flags.DEFINE_list("modes", ["ar"], "decoding modes to compare", flag_values=values)
    flags.DEFINE_string(
        "prompts",
        "mt_bench:4,humaneval:4,gsm8k:4",
        "prompt sets (name[:count], comma-separated) or a JSONL file",
        flag_values=values,
    )
    flags.DEFINE_integer("warmup", 1, "unrecorded prompts of each mode first", flag_values=values)
    flags.DEFINE_integer("repeats", 1, "passes over all prompts", flag_values=values)
    flags.DEFINE_integer("step_repeats", 30, "forwards of each width", flag_values=values)
    flags.DEFINE_boolean("json", False, "JSON on standard output, too", flag_values=values)
    values["max_tokens"].default = 128
    values["max_tokens"].unparse()


def _prompts(
    llm: LLM, prompts: list[Prompt], given: Mapping[str, Any], shown: dict, environment: dict
) -> Report:
    params = settings.params_of(given)
    with progress_bar("prompts", unit="runs") as progress:
        result = run_paired(
            {"ar": lambda prompt: prompt_result(llm, prompt, params)},
            prompts,
            warmup=given["warmup"],
            repeats=given["repeats"],
            progress=progress,
        )
    document = report.bench_json(result, settings=shown, environment=environment)
    return report.bench_table(result), document


def _step(
    llm: LLM, _prompts: list[Prompt], given: Mapping[str, Any], shown: dict, environment: dict
) -> Report:
    import jax

    programs, parameters = llm.programs, llm.parameters
    pages = programs.new_pages()
    lengths = np.full(programs.slots, programs.context // 8, np.int32)

    def forward(width: int) -> Callable[[], None]:
        compiled = programs.compile_forward(width)
        tokens = np.zeros((programs.slots, width), np.int32)

        def run_once() -> None:
            nonlocal pages
            logits, pages = compiled(parameters, pages, tokens, lengths)
            jax.block_until_ready(logits)

        return run_once

    with progress_bar("forwards of every width", unit="rounds") as progress:
        result = step.time_steps(
            forward,
            weight_bytes=sum(parameter.nbytes for parameter in parameters),
            repeats=given["step_repeats"],
            progress=progress,
        )
    bandwidth = measure_bandwidth(jax.devices()[0])
    document = step.step_json(result, bandwidth, settings=shown, environment=environment)
    return step.step_table(result, bandwidth), document


def _overhead(
    llm: LLM, _prompts: list[Prompt], _given: Mapping[str, Any], shown: dict, environment: dict
) -> Report:
    from ssd_jax.runtime.rows import SamplingRows

    programs, parameters = llm.programs, llm.parameters
    pages, prompt = programs.new_pages(), 40
    length = prompt  # of the engine's sequences; the bare loop works at the same length
    forward, accept = programs["forward", 1], programs["accept", programs.slots]
    rows = SamplingRows(programs.slots, programs.model.config.vocab_size).on_device()
    history = programs.new_history()
    tokens = np.zeros((programs.slots, 1), np.int32)
    endless = SamplingParams(max_tokens=programs.context, ignore_eos=True)

    def engine_step() -> None:
        nonlocal length
        length += 1
        if not llm.engine.has_work:
            length = prompt
            for slot in range(programs.slots):
                llm.engine.add(llm.request([1] * prompt, endless, slot))
            for _ in range(2 * programs.slots):
                llm.engine.step()
        llm.engine.step()

    def bare_step() -> None:
        nonlocal pages, history
        lengths = np.full(programs.slots, length, np.int32)
        logits, pages = forward(parameters, pages, tokens, lengths)
        bonus, history = accept(logits, rows, lengths, history, np.int32(0))
        np.asarray(bonus)

    for _ in range(3):
        engine_step()
        bare_step()
    result = overhead.time_overhead(engine_step, bare_step)
    document = overhead.overhead_json(result, settings=shown, environment=environment)
    return overhead.overhead_table(result), document


_SUITES = {"prompts": _prompts, "step": _step, "overhead": _overhead}
