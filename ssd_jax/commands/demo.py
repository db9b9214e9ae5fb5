"""`ssd-jax demo`: one prompt in every mode, streamed, and a short table of what each cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from ssd_jax.bench.demo import SpeedRow, summary_table
from ssd_jax.commands import settings
from ssd_jax.commands.loading import load, open_llm
from ssd_jax.config import Config
from ssd_jax.runtime.request import RequestOutput, SamplingParams

_PROMPT = "Name three uses of a paperclip."


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags()
    flags.DEFINE_string("prompt", _PROMPT, "what to ask", flag_values=values)
    for name, default in (("max_tokens", 128), ("mode", "sd")):
        values[name].default = default
        values[name].unparse()
    given = dict(settings.parse(values, "demo", arguments))
    if given["mode"] == "sd" and given["draft"] is None:
        given["draft"] = "ngram"
    config, params = settings.config_of(given), settings.params_of(given)
    console = Console()
    console.print(f"[bold]{given['prompt']}[/bold]", highlight=False)
    llm = open_llm(config)
    load(llm)
    for mode in llm.modes:  # first runs of programs are slow
        llm.generate(given["prompt"], SamplingParams(max_tokens=2), mode=mode)
    outputs: list[tuple[str, RequestOutput]] = []
    for mode in llm.modes:
        name = _name(mode, config)
        console.print(f"\n[cyan]{name}[/cyan]", highlight=False)
        for event in llm.stream(given["prompt"], params, mode=mode):
            sys.stdout.write(event.text)
            sys.stdout.flush()
            if event.output is not None:
                outputs.append((name, event.output))
        console.print()
    rows = [_row(name, output, outputs[0][1]) for name, output in outputs]
    console.print()
    console.print(summary_table(rows, title=f"{len(outputs[0][1].token_ids)} tokens"))
    return 0


def _name(mode: str, config: Config) -> str:
    if mode == "ar":
        return f"ar ({config.dtype})"
    draft = "n-gram" if config.draft_model is None else config.draft_model
    return f"{mode} ({draft}, k={config.speculated})"


def _row(name: str, output: RequestOutput, base: RequestOutput) -> SpeedRow:
    speed, first = output.metrics["tokens_per_second"], base.metrics["tokens_per_second"]
    is_base = output is base
    return SpeedRow(
        mode=name,
        tokens_per_second=speed,
        ratio=None if is_base or not (speed and first) else speed / first,
        first_token_ms=output.metrics["ttft_ms"],
        acceptance_length=output.metrics["acceptance_length"],
        identical=None if is_base else output.token_ids == base.token_ids,
    )
