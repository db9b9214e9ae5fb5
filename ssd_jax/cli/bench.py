"""`ssd-jax bench`: prompt sets in several modes, the cost of a forward, and other suites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ssd_jax.cli import settings, suites
from ssd_jax.cli.loading import failure, load, open_llm, params_of
from ssd_jax.config.settings import MAX_K, MODES
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.environment import describe, headline
from ssd_jax.system.files import MAX_TEXT, read_text
from ssd_jax.system.paths import user_path
from ssd_jax.tools.bench.perplexity import WINDOW, count_windows
from ssd_jax.tools.bench.prompts import BenchPrompt, load_prompts
from ssd_jax.tools.bench.step import WIDTHS

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM

_FLAGS: dict[str, tuple[str, Any, str] | tuple[str, Any, str, Sequence[str]]] = {
    "suite": ("str", "prompts", "what to measure", [*suites.SUITES]),
    "modes": ("list", [], "decoding modes to compare (default: ar and --mode)", MODES),
    "ks": ("list", [], "values of K to compare; default: --k alone"),
    "prompts": (
        "str",
        "mt_bench:4,humaneval:4,gsm8k:4",
        "prompt sets (name[:count], comma-separated) or a JSONL file",
    ),
    "warmup": ("int", 1, "warm-up prompts per mode, unrecorded"),
    "repeats": ("int", 1, "passes over all prompts"),
    "widths": (
        "list",
        list(map(str, WIDTHS)),
        "tokens per forward in the step suite, including 1",
    ),
    "step_repeats": ("int", 30, "forwards per width"),
    "text": ("str", None, "text file of the perplexity suite"),
    "window": ("int", WINDOW, "tokens per perplexity window"),
    "windows": ("int", None, "perplexity windows, from the start; default: all"),
    "json": ("bool", False, "JSON on standard output, too"),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS, max_tokens=128)
    options = dict(settings.parse(values, "bench", arguments))
    with settings.naming_file(options):
        ks = _check(options)
    suite = options["suite"]
    measure, flags = suites.SUITES[suite]
    config = settings.config_of(options)
    params = params_of(config, options, values)
    prompts = load_prompts(options["prompts"]) if "prompts" in flags else []
    text = None
    if "text" in flags:
        remedy = "give a text file in UTF-8 as --text"
        text = read_text(user_path(options["text"]), max_bytes=MAX_TEXT, remedy=remedy)
    with open_llm(config, ks=ks) as llm:
        _check_fits(llm, prompts, params)
        tokens = () if text is None else _tokens(llm, text, options)
        load(llm)
        environment = describe()
        if len(llm.resolved.budgets) > 1:
            options["budget"] = "auto"  # perhaps by the draft's placement alone
        job = suites.BenchJob(
            llm=llm,
            prompts=prompts,
            ks=ks,
            text=tokens,
            options=options,
            params=params,
            environment=environment,
        )
        suite_report = measure(job)
        suite_report.document["notices"] = list(llm.notices)
    console = Console(stderr=bool(options["json"]))
    console.print(headline(environment), style="dim", highlight=False)
    for index, table in enumerate(suite_report.tables):
        if index:
            console.print()
        console.print(table)
    if options["json"]:
        print(json.dumps(suite_report.document))
    if suite_report.failures:
        raise failure(suite_report.failures, suite_report.runs, "runs")
    return 0


def _check(options: dict[str, Any]) -> list[int]:
    """Refuses bad flags and those of other suites; settles the modes and returns the Ks."""
    suite = options["suite"]
    if suite not in suites.SUITES:
        raise InputError(f"suite = {suite!r} is unknown; one of {', '.join(suites.SUITES)}")
    if options["trace"] is not None and suite != "prompts":
        raise InputError(f"trace is for decoding; suite = {suite!r} does none; leave it out")
    if options["hosts"] is not None and suite != "prompts":
        raise InputError(
            f"hosts = {options['hosts']!r}: suite = {suite!r} runs programs by itself, and those "
            "of hosts only run together; leave it out, or use --suite=prompts"
        )
    settings.at_least(options, warmup=0, repeats=1, step_repeats=1, window=2, windows=1)
    ks = _ks(options)
    if suite == "step":
        _check_widths(options)
    for name in _FLAGS.keys() - settings.names_from_file(options):
        owner = next((owner for owner, spec in suites.SUITES.items() if name in spec.flags), suite)
        value = options[name]
        if owner != suite and value != _FLAGS[name][1]:
            value = ",".join(value) if isinstance(value, list) else value
            raise InputError(
                f"{name} = {value!r} is for --suite={owner}, and this is suite = {suite!r}; leave "
                "it out"
            )
    _set_modes(options)
    if suite == "perplexity" and options["text"] is None:
        raise InputError("suite = 'perplexity' needs a text; give --text=FILE")
    if ks and not {"sd", "ssd"} & {*options["modes"]}:
        raise InputError(
            f"ks = {','.join(options['ks'])!r}: no mode of {','.join(options['modes'])!r} proposes "
            "so many tokens; add sd or ssd to --modes, or leave it out"
        )
    if len(ks) == 1 and options["k"] is None:
        options["k"] = str(ks[0])
    return ks


def _check_fits(llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams) -> None:
    for prompt in prompts:
        try:
            llm.request(prompt.content, params)
        except InputError as error:
            raise InputError(f"prompt {prompt.set}:{prompt.index}: {error}") from None


def _tokens(llm: LLM, text: str, options: Mapping[str, Any]) -> Sequence[int]:
    """Tokens of the text to score, enough for at least one window."""
    if options["window"] > llm.context:
        raise InputError(
            f"window = {options['window']} is more than the context of {llm.context}; lower one or "
            "raise the other"
        )
    tokens = llm.tokenizer.encode(text)
    count_windows(len(tokens), window=options["window"], windows=options["windows"])
    return tokens


def _check_widths(options: Mapping[str, Any]) -> None:
    widths = suites.numbers(options, "widths")
    if 1 not in widths or not {*widths} <= {*WIDTHS} or len({*widths}) < len(widths):
        raise InputError(
            f"widths = {','.join(options['widths'])!r}: give different numbers from 1 to "
            f"{max(WIDTHS)}, 1 among them, which the others are compared with"
        )


def _set_modes(options: dict[str, Any]) -> None:
    """Sets the modes to compare: as given, else ar as the base and the one of --mode."""
    modes = options["modes"] or list(dict.fromkeys(("ar", options["mode"])))
    if set(modes) - set(MODES):
        raise InputError(f"modes = {','.join(modes)!r}: each is one of {', '.join(MODES)}")
    options["modes"] = modes
    options["mode"] = next((mode for mode in ("auto", "ssd", "sd") if mode in modes), "ar")


def _ks(options: Mapping[str, Any]) -> list[int]:
    try:
        ks = [int(k) for k in options["ks"]]
    except ValueError:
        ks = [0]
    if not all(1 <= k <= MAX_K for k in ks):
        raise InputError(f"ks = {','.join(options['ks'])!r}: each is 1 to {MAX_K}")
    return ks
