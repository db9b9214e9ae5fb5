"""`ssd-jax demo`: one prompt in every mode, streamed, and a short table of what each cost."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssd_jax.bench.table import Column, build_table, number_cell
from ssd_jax.checkpoints.shipped import DEFAULT, find_draft
from ssd_jax.cli import settings
from ssd_jax.cli.loading import failure, load, open_llm, progress_bar, short
from ssd_jax.config import Config
from ssd_jax.engine.request import RequestOutput
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir

if TYPE_CHECKING:
    from ssd_jax.llm import LLM

_PROMPT = "Name three uses of a paperclip."
_K, _BUDGET = "4", "16"
_OWN_K, _OWN_BUDGET = "3", "4"  # of a draft that is nearly always right, but dear


class DemoAnswer(NamedTuple):
    """What a mode, with whatever else tells rows apart, has said."""

    name: str
    output: RequestOutput


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(
        {"prompt": ("str", _PROMPT, "what to ask")}, max_tokens=128, mode="sd"
    )
    given = dict(settings.parse(values, "demo", arguments))
    ssd, notes = None, []
    if given["mode"] == "sd" and given["draft"] is None:
        plain = settings.config_of(given | {"mode": "ar"})
        if _has_draft(plain.target):
            given |= {"draft": DEFAULT, "k": given["k"] or _K}
            ssd = _ssd(plain, draft=DEFAULT, k=given["k"], budget=_BUDGET)
            notes = ["sd has the light draft of the package, ssd the strong one"]
        else:
            own = {"draft": plain.target, "draft_dtype": "int8", "draft_placement": "process"}
            ssd = _ssd(plain, **own, k=given["k"] or _OWN_K, budget=_OWN_BUDGET)
            given |= {"draft": "ngram"}
            note = "the draft of ssd is the target's own weights in int8, for want of a small one"
            notes = [note]
        given |= {"trace": None}
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
    console.print()
    console.print(speed_table(answers, notes=notes))
    if ssd is not None and ssd.trace is not None:
        console.print(_picture(Path(ssd.trace)), highlight=False, soft_wrap=True)
    failed = [answer.name for answer in answers if answer.output.finish_reason == "error"]
    if failed:
        raise failure(failed, len(answers), "answers")
    return 0


def _has_draft(source: str) -> bool:
    """Whether a draft comes with the package for a target."""
    from ssd_jax.checkpoints.opening import open_checkpoint  # bad flags must not wait for JAX

    with progress_bar("downloading", unit="bytes") as progress:
        return find_draft(open_checkpoint(source, progress=progress), "sd") is not None


def _ssd(config: Config, **changes: Any) -> Config:
    """Mode ssd with its timeline taken down."""
    trace = config.trace
    if trace is None:
        cache_dir().mkdir(parents=True, exist_ok=True)
        trace = str(cache_dir() / "demo-trace.json")
    return dataclasses.replace(config, mode="ssd", trace=trace, **changes)


def _answer(
    llm: LLM, mode: str, prompt: str, params: SamplingParams, console: Console
) -> DemoAnswer:
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
    return DemoAnswer(name, output)


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


def speed_table(answers: Sequence[DemoAnswer], *, notes: Sequence[str] = ()) -> Table:
    """A row for each answer, of which the first is what the others are compared with."""
    base = answers[0].output

    def ratio(row: DemoAnswer) -> float | None:
        speed, first = (out.metrics["tokens_per_second"] for out in (row.output, base))
        return speed / first if row.output is not base and speed and first else None

    def identical(row: DemoAnswer) -> Text | None:
        if row.output is base:
            return None
        same = row.output.token_ids == base.token_ids
        return Text("yes", style="green") if same else Text("no", style="red")

    def metric(title: str, name: str, form: str) -> Column[DemoAnswer]:
        return Column(title, lambda row: number_cell(row.output.metrics[name], form))

    columns: list[Column[DemoAnswer]] = [
        Column("mode", lambda row: Text(row.name, style="cyan"), "left"),
        metric("tokens\n/s", "tokens_per_second", "{:.1f}"),
        Column("ratio", lambda row: number_cell(ratio(row), "{:.2f}x")),
        metric("first\ntoken\nms", "ttft_ms", "{:.0f}"),
        metric("accepted\nlength", "acceptance_length", "{:.2f}"),
        metric("hit\nrate", "hit_rate", "{:.2f}"),
        metric("hidden\ndraft", "hidden_draft_share", "{:.2f}"),
        Column("identical", identical),
    ]
    return build_table(columns, answers, title=f"{len(base.token_ids)} tokens", notes=notes)


def draft_cost(metrics: Mapping[str, Any], k: int, branches: int) -> str | None:
    """What a draft on devices of its own costs beside the target, in words; None if unknown.

    Args:
      metrics: of an SSD run.
      k, branches: K and M.
    """
    step, verify = metrics["step_ms"], metrics["verify_ms"]
    if not step or not verify:
        return None
    fits = "which hides them" if k * step <= verify else "so it waits for its draft"
    return (
        f"a round has {k} draft forwards of {branches} branches, {step:.0f} ms each;\n"
        f"the target verifies in {verify:.0f} ms, {fits}"
    )
