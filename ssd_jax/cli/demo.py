"""`ssd-jax demo`: one prompt in every mode, streamed, and a short table of what each cost."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags
from rich.console import Console

from ssd_jax.bench.demo import SpeedRow, draft_cost, summary_table
from ssd_jax.checkpoints.cache_dir import cache_dir
from ssd_jax.checkpoints.shipped import DEFAULT, find_draft
from ssd_jax.cli import settings
from ssd_jax.cli.failed import failure
from ssd_jax.cli.loading import load, open_llm, progress_bar
from ssd_jax.cli.names import short
from ssd_jax.config import Config
from ssd_jax.errors import InputError
from ssd_jax.runtime.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ssd_jax.llm import LLM

_PROMPT = "Name three uses of a paperclip."
_K, _BUDGET = "4", "16"
_OWN_K, _OWN_BUDGET = "3", "4"  # of a draft that is nearly always right, but dear


class _Answer(NamedTuple):
    name: str
    output: RequestOutput


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags()
    flags.DEFINE_string("prompt", _PROMPT, "what to ask", flag_values=values)
    for name, default in (("max_tokens", 128), ("mode", "sd")):
        values[name].default = default
        values[name].unparse()
    given = dict(settings.parse(values, "demo", arguments))
    ssd, notes = None, []
    if given["mode"] == "sd" and given["draft"] is None:
        if _has_draft(given):
            ssd = _ssd(given, draft=DEFAULT, k=given["k"] or _K, budget=_BUDGET)
            notes = ["sd has the light draft of the package, ssd the strong one"]
            given |= {"draft": DEFAULT, "k": given["k"] or _K, "trace": None}
        else:
            ssd = _with_own_weights(given)
            notes = [
                "the draft of ssd is the target's own weights in int8, for want of a small one"
            ]
            given |= {"draft": "ngram", "trace": None}
    config, params = settings.config_of(given), settings.params_of(given)
    console = Console()
    console.print(f"[bold]{given['prompt']}[/bold]", highlight=False)
    with open_llm(config) as llm:
        llm.request(given["prompt"], params)
        load(llm)
        answers = [_answer(llm, mode, given["prompt"], params, console) for mode in llm.modes]
    del llm  # its weights, too
    if ssd is not None:
        with open_llm(ssd) as llm:
            llm.request(given["prompt"], params)
            load(llm)
            answers.append(_answer(llm, "ssd", given["prompt"], params, console))
        cost = draft_cost(answers[-1].output.metrics, ssd.speculated, ssd.branches)
        notes += [] if cost is None else [cost]
    rows = [_row(answer, answers[0].output) for answer in answers]
    console.print()
    tokens = len(answers[0].output.token_ids)
    console.print(summary_table(rows, title=f"{tokens} tokens", notes=notes))
    if ssd is not None and ssd.trace is not None:
        console.print(_picture(Path(ssd.trace)), highlight=False, soft_wrap=True)
    failed = [answer.name for answer in answers if answer.output.finish_reason == "error"]
    if failed:
        raise failure(failed, len(answers), "answers")
    return 0


def _has_draft(given: dict[str, Any]) -> bool:
    """Whether a draft comes with the package for the target."""
    from ssd_jax.opened import open_source  # bad flags must not wait for JAX

    source = settings.config_of(given | {"mode": "ar"}).target
    with progress_bar("downloading", unit="bytes") as progress:
        return find_draft(open_source(source, progress=progress), "sd") is not None


def _with_own_weights(given: dict[str, Any]) -> Config:
    """SSD with the target's weights in int8 as the draft, in a worker process."""
    source = settings.config_of(given | {"mode": "ar"}).target
    k = given["k"] or _OWN_K
    ssd = _ssd(given, draft=source, k=k, budget=_OWN_BUDGET)
    return dataclasses.replace(ssd, draft_dtype="int8", draft_placement="process")


def _ssd(given: dict[str, Any], *, draft: str, k: str, budget: str) -> Config:
    """SSD with its timeline taken down."""
    config = settings.config_of(given | {"mode": "ar"})
    trace = config.trace
    if trace is None:
        cache_dir().mkdir(parents=True, exist_ok=True)
        trace = str(cache_dir() / "demo-trace.json")
    return dataclasses.replace(
        config,
        mode="ssd",
        draft=draft,
        k=k,
        budget=budget,
        trace=trace,
    )


def _answer(llm: LLM, mode: str, prompt: str, params: SamplingParams, console: Console) -> _Answer:
    """Streams an answer, after a short one: first runs of programs are slow."""
    llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True), mode=mode)
    name = _name(mode, llm.config)
    console.print(f"\n[cyan]{name}[/cyan]", highlight=False)
    output = None
    for event in llm.stream(prompt, params, mode=mode):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        output = event.output or output
    console.print()
    assert output is not None
    return _Answer(name, output)


def _picture(trace: Path) -> str:
    """Draws the trace, where that is possible; where to look."""
    from ssd_jax.traces.picture import ROUNDS, choose, draw, window
    from ssd_jax.traces.read import read_trace

    if importlib.util.find_spec("matplotlib") is None:
        return f"the trace is in {trace}: ui.perfetto.dev shows it"
    picture = trace.with_suffix(".png")
    try:
        engine = choose(read_trace(trace), None)
        draw(engine, window(engine, None, ROUNDS), picture)
    except InputError as error:
        return f"the trace is in {trace}, and was not drawn: {error}"
    return f"draft and target, round by round: {picture}"


def _name(mode: str, config: Config) -> str:
    if mode == "ar":
        return f"ar ({config.dtype})"
    draft = "n-gram" if config.draft_model is None else short(config.draft_model)
    if config.draft_model == config.target:
        draft = f"own {config.draft_dtype or config.dtype}"
    return f"{mode} ({draft}, k={config.speculated})"


def _row(answer: _Answer, base: RequestOutput) -> SpeedRow:
    metrics = answer.output.metrics
    speed, first = metrics["tokens_per_second"], base.metrics["tokens_per_second"]
    is_base = answer.output is base
    return SpeedRow(
        mode=answer.name,
        tokens_per_second=speed,
        ratio=None if is_base or not (speed and first) else speed / first,
        first_token_ms=metrics["ttft_ms"],
        acceptance_length=metrics["acceptance_length"],
        hit_rate=metrics["hit_rate"],
        hidden_draft_share=metrics["hidden_draft_share"],
        identical=None if is_base else answer.output.token_ids == base.token_ids,
    )
