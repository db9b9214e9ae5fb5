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
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS
from ssd_jax.system.environment import describe, headline
from ssd_jax.system.files import MAX_TEXT, read_text
from ssd_jax.system.paths import user_path
from ssd_jax.tools.bench.accounting import core_groups
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
    "starts": ("int", 10, "starts in the starts suite, every second one beside other work"),
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
_NOWHERE = dict.fromkeys(("draft_placement", "target_cores", "draft_cores"))


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS, max_tokens=128)
    given = dict(settings.parse(values, "bench", arguments))
    with settings.naming_file(given):
        ks = _check(given)
    suite = given["suite"]
    measure, flags = suites.SUITES[suite]
    apart = suite in ("accounting", "starts")  # their models run in processes of their own
    config = settings.config_of(given | _NOWHERE if suite == "accounting" else given)
    params = params_of(config, given, values)
    prompts = load_prompts(given["prompts"]) if "prompts" in flags else []
    text = None
    if "text" in flags:
        remedy = "give a text file in UTF-8 as --text"
        text = read_text(user_path(given["text"]), max_bytes=MAX_TEXT, remedy=remedy)
    with open_llm(config, ks=ks) as llm:
        _check_fits(llm, prompts, params)
        tokens = () if text is None else _tokens(llm, text, given)
        if not apart:
            load(llm)
        environment = describe()
        if len(llm.resolved.budgets) > 1:
            given["budget"] = "auto"  # perhaps by the draft's placement alone
        job = suites.BenchJob(
            llm=llm,
            prompts=prompts,
            ks=ks,
            text=tokens,
            given=given,
            params=params,
            environment=environment,
        )
        found = measure(job)
        found.document["notices"] = list(llm.notices)
    console = Console(stderr=bool(given["json"]))
    console.print(headline(environment), style="dim", highlight=False)
    for place, table in enumerate(found.tables):
        if place:
            console.print()
        console.print(table)
    if given["json"]:
        print(json.dumps(found.document))
    if found.failures:
        raise failure(found.failures, found.runs, "runs")
    return 0


def _check(given: dict[str, Any]) -> list[int]:
    """Refuses bad flags and those of other suites; settles the modes and returns the Ks."""
    suite = given["suite"]
    if suite not in suites.SUITES:
        raise InputError(f"suite = {suite!r} is unknown; one of {', '.join(suites.SUITES)}")
    if given["trace"] is not None and suite != "prompts":
        raise InputError(f"trace is for decoding; suite = {suite!r} does none; leave it out")
    if given["hosts"] is not None and suite != "prompts":
        raise InputError(
            f"hosts = {given['hosts']!r}: suite = {suite!r} runs programs by itself, and those of "
            "hosts only run together; leave it out, or use --suite=prompts"
        )
    settings.at_least(given, warmup=0, repeats=1, starts=1, step_repeats=1, window=2, windows=1)
    ks = _ks(given)
    if suite == "accounting":
        given["modes"] = given["modes"] or ["ar", "sd", "ssd"]
    if suite == "starts":
        _check_starts(given)
    if suite == "step":
        _check_widths(given)
    for name in _FLAGS.keys() - settings.names_from_file(given):
        of = [each for each, about in suites.SUITES.items() if name in about.flags]
        asked = given[name]
        if of and asked != _FLAGS[name][1] and suite not in of:
            asked = ",".join(asked) if isinstance(asked, list) else asked
            raise InputError(
                f"{name} = {asked!r} is for --suite={' and '.join(of)}, and this is "
                f"suite = {suite!r}; leave it out"
            )
    _settle_modes(given)
    if suite == "accounting":
        _check_accounting(given)
    if suite == "perplexity" and given["text"] is None:
        raise InputError("suite = 'perplexity' needs a text; give --text=FILE")
    if ks and not {"sd", "ssd"} & {*given["modes"]}:
        raise InputError(
            f"ks = {','.join(given['ks'])!r}: no mode of {','.join(given['modes'])!r} proposes so "
            "many tokens; add sd or ssd to --modes, or leave it out"
        )
    if len(ks) == 1 and given["k"] is None:
        given["k"] = str(ks[0])
    return ks


def _check_fits(llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams) -> None:
    for prompt in prompts:
        try:
            llm.request(prompt.content, params)
        except InputError as error:
            raise InputError(f"prompt {prompt.set}:{prompt.index}: {error}") from None


def _tokens(llm: LLM, text: str, given: Mapping[str, Any]) -> Sequence[int]:
    """Tokens of the text to score, enough for at least one window."""
    if given["window"] > llm.context:
        raise InputError(
            f"window = {given['window']} is more than the context of {llm.context}; lower one or "
            "raise the other"
        )
    tokens = llm.tokenizer.encode(text)
    count_windows(len(tokens), window=given["window"], windows=given["windows"])
    return tokens


def _check_accounting(given: Mapping[str, Any]) -> None:
    if given["draft"] is None or given["draft"] in TEXT_DRAFTS:
        raise InputError(
            "suite = 'accounting' compares ssd, whose draft is a model, with n-grams beside it; "
            "give --draft=SOURCE"
        )
    if set(given["modes"]) != {"ar", "sd", "ssd"}:
        raise InputError(
            f"modes = {','.join(given['modes'])!r}: suite = 'accounting' compares ar, sd and ssd"
        )
    if given["draft_placement"] not in (None, "auto", "process"):
        raise InputError(
            f"draft_placement = {given['draft_placement']!r}: suite = 'accounting' gives the draft "
            "a process of its own; leave it out"
        )
    if given["k"] == "auto":
        raise InputError(
            "k = 'auto': suite = 'accounting' takes each mode's fastest K; give numbers as --ks"
        )
    core_groups(given["target_cores"], given["draft_cores"])


def _check_starts(given: dict[str, Any]) -> None:
    if given["mode"] not in ("ar", "auto"):
        raise InputError(
            f"mode = {given['mode']!r}: suite = 'starts' compares the choice of mode auto with "
            "every mode; leave it out"
        )
    if given["compile_cache"] not in (None, "auto", "off"):
        raise InputError(
            f"compile_cache = {given['compile_cache']!r}: suite = 'starts' measures costs anew "
            "beside the default cache of programs; leave it out"
        )
    given["mode"] = "auto"


def _check_widths(given: Mapping[str, Any]) -> None:
    widths = suites.numbers(given, "widths")
    if 1 not in widths or not {*widths} <= {*WIDTHS} or len({*widths}) < len(widths):
        raise InputError(
            f"widths = {','.join(given['widths'])!r}: give different numbers from 1 to "
            f"{max(WIDTHS)}, 1 among them, which the others are compared with"
        )


def _settle_modes(given: dict[str, Any]) -> None:
    """Sets the modes to compare: as given, else ar as the base and the one of --mode."""
    modes = given["modes"] or list(dict.fromkeys(("ar", given["mode"])))
    if set(modes) - set(MODES):
        raise InputError(f"modes = {','.join(modes)!r}: each is one of {', '.join(MODES)}")
    given["modes"] = modes
    given["mode"] = next((mode for mode in ("auto", "ssd", "sd") if mode in modes), "ar")


def _ks(given: Mapping[str, Any]) -> list[int]:
    try:
        ks = [int(k) for k in given["ks"]]
    except ValueError:
        ks = [0]
    if not all(1 <= k <= MAX_K for k in ks):
        raise InputError(f"ks = {','.join(given['ks'])!r}: each is 1 to {MAX_K}")
    return ks
