"""Loading a model with a progress bar on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd_jax.llm import LLM


def load_with_progress(llm: LLM) -> None:
    """Compiles programs and loads weights; shows a bar when standard error is a terminal."""
    if not sys.stderr.isatty():
        llm.load()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading weights, compiling", total=None)
        llm.load(progress=lambda done, total: bar.update(task, completed=done, total=total))
