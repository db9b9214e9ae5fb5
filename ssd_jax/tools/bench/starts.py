"""`--suite=starts`: how near mode auto comes to the fastest mode, from a first start on.

Each start is a process of its own. The first knows no costs; the others find what those before
have stored. While every second one loads, the first among them, and until it has chosen, other work
keeps cores and memory busy. Then it runs each prompt in every mode.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.config.config import Config
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.system.cores import usable_cores
from ssd_jax.system.leaving import end_with_parent
from ssd_jax.tools.bench.accounting import PinnedModel
from ssd_jax.tools.bench.prompts import BenchPrompt
from ssd_jax.tools.bench.run import BenchResult, joined, run_paired
from ssd_jax.tools.bench.table import Column, Page, build_table

NEAR = 0.97
"""Share of the fastest mode's speed from which on a start counts as having chosen well."""

_COSTS = "costs"
_BLOCK = 64 * 2**20  # bytes, more than caches hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """One start of mode auto.

    Attributes:
      disturbed: whether other work ran while it loaded.
      taken: the mode that it chose.
      speeds: tokens per second by mode, of all its prompts together; None where nothing was timed.
      ratio: the speed of `taken` over that of the mode that was fastest over all starts.
    """

    disturbed: bool
    taken: str
    speeds: dict[str, float | None]
    ratio: float | None = None


def measure(
    config: Config,
    prompts: Sequence[BenchPrompt],
    *,
    starts: int,
    params: SamplingParams,
    progress: Progress = lambda done, total: None,
    start: Callable[..., PinnedModel] = PinnedModel,
) -> tuple[list[Start], BenchResult]:
    """Starts mode auto so many times, the first and every second time beside other work.

    Each mode first runs a prompt that does not count. What the starts store is deleted at the end.

    Args:
      config: of mode auto.
    """
    modes = ("ar", *dict.fromkeys(("sd", config.prepared)))
    made: list[tuple[bool, str, BenchResult]] = []
    with without_costs() as cache:
        for number in range(starts):
            disturbed = number % 2 == 0
            with closing(_loaded(start, config, params, cache, disturbed)) as model:
                taken = str(model.variant("auto", None)(prompts[0]).metrics["mode"])
                variants = {mode: model.variant(mode, None) for mode in modes}
                result = run_paired(variants, prompts, warmup=1, repeats=1)
            made.append((disturbed, taken, result))
            progress(number + 1, starts)
    together = joined([result for *_, result in made])
    fastest = max(modes, key=lambda mode: _speed(together, mode) or 0.0)
    found = []
    for disturbed, taken, result in made:
        speeds = {mode: _speed(result, mode) for mode in modes}
        speed, best = speeds[taken], speeds[fastest]
        ratio = speed / best if speed and best else None
        found.append(Start(disturbed=disturbed, taken=taken, speeds=speeds, ratio=ratio))
    return found, together


def _loaded(
    start: Callable[..., PinnedModel],
    config: Config,
    params: SamplingParams,
    cache: Path,
    disturbed: bool,
) -> PinnedModel:
    with _other_work(disturbed):
        model = start(config, params, cache=cache)
        try:
            model.wait_ready()
        except BaseException:
            model.close()
            raise
    return model


@contextmanager
def without_costs() -> Iterator[Path]:
    """A directory for `XDG_CACHE_HOME` with all that the user's has but measured costs."""
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = Path(directory) / "ssd_jax", cache_dir()
        ours.mkdir()
        for each in theirs.iterdir() if theirs.is_dir() else ():
            if each.name != _COSTS:
                (ours / each.name).symlink_to(each.absolute())
        yield Path(directory)


@contextmanager
def _other_work(runs: bool) -> Iterator[None]:
    """Keeps half of the cores busy, at least one."""
    context = multiprocessing.get_context("spawn")
    count = max(1, len(usable_cores()) // 2) if runs else 0
    processes = [context.Process(target=_work, daemon=True) for _ in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work() -> None:
    """Copies memory for ever."""
    end_with_parent()
    block = bytearray(_BLOCK)
    while True:
        block = bytearray(block)


def _speed(result: BenchResult, mode: str) -> float | None:
    """Tokens per second of all runs of a mode together, prefills left out."""
    gaps = [gap for runs in result.of(mode) for each in runs.results for gap in each.itl_ms]
    return 1e3 * len(gaps) / sum(gaps) if sum(gaps) else None


def starts_table(found: Sequence[Start]) -> Page:
    """A line for each start."""

    def speed(mode: str) -> Column[tuple[int, Start]]:
        return Column(mode, lambda row: _shown(row[1].speeds[mode], "{:.1f}"))

    columns: list[Column[tuple[int, Start]]] = [
        Column("start", lambda row: str(row[0] + 1), "left"),
        Column(
            "while it loaded", lambda row: "other work" if row[1].disturbed else "quiet", "left"
        ),
        Column("auto takes", lambda row: row[1].taken, "left"),
        *map(speed, found[0].speeds),
        Column("auto/fastest", lambda row: _shown(row[1].ratio, "{:.3f}x")),
    ]
    near = sum(each.ratio is not None and each.ratio >= NEAR for each in found)
    notes = [
        "tokens per second of all prompts together; the fastest mode is that over all starts",
        f"within {1 - NEAR:.0%} of it: {near} of {len(found)} starts",
    ]
    return build_table(columns, [*enumerate(found)], title="starts of mode auto", notes=notes)


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)
