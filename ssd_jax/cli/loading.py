"""Shared by several commands: opens and loads models, shows progress, reports failures."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.cli import settings
from ssd_jax.config.config import Config
from ssd_jax.errors import SsdError
from ssd_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM
    from ssd_jax.loading.load import Status

SECONDS_BETWEEN_LINES = 30.0

ProgressLine = Callable[..., None]
"""A `Progress` that also takes a text."""


def open_llm(config: Config, *, ks: Sequence[int] = ()) -> LLM:
    """Opens models and tokenizers, downloading them if needed; weights are not loaded yet.

    `ks` are values of K to prepare besides the configured one.
    """
    from ssd_jax.llm.llm import LLM  # bad flags must not wait for JAX

    with progress_bar("downloading", unit="bytes") as progress:
        return LLM(config=config, load=False, ks=ks, progress=progress)


def params_of(config: Config, options: Mapping[str, Any], values: settings.Flags) -> SamplingParams:
    """The sampling parameters from parsed flags.

    With generation_config = auto, those not given are the checkpoint's, and a line says so. A seed
    of None is drawn here, once for all requests, so that commands can repeat them; a line says it.

    Raises:
      InputError: impossible settings, or a checkpoint that cannot be read.
    """
    params = settings.params_of(options)
    if params.seed is None:
        params = dataclasses.replace(params, seed=secrets.randbits(64))
        print(f"seed = {params.seed}", file=sys.stderr)
    if config.generation_config == "none":
        return params
    from ssd_jax.checkpoints.opening import open_checkpoint
    from ssd_jax.llm.prompting import default_params, given_settings, sampling_line

    with progress_bar("downloading", unit="bytes") as progress:
        checkpoint = open_checkpoint(config.target, progress=progress)
    checkpoint_settings = given_settings(default_params("auto", checkpoint))
    defaults = {
        name: value for name, value in checkpoint_settings.items() if not values[name].present
    }
    print(sampling_line(defaults), file=sys.stderr)
    return dataclasses.replace(params, **defaults)


def load(llm: LLM) -> None:
    """Compiles programs and loads weights; prints the chosen placement and mode, if any."""
    if llm.placement.why is not None:
        print(llm.placement, file=sys.stderr)
    with loading_line() as (progress, status):
        llm.load(progress=progress, status=status)
    if llm.choice is not None:
        print(llm.choice, file=sys.stderr)


def short(source: str) -> str:
    """A model's source, or the last part of the path if it is one that exists."""
    path = Path(source)
    return path.name or source if path.exists() else source


def failure(names: Sequence[str], runs: int, noun: str) -> SsdError:
    """The error of a command some of whose requests ended with finish_reason `error`.

    `names` are those of the failed requests, `noun` is the plural noun for all of them.
    """
    first_names = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return SsdError(
        f"{len(names)} of {runs} {noun} ended with finish_reason error ({first_names}): their text "
        "is incomplete, run them again"
    )


@contextlib.contextmanager
def progress_bar(label: str, *, unit: str) -> Iterator[ProgressLine]:
    """A bar that appears with the first report of (done, total) and disappears at the end.

    A report may also have a text, which is shown behind the bar. Tokens are shown with their speed
    and the time left. If standard error is not a terminal, a line is printed every half minute.
    """
    if not sys.stderr.isatty():
        yield _lines(label, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), count]
    if unit == "tokens":
        columns += [TextColumn("{task.speed:.0f} tokens/s"), TimeRemainingColumn()]
    columns.append(TextColumn("{task.fields[text]}"))
    with Bars(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None, visible=False, text="")
        yield lambda done, total, text="": bar.update(
            task, completed=done, total=total, visible=True, text=text
        )


@contextlib.contextmanager
def loading_line() -> Iterator[tuple[Progress, Status]]:
    """A line with the progress of weights and programs, which disappears at the end.

    If standard error is not a terminal, such a line is printed every half minute.
    """
    parts = {"weights": "", "doing": "starting"}
    with _bar_line() if sys.stderr.isatty() else _repeated_line() as print_line:

        def show(**changes: str) -> None:
            parts.update(changes)
            print_line(", ".join(filter(None, parts.values())))

        def progress(done: int, total: int) -> None:
            weights = f"weights {done / 1e6:.0f} of {total / 1e6:.0f} MB"
            show(weights=weights if done < total else "")

        yield progress, lambda line: show(doing=line)


@contextlib.contextmanager
def _bar_line() -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TextColumn, TimeElapsedColumn
    from rich.table import Column

    description = TextColumn(
        "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
    )
    with Bars(
        TimeElapsedColumn(), description, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda line: bar.update(task, description=line)


@contextlib.contextmanager
def _repeated_line() -> Iterator[Callable[[str], None]]:
    """Prints the newest line every half minute: one program may compile for minutes."""
    newest, stop = deque(["starting"], maxlen=1), threading.Event()

    def print_newest() -> None:
        while not stop.wait(SECONDS_BETWEEN_LINES):
            print(f"loading: {newest[0]}", file=sys.stderr, flush=True)

    printer = threading.Thread(target=print_newest, daemon=True)
    printer.start()
    try:
        yield newest.append
    finally:
        stop.set()
        printer.join()


def _lines(label: str, unit: str) -> ProgressLine:
    start = last_time = time.monotonic()

    def progress(done: int, total: int, text: str = "") -> None:
        nonlocal last_time
        now = time.monotonic()
        if now - last_time >= SECONDS_BETWEEN_LINES:
            last_time = now
            line = f"{label}: {done} of {total} {unit}" + (f", {text}" if text else "")
            if unit == "tokens" and done:
                speed = done / (now - start)
                line += f", {speed:.0f} tokens/s, {(total - done) / speed / 60:.0f} minutes left"
            print(line, file=sys.stderr, flush=True)

    return progress
