"""`ssd-jax demo`: short answers in every mode, and their cost by both ways to count cores."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ssd_jax.bench.accounting import PinnedModel, core_groups
from ssd_jax.bench.prompts import BenchPrompt, load_prompts
from ssd_jax.bench.report import (
    OF_DRAFT,
    SPEED,
    VariantSummary,
    identical_cell,
    summarize,
)
from ssd_jax.bench.run import BenchResult, Variant, prompt_result, run_paired
from ssd_jax.bench.table import Column, Page, build_table, median_cell
from ssd_jax.chat.screen import WordWrap
from ssd_jax.checkpoints.shipped import DEFAULT, find_draft
from ssd_jax.cli import settings
from ssd_jax.cli.loading import (
    failure,
    loading_line,
    open_llm,
    params_of,
    progress_bar,
    short,
)
from ssd_jax.config import SPECULATIVE, Config
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.system.cores import shown, usable_cores
from ssd_jax.system.files import printable

if TYPE_CHECKING:
    from ssd_jax.checkpoints.checkpoint import Checkpoint
    from ssd_jax.llm import LLM
    from ssd_jax.traces.read import EngineLanes

_MODE = (
    "mode to compare with ar: sd, ssd or auto, with --draft, or ar alone; default: sd with "
    "--draft; without it every mode, with drafts the demo chooses, which no flag changes"
)
_K, _BUDGET = "4", "16"
_OWN_K, _OWN_BUDGET = "3", "4"  # of a draft that is nearly always right, but expensive


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    own: settings.OwnFlags = {"prompt": "prompt to use instead of the demo's own"}
    values = settings.new_flags(own, max_tokens=128, mode=None)
    values["mode"].help = _MODE
    given = settings.parse(values, "demo", arguments)
    every = given["mode"] is None and given["draft"] is None
    if every:
        _refuse_settings_of_drafts(given)
    mode = given["mode"] or ("ar" if every else "sd")
    config = settings.config_of({**given, "mode": mode})
    asked = given["prompt"]
    one = BenchPrompt(set="demo", index=0, prompt=asked)
    demo = _Demo(
        prompts=load_prompts("demo") if asked is None else [one],
        params=params_of(config, given, values),
        console=Console(highlight=False),
    )
    results = demo.every_mode(config) if every else [demo.modes_of(config)]
    if failed := [name for result in results for name in result.failures]:
        raise failure(failed, sum(len(result.runs) for result in results), "answers")
    return 0


def _refuse_settings_of_drafts(given: Mapping[str, Any]) -> None:
    with settings.naming_file(given):
        for name in SPECULATIVE:
            if given[name] is not None:
                raise InputError(
                    f"{name} = {given[name]!r} is for a draft of yours; give --draft, too, or "
                    "leave it out: without one the demo chooses drafts for every mode"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Demo:
    """The prompts, how they are sampled, and the console that shows the answers."""

    prompts: Sequence[BenchPrompt]
    params: SamplingParams
    console: Console

    def modes_of(self, config: Config) -> BenchResult:
        """Runs and shows the modes that these settings prepare."""
        with self._opened(config) as llm:
            self._answer(llm)
            result = self._run({mode: self._variant(llm, mode) for mode in llm.modes})
            self._show(summarize(result), _described(llm.config))
        return result

    def every_mode(self, plain: Config) -> list[BenchResult]:
        """AR, SD and SSD by both ways to count cores, the choice of mode auto, and a picture."""
        import jax  # bad flags must not wait for it

        from ssd_jax.checkpoints.opening import open_checkpoint

        cores = sorted(usable_cores()) if jax.default_backend() == "cpu" else []
        groups = core_groups(plain.target_cores, None) if len(cores) > 1 else None
        if groups is None and plain.target_cores is not None:
            raise InputError(
                f"target_cores = {plain.target_cores!r}: the demo gives target and draft cores of "
                "their own on a processor with two or more; leave it out"
            )
        with progress_bar("downloading", unit="bytes") as progress:
            source = open_checkpoint(plain.target, progress=progress)
        sd, ssd, about = _with_drafts(dataclasses.replace(plain, target_cores=None), source)
        trace = Path(ssd.trace or "")
        self.console.print(about, style="dim")
        results: list[BenchResult] = []
        with ExitStack() as until:
            # First: processes on fewer cores find the programs that it compiles.
            sd_model = until.enter_context(self._opened(sd))
            self._answer(sd_model)
            if groups is not None:
                results = [self._paper(sd, ssd, *groups)]
                ssd = dataclasses.replace(ssd, trace=None)
            ssd_model = until.enter_context(self._opened(dataclasses.replace(ssd, mode="auto")))
            variants = {mode: self._variant(sd_model, mode) for mode in sd_model.modes}
            variants |= {mode: self._variant(ssd_model, mode) for mode in ("ssd", "auto")}
            result = self._run(variants)
            *rows, auto = summarize(result)
            where = f": {_named(cores)}" if cores else ""
            self._show(rows, f"All cores for everybody{where}", ssd)
            mode = result.of(auto.variant)[0].results[0].metrics.get("mode")
            drafted = ", with the draft of ssd" * (sd.draft != ssd.draft and mode == "sd")
            form = f"; measured{drafted}: {{:.1f}}"
            measured = median_cell(auto.decode_tokens_per_second, form) or ""
            self.console.print(f"{ssd_model.choice}{measured}\n")
        self.console.print(_picture(trace), soft_wrap=True)
        return [*results, result]

    def _paper(
        self, sd: Config, ssd: Config, target: Sequence[int], draft: Sequence[int]
    ) -> BenchResult:
        """Runs the modes with the target on its cores in each, and SSD's draft on others."""
        sd = dataclasses.replace(sd, target_cores=shown(target))
        ssd = dataclasses.replace(ssd, target_cores=shown(target), draft_cores=shown(draft))
        with ExitStack() as until:
            sd_model = until.enter_context(closing(PinnedModel(sd, self.params)))
            ssd_model = until.enter_context(closing(PinnedModel(ssd, self.params)))
            with self._waiting("loading again, on fewer cores"):
                sd_model.wait_ready()
                ssd_model.wait_ready()
            modes = {"ar": sd_model, "sd": sd_model, "ssd": ssd_model}
            result = self._run({mode: model.variant(mode, None) for mode, model in modes.items()})
        title = (
            f"The paper's accounting: the target on {_named(target)} in every mode,\n"
            f"SSD's draft on {_named(draft)}"
        )
        self._show(summarize(result), title, ssd)
        return result

    @contextmanager
    def _opened(self, config: Config) -> Iterator[LLM]:
        """Opens a model, and loads it once its prompts are known to fit."""
        with open_llm(config) as llm:
            for prompt in self.prompts:
                llm.request(prompt.content, self.params)
            with loading_line() as (progress, status):
                llm.load(progress=progress, status=status)
            yield llm

    def _answer(self, llm: LLM) -> None:
        """Shows the answers of the target alone, word by word."""
        for prompt in self.prompts:
            self.console.print(f"\n> {prompt.prompt}", style="bold", markup=False)
            words = WordWrap(self.console.width)
            request = llm.request(prompt.content, self.params, prompt.index)
            for event in llm.run([request], "ar"):
                self.console.file.write(words.push(printable(event.text)))
                self.console.file.flush()
            self.console.file.write(words.flush() + "\n")
        self.console.print()

    def _variant(self, llm: LLM, mode: str) -> Variant:
        return lambda prompt: prompt_result(llm, prompt, self.params, mode, None)

    def _run(self, variants: Mapping[str, Variant]) -> BenchResult:
        """Runs all prompts in every mode, after an uncounted run of each: first runs are slow."""
        with self._waiting("measuring every mode"):
            return run_paired(variants, self.prompts, warmup=1, repeats=1)

    def _waiting(self, text: str) -> Status:
        """A line on the terminal while something runs."""
        return Console(stderr=True).status(text, spinner="line")

    def _show(self, rows: Sequence[VariantSummary], title: str, ssd: Config | None = None) -> None:
        notes = [] if ssd is None else draft_cost(rows[-1], ssd)
        self.console.print(speed_table(rows, title=title, notes=notes))
        self.console.print()


def _with_drafts(plain: Config, source: Checkpoint) -> tuple[Config, Config, str]:
    """Configurations of modes sd and ssd, and a text that names their drafts.

    The draft is the package's or, for want of it, another. Mode ssd writes its timeline.
    """
    trace = plain.trace
    if trace is None:
        cache_dir().mkdir(parents=True, exist_ok=True)
        trace = str(cache_dir() / "demo-trace.json")
    common = {"draft_placement": "process", "trace": trace}
    if find_draft(source) is not None:
        drafts: dict[str, Any] = {"draft": DEFAULT, "k": _K}
        sd = dataclasses.replace(plain, mode="sd", **drafts | {"trace": None})
        ssd = dataclasses.replace(plain, mode="ssd", budget=_BUDGET, **drafts | common)
        about = "the package's draft for sd and ssd"
    else:
        sd = dataclasses.replace(plain, mode="sd", draft="ngram", trace=None)
        own = {"draft": plain.target, "draft_dtype": "int8", "budget": _OWN_BUDGET}
        ssd = dataclasses.replace(plain, mode="ssd", k=_OWN_K, **own | common)
        about = "n-grams for sd; ssd, for want of a small draft, has the target's weights in int8"
    return sd, ssd, f"{short(plain.target)} in {plain.dtype},\n{about}"


def _described(config: Config) -> str:
    draft = (
        "" if config.draft is None else f", draft {short(config.draft)}, k = {config.speculated}"
    )
    return f"{short(config.target)} in {config.dtype}{draft}"


def _named(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {shown(cores)}"


def _picture(trace: Path) -> str:
    """Draws the trace if possible; returns a line that says where to look."""
    from ssd_jax.traces.picture import ROUNDS, choose, draw, window
    from ssd_jax.traces.read import read_trace

    if importlib.util.find_spec("matplotlib") is None:
        return f"the trace is in {trace}: ui.perfetto.dev shows it"
    picture = trace.with_suffix(".png")
    try:
        engine = choose(read_trace(trace), None)
        first, count = behind_a_prompt(engine)
        draw(engine, window(engine, first, min(count, ROUNDS)), picture)
    except InputError as error:
        return f"the trace is in {trace}, and was not drawn: {error}"
    return f"draft and target, round by round: {picture}"


def behind_a_prompt(engine: EngineLanes) -> tuple[int, int]:
    """First round and length of the longest run of rounds with no prefill among or beside them."""
    runs, rounds = [(0, 0)], 0
    for each in engine.target:
        if "round" in each.args:
            rounds += 1
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((rounds, 0))
    first, count = max(runs, key=lambda run: run[1])
    return (first + 1, count - 1) if count > 1 else (first, count)


def speed_table(rows: Sequence[VariantSummary], *, title: str, notes: Sequence[str] = ()) -> Page:
    """A row for each mode; the others are compared with the first."""
    columns: list[Column[VariantSummary]] = [
        Column("mode", lambda row: Text(row.variant, style="cyan"), "left"),
        *SPEED,
        *OF_DRAFT,
        Column("identical", identical_cell),
    ]
    ratio = f"; ratio: of tokens/s to those of {rows[0].variant}" * (len(rows) > 1)
    notes = [f"tokens/s: of all prompts together{ratio}", *notes]
    return build_table(columns, rows, title=title, notes=notes)


def draft_cost(row: VariantSummary, config: Config) -> list[str]:
    """The cost of an SSD run's draft beside the target, in words; empty if unknown."""
    if not {"step_ms", "verify_ms"} <= {*row.metrics}:
        return []
    step, verify = row.metrics["step_ms"].value, row.metrics["verify_ms"].value
    k, branches = config.speculated, config.branches
    fits = "which hides them" if k * step <= verify else "so it waits for its draft"
    return [
        f"a round has {k} draft forwards of {branches} branches, {step:.0f} ms each;",
        f"the target verifies in {verify:.0f} ms, {fits}",
    ]
