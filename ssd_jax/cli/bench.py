"""`ssd-jax bench`: prompt sets in several modes, the cost of a forward, and other suites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from rich.console import Console

from ssd_jax.bench.perplexity import WINDOW, count_windows, read_text
from ssd_jax.bench.prompts import Prompt, load_prompts
from ssd_jax.bench.support import SUPPORTS
from ssd_jax.cli import settings, suites
from ssd_jax.cli.failed import failure
from ssd_jax.cli.loading import load, open_llm
from ssd_jax.config import MAX_K, MODES
from ssd_jax.environment import describe, headline
from ssd_jax.errors import InputError
from ssd_jax.runtime.request import SamplingParams

if TYPE_CHECKING:
    from ssd_jax.llm import LLM

_NOWHERE = dict.fromkeys(("draft_placement", "target_cores", "draft_cores"))
_OF = {
    "modes": ("prompts", "accounting"),
    "ks": ("prompts", "accounting"),
    "prompts": ("prompts", "accounting", "support"),
    "warmup": ("prompts", "accounting"),
    "repeats": ("prompts",),
    "step_repeats": ("step",),
    "supports": ("support",),
    "text": ("perplexity",),
    "window": ("perplexity",),
    "windows": ("perplexity",),
}
"""The suites that a flag is for, where it is not for all."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags()
    _define(values)
    given = dict(settings.parse(values, "bench", arguments))
    with settings.naming_file(given):
        ks = _check(given, {name: values[name].default for name in given})
    apart = given["suite"] == "accounting"  # its models run in processes of their own
    config = settings.config_of(given | _NOWHERE if apart else given)
    params = settings.params_of(given)
    with_prompts = given["suite"] in ("accounting", "prompts", "support")
    prompts = load_prompts(given["prompts"]) if with_prompts else []
    text = read_text(Path(given["text"])) if given["suite"] == "perplexity" else None
    with open_llm(config, ks=ks) as llm:
        _check_fits(llm, prompts, params)
        tokens = () if text is None else _tokens(llm, text, given)
        if given["suite"] == "overhead":
            suites.check_overhead(llm)
        if not apart:
            load(llm)
        environment = describe()
        given["budget"] = llm.config.budget  # as it holds where the draft is
        shown = {
            name: value
            for name, value in given.items()
            if name not in ("help", "h") and value != []
        }
        job = suites.Job(
            llm=llm,
            prompts=prompts,
            ks=ks,
            text=tokens,
            given=given,
            settings=shown,
            environment=environment,
        )
        found = suites.SUITES[given["suite"]](job)
        found.document["fallbacks"] = list(llm.fallbacks)
    console = Console(stderr=bool(given["json"]))
    console.print(headline(environment), style="dim", highlight=False)
    for line in found.document["fallbacks"]:
        console.print(line, style="dim", highlight=False)
    for table in found.tables:
        console.print(table)
    if given["json"]:
        print(json.dumps(found.document))
    if found.failures:
        raise failure(found.failures, found.runs, "runs")
    return 0


def _check(given: dict[str, Any], defaults: Mapping[str, Any]) -> list[int]:
    """Refuses flags that cannot be, or not in this suite; settles modes and returns the Ks."""
    suite = given["suite"]
    if suite not in suites.SUITES:
        raise InputError(f"suite = {suite!r} is unknown; one of {list(suites.SUITES)}")
    if given["trace"] is not None and suite not in ("prompts", "overhead", "support"):
        raise InputError(f"trace is for decoding; suite = {suite!r} does none; leave it out")
    settings.at_least(given, warmup=0, repeats=1, step_repeats=1, window=2, windows=1)
    ks = _ks(given)
    if suite == "accounting":
        given["modes"] = given["modes"] or ["ar", "sd", "ssd"]
    if suite == "support":
        _check_support(given)
    for name in _OF.keys() - settings.names_from_file(given):
        of, asked = _OF[name], given[name]
        if asked != defaults[name] and suite not in of:
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


def _check_fits(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    for prompt in prompts:
        try:
            llm.request(prompt.content, params)
        except InputError as error:
            raise InputError(f"prompt {prompt.set}:{prompt.index}: {error}") from None


def _tokens(llm: LLM, text: str, given: Mapping[str, Any]) -> Sequence[int]:
    """Tokens of the text to score, of which there is at least one window."""
    if given["window"] > llm.context:
        raise InputError(
            f"window = {given['window']} is more than the context of {llm.context}; lower one or "
            "raise the other"
        )
    tokens = llm.tokenizer.encode(text)
    count_windows(len(tokens), window=given["window"], windows=given["windows"])
    return tokens


def _check_accounting(given: Mapping[str, Any]) -> None:
    if set(given["modes"]) != {"ar", "sd", "ssd"}:
        raise InputError(
            f"modes = {','.join(given['modes'])!r}: suite = 'accounting' compares ar, sd and ssd"
        )
    if given["draft_placement"] not in (None, "auto", "process"):
        raise InputError(
            f"draft_placement = {given['draft_placement']!r}: suite = 'accounting' gives the draft "
            "a process of its own; leave it out"
        )
    suites.core_groups(given)


def _check_support(given: dict[str, Any]) -> None:
    if given["draft"] in (None, "ngram"):
        raise InputError("suite = 'support' compares a draft model's laws; give --draft=SOURCE")
    if not given["temperature"]:
        raise InputError(
            "temperature = 0.0: suite = 'support' is about sampled proposals, greedy ones have one "
            "token; give --temperature=1"
        )
    if given["draft_temperature"] == 0:
        raise InputError(
            "draft_temperature = 0.0: such a draft proposes one token, whatever N is; leave it out"
        )
    if given["verify"] == "coupled":
        raise InputError(
            "verify = 'coupled' proposes no laws; suite = 'support' is about --verify=ratio"
        )
    if given["modes"] or given["mode"] not in ("ar", "sd"):
        asked = given["modes"] or [given["mode"]]
        raise InputError(
            f"mode = {','.join(asked)!r}: suite = 'support' compares target and draft, in no mode; "
            "leave it out"
        )
    suites.numbers(given, "supports")
    given["mode"] = "sd"  # its draft is in this process


def _settle_modes(given: dict[str, Any]) -> None:
    """Modes to compare: as given, else the one of --mode, beside autoregressive as the base."""
    modes = given["modes"] or list(dict.fromkeys(("ar", given["mode"])))
    unknown = set(modes) - set(MODES)
    if unknown:
        raise InputError(f"modes = {','.join(modes)!r}: each is one of {list(MODES)}")
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


def _define(values: settings.Flags) -> None:
    flags.DEFINE_string(
        "suite", "prompts", f"what to measure: {', '.join(suites.SUITES)}", flag_values=values
    )
    flags.DEFINE_list(
        "modes", [], "decoding modes to compare; default: ar and --mode", flag_values=values
    )
    flags.DEFINE_list("ks", [], "values of K to compare; default: --k alone", flag_values=values)
    flags.DEFINE_string(
        "prompts",
        "mt_bench:4,humaneval:4,gsm8k:4",
        "prompt sets (name[:count], comma-separated) or a JSONL file",
        flag_values=values,
    )
    flags.DEFINE_integer("warmup", 1, "unrecorded prompts of each mode first", flag_values=values)
    flags.DEFINE_integer("repeats", 1, "passes over all prompts", flag_values=values)
    flags.DEFINE_integer("step_repeats", 30, "forwards of each width", flag_values=values)
    flags.DEFINE_list(
        "supports",
        [str(n) for n in SUPPORTS],
        "values of N of the support suite, beside the whole q",
        flag_values=values,
    )
    flags.DEFINE_string("text", None, "text file of the perplexity suite", flag_values=values)
    flags.DEFINE_integer("window", WINDOW, "tokens of a perplexity window", flag_values=values)
    flags.DEFINE_integer(
        "windows", None, "perplexity windows, from the start; default: all", flag_values=values
    )
    flags.DEFINE_boolean("json", False, "JSON on standard output, too", flag_values=values)
    values["max_tokens"].default = 128
    values["max_tokens"].unparse()
