"""`ssd-jax demo`: an answer by the origin of its words, then the mode that is fastest here."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ssd_jax.cli import settings
from ssd_jax.cli.loading import failure, loading_line, open_llm, params_of, progress_bar, short
from ssd_jax.config.config import Config
from ssd_jax.config.settings import SPECULATIVE
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir, compile_cache
from ssd_jax.system.cores import Cores, require_usable, shown
from ssd_jax.system.paths import user_path
from ssd_jax.tools.bench.prompts import BenchPrompt, load_prompts
from ssd_jax.tools.bench.report import VariantSummary, summarize
from ssd_jax.tools.bench.run import BenchResult, Variant, prompt_result, run_paired
from ssd_jax.tools.bench.table import pluralize
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
    "full": ("bool", False, "also show a table of every mode"),
    "replay": "play the answers in this file of --trace instead, without a model",
}
_SLOW_START = 20.0  # seconds; a longer one is explained
_FIRST_ANSWER = 1  # request of the pane, behind a first short one
_WARM_UP = SamplingParams(max_tokens=8, ignore_eos=True)


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS, max_tokens=128, mode=None)
    values["mode"].help = _MODE
    options = settings.parse(values, "demo", arguments)
    console = Console(highlight=False)
    if options["replay"] is not None:
        settings.require_used(values, "demo --replay", ("replay",))
        play(user_path(options["replay"]), console)
        return 0
    all_modes = options["mode"] is None and options["draft"] is None
    if all_modes:
        _refuse_settings_of_drafts(options)
    elif options["full"]:
        raise InputError("full: the table of every mode is for the demo's own draft; leave it out")
    mode = options["mode"] or ("ar" if all_modes else "sd")
    config = settings.config_of({**options, "mode": mode})
    prompt = options["prompt"]
    single = BenchPrompt(set="demo", index=0, prompt=prompt)
    demo = _Demo(
        prompts=load_prompts("demo") if prompt is None else [single],
        params=params_of(config, options, values),
        console=console,
    )
    if all_modes:
        dtype_set = values["dtype"].present or "dtype" in settings.names_from_file(options)
        result = demo.every_mode(config, any_dtype=not dtype_set, full=options["full"])
    else:
        result = demo.modes_of(config)
    if result.failures:
        raise failure(result.failures, len(result.runs), "answers")
    return 0


def _refuse_settings_of_drafts(options: Mapping[str, Any]) -> None:
    with settings.naming_file(options):
        for name in SPECULATIVE:
            if options[name] is not None:
                raise InputError(
                    f"{name} = {options[name]!r} is for a draft of yours; give --draft, too, or "
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
        with self._open(config) as llm:
            self._answer(llm, llm.mode)
            result = self._run({mode: self._variant(llm, mode) for mode in llm.modes})
            self.console.print(speed_table(summarize(result), title=_describe(llm.resolved)))
        return result

    def every_mode(self, config: Config, *, any_dtype: bool, full: bool) -> BenchResult:
        """Shows an answer of mode ssd, and the fastest mode here.

        Args:
          any_dtype: whether the demo may choose the dtype.
          full: whether to show a table of all modes.
        """
        import jax  # bad flags must not wait for it

        from ssd_jax.checkpoints.opening import open_checkpoint

        if (cores := Cores.parse(config.target_cores, None).target) is not None:
            require_usable("target_cores", cores)
        with progress_bar("downloading", unit="bytes") as progress:
            source = open_checkpoint(config.target, progress=progress)
        if any_dtype:
            config = dataclasses.replace(config, dtype=fitting_dtype(source, jax.default_backend()))
        cache_dir().mkdir(parents=True, exist_ok=True)
        demo_settings = choose_settings(config, source, cache_dir() / "demo-trace.json")
        config = demo_settings.config
        self._note(f"{short(config.target)} in {config.dtype}, with {demo_settings.draft}")
        modes = _modes(demo_settings.ks, config.speculated)
        with self._open(config, ks=demo_settings.ks) as llm:
            self._answer(llm, "ssd")
            variants = {name: self._variant(llm, mode, k) for name, (mode, k) in modes.items()}
            result = self._run(variants)
        rows = summarize(result)
        self._note(_same_text(rows))
        self.console.print(fastest_line(rows, config.dtype))
        if full:
            where = "" if cores is None else f", the target on core {shown(cores)}"
            self.console.print("", speed_table(rows, title=f"every mode{where}"))
        self.console.print()
        self._note(_picture(Path(config.trace or "")))
        if not full:
            self._note("every mode in a table: ssd-jax demo --full")
        return result

    @contextmanager
    def _open(self, config: Config, ks: Sequence[int] = ()) -> Iterator[LLM]:
        """Opens a model, and loads it once its prompts are known to fit."""
        start = time.monotonic()
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
            opened_at = time.monotonic()
            with loading_line() as (progress, status):
                llm.load(progress=progress, status=status)
            loaded_at = time.monotonic()
            if loaded_at - start > _SLOW_START:
                self._note(
                    f"ready after {loaded_at - start:.0f} s: {opened_at - start:.0f} s to open "
                    f"files, {loaded_at - opened_at:.0f} s to load weights and compile programs"
                )
            yield llm

    def _answer(self, llm: LLM, mode: str) -> None:
        """Streams the first answer in a pane, after an uncounted short one: first runs are slow."""
        prompt, metrics = self.prompts[0], {}
        with self._status("a first short answer, which loads what is left"):
            for _event in llm.run([llm.request(prompt.content, _WARM_UP)], mode):
                pass
        with AnswerPane(self.console, prompt.prompt or "") as pane:
            for event in llm.run([llm.request(prompt.content, self.params, prompt.index)], mode):
                pane.add(event.spans)
                if event.output is not None:
                    metrics = event.output.metrics
        histogram = metrics.get("acceptance_histogram") or []
        counts = [n for n, count in enumerate(histogram, start=1) for _ in range(count)]
        if counts:
            hits = sum(hit for hit, _ in metrics["hit_rate_by_k"] or ())
            self._note(round_line(counts, hits, sum((metrics["miss_causes"] or {}).values())))
        self.console.print()

    def _variant(self, llm: LLM, mode: str, k: int | None = None) -> Variant:
        return lambda prompt: prompt_result(llm, prompt, self.params, mode, k)

    def _run(self, variants: Mapping[str, Variant]) -> BenchResult:
        """Runs all prompts in every mode, after an uncounted run of each: first runs are slow."""
        with self._status("measuring every mode"):
            return run_paired(variants, self.prompts, warmup=1, repeats=1)

    def _status(self, text: str) -> Status:
        """A line on the terminal while something runs."""
        return Console(stderr=True).status(text, spinner="line")

    def _note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=not self.console.is_terminal)


def _modes(ks: Sequence[int], max_k: int) -> dict[str, tuple[str, int | None]]:
    """(mode, K) of what is measured, by name: sd with every K, ssd with the largest one."""
    sd_modes: dict[str, tuple[str, int | None]] = {f"sd k={k}": ("sd", k) for k in ks}
    return {"ar": ("ar", None), **sd_modes, f"ssd k={max_k}": ("ssd", max_k)}


def _same_text(rows: Sequence[VariantSummary]) -> str:
    """Whether every mode gave the text of the first."""
    base, *others = rows
    answers = pluralize(base.prompts, "answer")
    if all(row.identical == row.prompts for row in others):
        return f"measured: {answers} in every mode, each the same text token for token"
    least = min(row.identical or 0 for row in others)
    return f"measured: {answers} in every mode, of which {least} have the same text in all"


def _describe(resolved: Resolved) -> str:
    config, source = resolved.config, resolved.draft_source
    draft = "" if source is None else f", draft {short(source)}, k = {config.speculated}"
    return f"{short(config.target)} in {resolved.dtype}{draft}"


def first_round(engine: EngineLanes, request: int) -> int | None:
    """The number of the first round of a request; None where there is none."""
    for number, round_ in enumerate(engine.rounds):
        if any(row["request"] == request for row in round_.args["rows"]):
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
        first = first_round(engine, _FIRST_ANSWER)
        draw(engine, window(engine, first, ROUNDS), picture)
    except InputError as error:
        return f"the trace is in {trace}, and was not drawn: {error}"
    return f"draft and target, round by round: {picture}\n{again}"
