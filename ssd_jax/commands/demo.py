"""`ssd-jax demo`: one prompt, streamed, and a short table of what it cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from ssd_jax.bench.demo import SpeedRow, summary_table
from ssd_jax.commands import settings
from ssd_jax.commands.loading import load, open_llm
from ssd_jax.runtime.request import SamplingParams

_PROMPT = "Name three uses of a paperclip."


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags()
    flags.DEFINE_string("prompt", _PROMPT, "what to ask", flag_values=values)
    values["max_tokens"].default = 128
    values["max_tokens"].unparse()
    given = settings.parse(values, "demo", arguments)
    config, params = settings.config_of(given), settings.params_of(given)
    console = Console()
    console.print(f"[bold]{given['prompt']}[/bold]", highlight=False)
    llm = open_llm(config)
    load(llm)
    llm.generate(given["prompt"], SamplingParams(max_tokens=2))  # first runs of programs are slow
    for event in llm.stream(given["prompt"], params):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        if event.output is not None:
            metrics = event.output.metrics
            row = SpeedRow(
                mode=f"{config.mode} ({config.dtype})",
                tokens_per_second=metrics["tokens_per_second"],
                first_token_ms=metrics["ttft_ms"],
            )
            console.print("\n")
            console.print(summary_table([row], title=f"{len(event.output.token_ids)} tokens"))
    return 0
