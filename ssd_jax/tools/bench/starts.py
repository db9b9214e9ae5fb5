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
from ssd_jax.tools.bench.run import BenchResult, join_results, run_paired
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
    records: list[tuple[bool, str, BenchResult]] = []
    with without_costs() as cache:
        for number in range(starts):
            is_disturbed = number % 2 == 0
            with closing(_load(start, config, params, cache, is_disturbed)) as model:
                taken = str(model.variant("auto", None)(prompts[0]).metrics["mode"])
                variants = {mode: model.variant(mode, None) for mode in modes}
                result = run_paired(variants, prompts, warmup=1, repeats=1)
            records.append((is_disturbed, taken, result))
            progress(number + 1, starts)
    all_results = join_results([result for *_, result in records])
    fastest = max(modes, key=lambda mode: _mode_speed(all_results, mode) or 0.0)
    results = []
    for is_disturbed, taken, result in records:
        speeds = {mode: _mode_speed(result, mode) for mode in modes}
        speed, best = speeds[taken], speeds[fastest]
        ratio = speed / best if speed and best else None
        results.append(Start(disturbed=is_disturbed, taken=taken, speeds=speeds, ratio=ratio))
    return results, all_results


def _load(
    start: Callable[..., PinnedModel],
    config: Config,
    params: SamplingParams,
    cache: Path,
    is_disturbed: bool,
) -> PinnedModel:
    with _other_work(is_disturbed):
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
        copy, user_cache = Path(directory) / "ssd_jax", cache_dir()
        copy.mkdir()
        for entry in user_cache.iterdir() if user_cache.is_dir() else ():
            if entry.name != _COSTS:
                (copy / entry.name).symlink_to(entry.absolute())
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


def _mode_speed(result: BenchResult, mode: str) -> float | None:
    """Tokens per second of all runs of a mode together, prefills left out."""
    gaps = [
        gap for runs in result.runs_of(mode) for repeat in runs.results for gap in repeat.itl_ms
    ]
    return 1e3 * len(gaps) / sum(gaps) if sum(gaps) else None


def starts_table(starts: Sequence[Start]) -> Page:
    """A line for each start."""

    def speed_column(mode: str) -> Column[tuple[int, Start]]:
        return Column(mode, lambda row: _cell(row[1].speeds[mode], "{:.1f}"))

    columns: list[Column[tuple[int, Start]]] = [
        Column("start", lambda row: str(row[0] + 1), "left"),
        Column(
            "while it loaded", lambda row: "other work" if row[1].disturbed else "quiet", "left"
        ),
        Column("auto takes", lambda row: row[1].taken, "left"),
        *map(speed_column, starts[0].speeds),
        Column("auto/fastest", lambda row: _cell(row[1].ratio, "{:.3f}x")),
    ]
    near = sum(start.ratio is not None and start.ratio >= NEAR for start in starts)
    notes = [
        "tokens per second of all prompts together; the fastest mode is that over all starts",
        f"within {1 - NEAR:.0%} of it: {near} of {len(starts)} starts",
    ]
    return build_table(columns, [*enumerate(starts)], title="starts of mode auto", notes=notes)


def _cell(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)
