"""`--suite=accounting`: what SSD gains, by two ways to count the hardware.

*Paper accounting*: the target has the same cores in all modes, and the draft of SSD has others.
*Equal hardware*: AR and SD have the cores of both. The two groups of cores swap roles halfway,
since they may differ, and each mode counts with its own best K.

Models run in processes of their own, each pinned before JAX starts, so that JAX has as many threads
as the process has cores.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.text import Text

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.config.config import Config
from ssd_jax.config.settings import MEANINGLESS
from ssd_jax.errors import InputError, SsdError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS
from ssd_jax.system import notices
from ssd_jax.system.cores import Cores, require_usable, shown, usable_cores
from ssd_jax.system.leaving import end_with_parent
from ssd_jax.tools.bench.prompts import BenchPrompt
from ssd_jax.tools.bench.report import speed_ratio, summarize
from ssd_jax.tools.bench.run import BenchResult, Variant, join_results, prompt_result, run_paired
from ssd_jax.tools.bench.stats import Estimate
from ssd_jax.tools.bench.table import Column, Page, build_table, estimate_cell


def core_groups(
    target_cores: str | None, draft_cores: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores of the two roles, as given; else halves of the usable cores.

    Raises:
      InputError: cores that overlap or cannot be used, or fewer than two.
    """
    cores = Cores.parse(target_cores, draft_cores)
    for name, role_cores in (("target_cores", cores.target), ("draft_cores", cores.draft)):
        if role_cores is not None:
            require_usable(name, role_cores)
    usable = usable_cores()
    if len(usable) < 2:
        raise InputError(
            f"suite = 'accounting' gives target and draft cores of their own, and there "
            f"{'is core ' + shown(usable) if usable else 'are none that can be set'}; use "
            "--suite=prompts"
        )
    if cores.target is None and cores.draft is None:
        half = sorted(usable)[: len(usable) // 2]
        return tuple(half), tuple(sorted(usable - {*half}))
    target = cores.target or tuple(sorted(usable - {*(cores.draft or ())}))
    draft = cores.draft or tuple(sorted(usable - {*target}))
    if not target or not draft:
        raise InputError(
            f"target_cores = {target_cores!r} and draft_cores = {draft_cores!r} "
            f"leave one of the two without cores; there are {shown(usable)}"
        )
    return target, draft


class PinnedModel:
    """An `LLM` in a process of its own, which ends with `close` or with this process.

    Args:
      config: its settings; `target_cores` says where it runs.
      ks: values of K to prepare besides the configured one.
      cache: its `XDG_CACHE_HOME`; None is this process's own.
    """

    def __init__(
        self,
        config: Config,
        params: SamplingParams,
        *,
        ks: Sequence[int] = (),
        cache: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_end = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(worker_end, config, params, tuple(ks), notices.logged_lines(), cache),
        )
        self._process.daemon = True
        self._process.start()
        worker_end.close()

    def wait_ready(self) -> None:
        """Waits until it is loaded.

        Raises:
          SsdError: it cannot be loaded.
        """
        notices.mark_logged(self._answer())

    def variant(self, mode: str, k: int | None) -> Variant:
        """A variant that runs prompts there in a mode of `LLM.engine_of`."""
        return lambda prompt: self._answer((prompt, mode, k))

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()

    def _answer(self, question: tuple[BenchPrompt, str, int | None] | None = None) -> Any:
        try:
            if question is not None:
                self._pipe.send(question)
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise SsdError(
                f"a measuring process ended with exit status {self._process.exitcode}; with "
                "several models in memory at once the machine may be too small"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(
    pipe: Connection,
    config: Config,
    params: SamplingParams,
    ks: tuple[int, ...],
    logged: tuple[str, ...],
    cache: Path | None,
) -> None:
    """Loads a model, and answers each (prompt, mode, K) with a result.

    The first answer is the notices said until it is loaded; an exception is an answer, too.
    """
    from ssd_jax.llm.llm import LLM

    if cache is not None:
        os.environ["XDG_CACHE_HOME"] = str(cache)
    notices.mark_logged(logged)
    end_with_parent()
    try:
        with LLM(config=config, ks=ks) as llm:
            pipe.send(notices.logged_lines())
            while True:
                prompt, mode, k = pipe.recv()
                pipe.send(prompt_result(llm, prompt, params, mode, k))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(error)


def measure(
    config: Config,
    prompts: Sequence[BenchPrompt],
    *,
    groups: tuple[tuple[int, ...], tuple[int, ...]],
    ks: tuple[int, ...],
    params: SamplingParams,
    warmup: int,
    progress: Progress = lambda done, total: None,
    start: Callable[..., PinnedModel] = PinnedModel,
) -> BenchResult:
    """Runs every prompt in every mode, once with the groups in each role.

    Args:
      config: of mode ssd; its K, placement and cores are set here.
      groups: two disjoint groups of processor cores.
      ks: values of K of sd and ssd.

    Raises:
      InputError: a model that cannot be loaded.
    """
    k, (first, second) = str(ks[0]), groups
    ssd = dataclasses.replace(config, draft_placement="process", k=k)
    sd = dataclasses.replace(config, mode="sd", k=k, **dict.fromkeys(MEANINGLESS["mode", "sd"]))
    cleared = dict.fromkeys(MEANINGLESS["draft", "ngram"])
    ngram_fields = cleared | {"draft": "ngram", "k": str(TEXT_DRAFTS["ngram"].k)}
    ngrams = dataclasses.replace(sd, **ngram_fields)

    def open_model(
        exit_stack: ExitStack, config: Config, target: Iterable[int], **cores: str
    ) -> PinnedModel:
        on_cores = dataclasses.replace(config, target_cores=shown(target), **cores)
        model = start(on_cores, params, ks=ks if config.draft_model else ())
        exit_stack.callback(model.close)
        model.wait_ready()  # one after the other: a model takes more memory while it loads
        return model

    halves = []
    with ExitStack() as stack:
        all_cores = open_model(stack, sd, (*first, *second))
        for target, draft in ((first, second), (second, first)):
            with ExitStack() as half_stack:
                split = open_model(half_stack, ssd, target, draft_cores=shown(draft))
                ngram_model = open_model(half_stack, ngrams, target)
                variants = {
                    "ar": split.variant("ar", None),
                    "n-gram": ngram_model.variant("sd", None),
                }
                variants |= {
                    f"{mode} k={k}": split.variant(mode, k) for mode in ("sd", "ssd") for k in ks
                }
                variants["ar, all cores"] = all_cores.variant("ar", None)
                variants |= {f"sd k={k}, all cores": all_cores.variant("sd", k) for k in ks}
                result = run_paired(variants, prompts, warmup=warmup, repeats=1, progress=progress)
                halves.append(result)
    return join_results(halves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of SSD by one way to count.

    Attributes:
      sd, ssd: the fastest variant of each mode.
      over_sd, over_ar: the speed of SSD against SD and AR, paired by prompt.
    """

    name: str
    sd: str
    ssd: str
    over_sd: Estimate | None
    over_ar: Estimate | None


def gains(result: BenchResult) -> list[Gain]:
    """What SSD gains by each way to count."""
    speeds = {summary.variant: summary.decode_tokens_per_second for summary in summarize(result)}

    def fastest(names: Sequence[str]) -> str:
        return max(names, key=lambda name: speed.value if (speed := speeds[name]) else 0.0)

    ssd = fastest([name for name in speeds if name.startswith("ssd ")])
    sds = [name for name in speeds if name.startswith("sd ")]
    equal = [name for name in sds if name.endswith(", all cores")]
    gains = []
    for name, ar, names in (
        ("paper accounting", "ar", [name for name in sds if name not in equal]),
        ("equal hardware", "ar, all cores", equal),
    ):
        sd = fastest(names)
        over_sd, over_ar = (speed_ratio(result, ssd, base) for base in (sd, ar))
        gains.append(Gain(name=name, sd=sd, ssd=ssd, over_sd=over_sd, over_ar=over_ar))
    return gains


def gains_table(gains: Sequence[Gain]) -> Page:
    """A line for each way to count."""
    columns: list[Column[Gain]] = [
        Column("", lambda row: Text(row.name, style="cyan"), "left"),
        Column("fastest sd", lambda row: row.sd, "left"),
        Column("fastest ssd", lambda row: row.ssd, "left"),
        Column("ssd/sd", lambda row: estimate_cell(row.over_sd, "{:.2f}x")),
        Column("ssd/ar", lambda row: estimate_cell(row.over_ar, "{:.2f}x")),
    ]
    notes = [
        "paper accounting: ar and sd have the target's cores, ssd those of the draft beside them",
        "equal hardware: ar and sd have all of them; each half of the runs swaps the groups",
    ]
    return build_table(columns, gains, title="what ssd gains", notes=notes)
