"""`ssd-jax demo`: an answer by the origin of its words, then what is fastest here and elsewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ssd_jax.cli import settings
from ssd_jax.cli.loading import (
    failure,
    loading_line,
    open_llm,
    params_of,
    progress_bar,
    short,
)
from ssd_jax.config.config import Config
from ssd_jax.config.settings import SPECULATIVE
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir, compile_cache
from ssd_jax.system.cores import shown, usable_cores
from ssd_jax.system.paths import user_path
from ssd_jax.tools.bench.accounting import PinnedModel, core_groups
from ssd_jax.tools.bench.prompts import BenchPrompt, load_prompts
from ssd_jax.tools.bench.report import VariantSummary, summarize
from ssd_jax.tools.bench.run import BenchResult, Variant, prompt_result, run_paired
from ssd_jax.tools.bench.table import pluralize
from ssd_jax.tools.demo.accelerators import RecordedRounds, predict, stored_times
from ssd_jax.tools.demo.pane import AnswerPane, round_line
from ssd_jax.tools.demo.replay import play
from ssd_jax.tools.demo.settings import choose_settings, fitting_dtype
from ssd_jax.tools.demo.tables import fastest_line, speed_table

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM
    from ssd_jax.loading.resolved import Resolved
    from ssd_jax.tools.traces.read import EngineLanes

_MODE = (
    "mode to compare with ar: sd, ssd or auto, with --draft, or ar alone; default: sd with "
    "--draft; without it every mode, with a draft that the demo chooses"
)
_FLAGS: settings.FlagSpecs = {
    "prompt": "prompt to use instead of the demo's own",
    "full": ("bool", False, "also show tables of every mode, with cores counted in two ways"),
    "replay": "play the answers in this file of --trace instead, without a model",
}
_SLOW_START = 20.0  # seconds; a longer one is explained
_SHOWN = 1  # request of the pane, behind a first short one
_WARM_UP = SamplingParams(max_tokens=8, ignore_eos=True)


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS, max_tokens=128, mode=None)
    values["mode"].help = _MODE
    given = settings.parse(values, "demo", arguments)
    console = Console(highlight=False)
    if given["replay"] is not None:
        settings.require_used(values, "demo --replay", ("replay",))
        play(user_path(given["replay"]), console)
        return 0
    every = given["mode"] is None and given["draft"] is None
    if every:
        _refuse_settings_of_drafts(given)
    elif given["full"]:
        raise InputError("full: tables of every mode are for the demo's own draft; leave it out")
    mode = given["mode"] or ("ar" if every else "sd")
    config = settings.config_of({**given, "mode": mode})
    asked = given["prompt"]
    one = BenchPrompt(set="demo", index=0, prompt=asked)
    demo = _Demo(
        prompts=load_prompts("demo") if asked is None else [one],
        params=params_of(config, given, values),
        console=console,
    )
    if every:
        chosen = values["dtype"].present or "dtype" in settings.names_from_file(given)
        results = demo.every_mode(config, any_dtype=not chosen, full=given["full"])
    else:
        results = [demo.modes_of(config)]
    if failed := [name for result in results for name in result.failures]:
        raise failure(failed, sum(len(result.runs) for result in results), "answers")
    return 0


def _refuse_settings_of_drafts(given: Mapping[str, Any]) -> None:
    with settings.naming_file(given):
        for name in SPECULATIVE:
            if given[name] is not None:
                raise InputError(
                    f"{name} = {given[name]!r} is for a draft of yours; give --draft, too, or "
                    "leave it out: without one the demo chooses a draft"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Demo:
    """The prompts, how they are sampled, and the console that shows the answers."""

    prompts: Sequence[BenchPrompt]
    params: SamplingParams
    console: Console

    def modes_of(self, config: Config) -> BenchResult:
        """Shows the first answer in the configured mode, and compares it with mode ar."""
        with self._opened(config) as llm:
            self._answer(llm, llm.mode)
            result = self._run({mode: self._variant(llm, mode) for mode in llm.modes})
            self.console.print(speed_table(summarize(result), title=_described(llm.resolved)))
        return result

    def every_mode(self, plain: Config, *, any_dtype: bool, full: bool) -> list[BenchResult]:
        """Shows an answer of mode ssd, the fastest mode here, and predictions for accelerators.

        Args:
          any_dtype: whether the demo may choose the dtype.
          full: whether to show tables of all modes.
        """
        import jax  # bad flags must not wait for it

        from ssd_jax.checkpoints.opening import open_checkpoint

        platform = jax.default_backend()
        cores = sorted(usable_cores()) if platform == "cpu" else []
        groups = core_groups(plain.target_cores, None) if len(cores) > 1 else None
        if groups is None and plain.target_cores is not None:
            raise InputError(
                f"target_cores = {plain.target_cores!r}: the demo gives target and draft cores of "
                "their own on a processor with two or more; leave it out"
            )
        with progress_bar("downloading", unit="bytes") as progress:
            source = open_checkpoint(plain.target, progress=progress)
        if any_dtype:
            plain = dataclasses.replace(plain, dtype=fitting_dtype(source, platform))
        cache_dir().mkdir(parents=True, exist_ok=True)
        plain = dataclasses.replace(plain, target_cores=None)
        chosen = choose_settings(plain, source, cache_dir() / "demo-trace.json")
        config = chosen.config
        self._note(f"{short(config.target)} in {config.dtype}, with {chosen.draft}")
        modes = _modes(chosen.ks, config.speculated)
        with self._opened(config, ks=chosen.ks) as llm:
            self._answer(llm, "ssd")
            variants = {name: self._variant(llm, mode, k) for name, (mode, k) in modes.items()}
            result = self._run(variants)
        rows = summarize(result)
        self._note(_same_text(rows))
        self.console.print(fastest_line(rows, config.dtype))
        self._predict(result, config.speculated)
        results = [result]
        if full:
            where = f": {_named(cores)}" if cores else ""
            self.console.print("", speed_table(rows, title=f"All cores for everybody{where}"))
            if groups is not None:
                results.append(self._paper(config, modes, *groups))
        self.console.print()
        self._note(_picture(Path(config.trace or "")))
        if not full:
            self._note("every mode in tables: ssd-jax demo --full")
        return results

    def _paper(
        self,
        config: Config,
        modes: Mapping[str, tuple[str, int | None]],
        target: Sequence[int],
        draft: Sequence[int],
    ) -> BenchResult:
        """Runs the modes with the target on its cores in each, and SSD's draft on others."""
        ks = tuple(sorted({k for _, k in modes.values() if k is not None}))
        pinned = dataclasses.replace(
            config, target_cores=shown(target), draft_cores=shown(draft), trace=None
        )
        with closing(PinnedModel(pinned, self.params, ks=ks)) as model:
            with self._waiting("loading again, on fewer cores"):
                model.wait_ready()
            result = self._run({name: model.variant(*of_it) for name, of_it in modes.items()})
        title = (
            f"The paper's accounting: the target on {_named(target)} in every mode,\n"
            f"SSD's draft on {_named(draft)}"
        )
        self.console.print("", speed_table(summarize(result), title=title))
        return result

    @contextmanager
    def _opened(self, config: Config, ks: Sequence[int] = ()) -> Iterator[LLM]:
        """Opens a model, and loads it once its prompts are known to fit."""
        began = time.monotonic()
        if config.compile_cache == "off":
            self._note("compile_cache = off: every start compiles its programs, for minutes")
        elif not any(compile_cache(config.compile_cache).glob("*.program")):
            self._note(
                "a first start here compiles its programs, in one to five minutes on two cores; "
                "they are kept, and a later start takes seconds"
            )
        with open_llm(config, ks=ks) as llm:
            for prompt in self.prompts:
                llm.request(prompt.content, self.params)
            opened = time.monotonic()
            with loading_line() as (progress, status):
                llm.load(progress=progress, status=status)
            ready = time.monotonic()
            if ready - began > _SLOW_START:
                self._note(
                    f"ready after {ready - began:.0f} s: {opened - began:.0f} s to open files, "
                    f"{ready - opened:.0f} s to load weights and compile programs"
                )
            yield llm

    def _answer(self, llm: LLM, mode: str) -> None:
        """Streams the first answer in a pane, after an uncounted short one: first runs are slow."""
        prompt, metrics = self.prompts[0], {}
        with self._waiting("a first short answer, which loads what is left"):
            for _event in llm.run([llm.request(prompt.content, _WARM_UP)], mode):
                pass
        with AnswerPane(self.console, prompt.prompt or "") as pane:
            for event in llm.run([llm.request(prompt.content, self.params, prompt.index)], mode):
                pane.add(event.spans)
                if event.output is not None:
                    metrics = event.output.metrics
        histogram = metrics.get("acceptance_histogram") or []
        committed = [n for n, count in enumerate(histogram, start=1) for _ in range(count)]
        misses = sum((metrics.get("miss_causes") or {}).values())
        hits = _hits(metrics.get("hit_rate"), misses, len(committed))
        if committed:
            self._note(round_line(committed, hits, misses))
        self.console.print()

    def _predict(self, result: BenchResult, k: int) -> None:
        """Prints what the recorded rounds would give on accelerators."""
        rounds = {
            mode: RecordedRounds.from_metrics(
                (one.metrics for runs in result.runs_of(f"{mode} k={k}") for one in runs.results), k
            )
            for mode in ("sd", "ssd")
        }
        stored = stored_times()
        if not all(each.rounds for each in rounds.values()) or k > stored.k:
            return
        pair = f"{stored.target} with {stored.draft}"
        self.console.print(f"\npredicted for these rounds (K = {k}) of {pair}, tokens/s")
        self.console.print("at best, by programs as compiled; ssd's draft has one device more:")
        for chip, times in stored.chips.items():
            found = predict(times, rounds["sd"], rounds["ssd"], stored.branches)
            speeds = "".join(f"{mode} {found[mode]:4.0f}   " for mode in found)
            share = f"drafting is {times.drafting_share(k):.0%} of sd's time"
            self.console.print(f"  {f'{times.target_devices} {chip}':9}{speeds}{share}")

    def _variant(self, llm: LLM, mode: str, k: int | None = None) -> Variant:
        return lambda prompt: prompt_result(llm, prompt, self.params, mode, k)

    def _run(self, variants: Mapping[str, Variant]) -> BenchResult:
        """Runs all prompts in every mode, after an uncounted run of each: first runs are slow."""
        with self._waiting("measuring every mode"):
            return run_paired(variants, self.prompts, warmup=1, repeats=1)

    def _waiting(self, text: str) -> Status:
        """A line on the terminal while something runs."""
        return Console(stderr=True).status(text, spinner="line")

    def _note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=not self.console.is_terminal)


def _modes(ks: Sequence[int], most: int) -> dict[str, tuple[str, int | None]]:
    """(mode, K) of what is measured, by name: sd with every K, ssd with the largest one."""
    of_sd: dict[str, tuple[str, int | None]] = {f"sd k={k}": ("sd", k) for k in ks}
    return {"ar": ("ar", None), **of_sd, f"ssd k={most}": ("ssd", most)}


def _same_text(rows: Sequence[VariantSummary]) -> str:
    """Whether every mode gave the text of the first."""
    base, *others = rows
    answers = pluralize(base.prompts, "answer")
    if all(row.identical == row.prompts for row in others):
        return f"measured: {answers} in every mode, each the same text token for token"
    least = min(row.identical or 0 for row in others)
    return f"measured: {answers} in every mode, of which {least} have the same text in all"


def _hits(rate: float | None, misses: int, rounds: int) -> int:
    """Rounds that were a hit, by the share of hits among those with a look-up."""
    if not rate:
        return 0
    return round(misses * rate / (1 - rate)) if rate < 1 else rounds


def _described(resolved: Resolved) -> str:
    config, source = resolved.config, resolved.draft_source
    draft = "" if source is None else f", draft {short(source)}, k = {config.speculated}"
    return f"{short(config.target)} in {resolved.dtype}{draft}"


def _named(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {shown(cores)}"


def first_round(engine: EngineLanes, request: int) -> int | None:
    """The number of the first round of a request; None where there is none."""
    for number, each in enumerate(engine.rounds):
        if any(row["request"] == request for row in each.args["rows"]):
            return number
    return None


def _picture(trace: Path) -> str:
    """Draws the trace if possible; returns a line that says where to look."""
    from ssd_jax.tools.traces.picture import ROUNDS, choose, draw, window
    from ssd_jax.tools.traces.read import read_trace

    again = f"once more: ssd-jax demo --replay={trace}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"{again}; in a browser: ui.perfetto.dev"
    picture = trace.with_suffix(".png")
    try:
        engine = choose(read_trace(trace), None)
        first = first_round(engine, _SHOWN)
        draw(engine, window(engine, first, ROUNDS), picture)
    except InputError as error:
        return f"the trace is in {trace}, and was not drawn: {error}"
    return f"draft and target, round by round: {picture}\n{again}"
