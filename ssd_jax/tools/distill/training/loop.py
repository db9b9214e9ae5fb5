"""Training from a draft's first weights, or its last checkpoint, to the last step or a stop."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts.checkpoint import identity_of
from ssd_jax.errors import InputError
from ssd_jax.tools.distill.settings import DraftSettings, TrainSettings, determining_values
from ssd_jax.tools.distill.shards import Sample
from ssd_jax.tools.distill.training.checkpoints import Checkpoints
from ssd_jax.tools.distill.training.data import (
    PackedTexts,
    most_frequent,
    pack,
    rows_of_step,
    set_aside,
)
from ssd_jax.tools.distill.training.journal import METRICS, Journal, means
from ssd_jax.tools.distill.training.model import (
    draft_config,
    export,
    first_arrays,
    make_draft,
    open_beginning,
)
from ssd_jax.tools.distill.training.step import (
    FixedArrays,
    State,
    StepReport,
    Teacher,
    Trainer,
    load_live,
    mesh_of,
    schedule,
)

DRAFT, CHECKPOINTS = "draft", "checkpoints"
_MEAN_DECAY = 0.95
"""Share of a running mean that is kept at each step."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

ShowStep = Callable[[int, int, str], None]
"""Shows how far training is: steps done, steps in all, a text about them."""


def check(settings: TrainSettings, draft: DraftSettings, target: Checkpoint) -> None:
    """Refuses a draft that the target cannot have, and batches that the devices cannot share.

    It is called before any text is read.

    Raises:
      InputError: the value, what it may be, and what to change.
    """
    draft_config(draft, target.config)
    open_beginning(draft, target)
    tokenizer, size = target.tokenizer, draft.output_size
    if size > tokenizer.size:
        raise InputError(
            f"output_size = {size} is more than the {tokenizer.size} ids of the tokenizer; set 0 "
            "for all"
        )
    always = len(tokenizer.eos_ids | tokenizer.special_ids)
    if 0 < size < always:
        raise InputError(
            f"output_size = {size} has no room for the {always} special ids, which are always in "
            "it; raise it"
        )
    available = jax.device_count()
    if settings.devices > available:
        raise InputError(
            f"devices = {settings.devices}, but there are {available}; set 0 for all of them"
        )
    rows, devices = settings.batch // settings.accumulation, settings.devices or available
    if rows % devices:
        raise InputError(
            f"batch / accumulation = {rows} rows do not spread evenly over {devices} devices; "
            "change batch or accumulation, or set devices"
        )


class Stop:
    """Whether to stop at the next step: a time limit, SIGTERM, Ctrl-C.

    Attributes:
      reason: in words, once a stop is asked for.
    """

    def __init__(self, max_seconds: float) -> None:
        self._deadline: float | None = None  # counts from the first question: one step is taken
        self._limit = max_seconds
        self.reason = ""

    def is_requested(self) -> bool:
        """Whether something has asked to stop, or time is up."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + (self._limit or math.inf)
        if not self.reason and now >= self._deadline:
            self.reason = f"max_seconds = {self._limit:g} are over"
        return bool(self.reason)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Within, a signal asks to stop; the second one acts as it does elsewhere.

        Does nothing outside the main thread, where signals cannot be handled.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in _SIGNALS}

        def handle(number: int, _frame: object) -> None:
            self.reason = self.reason or signal.Signals(number).name
            for signal_number, handler in previous.items():
                signal.signal(signal_number, handler)

        for number in _SIGNALS:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class Result(NamedTuple):
    """Where training stands.

    Attributes:
      stop_reason: why `step` is not the last one, in words; empty if it is.
      held_out: means at the last look at held-out text; empty without one.
      draft: directory of the draft checkpoint, as trained so far.
    """

    step: int
    stop_reason: str
    held_out: dict[str, float]
    draft: Path


def run(
    settings: TrainSettings,
    draft: DraftSettings,
    *,
    target: Checkpoint,
    samples: Iterable[Sample],
    work: Path,
    progress: ShowStep | None = None,
    on_save: Callable[[], None] | None = None,
) -> Result:
    """Trains a draft, from the last checkpoint in `work` if there is one.

    The run so far is a function of settings, target and samples, however often it was stopped:
    arrays, optimiser and metrics, to the bit on the same machine with as many devices.

    Args:
      target: opened; only the tensors that are needed are read.
      samples: texts, the same at each call; read once everything else is checked.
      work: gets `checkpoints/`, `metrics.jsonl` and `draft/`.
      progress: called after each step, with running means over training text.
      on_save: called after each checkpoint.

    Raises:
      InputError: settings that do not fit the target or the texts, or with which the checkpoint was
        not made; a loss that is not finite.
    """
    stop = Stop(settings.max_seconds)
    check(settings, draft, target)
    tokenizer, seed = target.tokenizer, settings.seed
    label = f"training text for {work}"
    into_rows = functools.partial(pack, length=settings.length, seed=seed, label=label)
    texts, held_out = list(samples), None
    if settings.held_out:
        tokens = settings.held_out * settings.length
        texts, aside = set_aside(texts, tokens=tokens, seed=seed, label=label)
        held_out = into_rows(aside)
    packed = into_rows(texts)
    if settings.compares and not packed.width:
        raise InputError(
            f"{label}: no cached probabilities, which kl and acceptance need; generate with "
            'top_n above 0, set probabilities = "live", or train on cross_entropy alone'
        )
    ids = None
    if draft.output_size:
        always = tokenizer.eos_ids | tokenizer.special_ids
        ids = most_frequent(texts, count=draft.output_size, size=tokenizer.size, always=always)
    draft_model = make_draft(draft, target.config, ids)
    identity = identity_of(target, draft_model.tied)
    work.mkdir(parents=True, exist_ok=True)
    made_with = determining_values("train", settings) | determining_values("draft", draft)
    made_with |= {"texts": packed.digest(), "target": identity.sha256}
    beginning = open_beginning(draft, target)
    if beginning is not None and beginning.digest:
        made_with["begin"] = beginning.digest()
    checkpoints = Checkpoints(work / CHECKPOINTS, made_with=made_with, keep=settings.keep)
    teacher, target_parameters = Teacher(), []
    if settings.probabilities == "live":
        teacher, target_parameters = load_live(
            target, tokens=tokenizer.size, compute=settings.compute
        )
    trainer = Trainer(draft_model, teacher, settings, mesh_of(settings.devices))
    trained, frozen = first_arrays(draft_model, draft, target, seed=seed, beginning=beginning)
    state, first_step = trainer.first_state(trained), 0
    restored = checkpoints.restore(state)
    if restored is not None:
        state, first_step = trainer.everywhere(restored.state), restored.step
    journal = Journal(work / METRICS, step=-1 if restored is None else first_step)
    fixed = trainer.fixed_arrays(frozen, target_parameters)
    session = _Session(trainer, fixed, packed, held_out, journal, progress)

    def save(step: int, state: State) -> None:
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.trained)):
            raise _divergence_error(step, "some weights are no numbers", work)
        checkpoints.save(step, state)
        if on_save is not None:
            on_save()

    with stop.handle_signals():
        state, step = session.train(state, first_step, stop, save)
    export(
        work / DRAFT,
        draft_model,
        state.trained,
        store=draft.store,
        target=identity,
        tokenizer=tokenizer,
        acceptance=journal.last_look().get("agreement"),
    )
    stop_reason = "" if step == settings.steps else stop.reason
    return Result(step, stop_reason, journal.last_look(), work / DRAFT)


def _divergence_error(step: int, problem: str, work: Path) -> InputError:
    return InputError(
        f"step {step}: {problem}; lower learning_rate or raise warmup, and remove {work} to begin "
        "again"
    )


@dataclasses.dataclass
class _Session:
    """One call of `run`, from its first step on."""

    trainer: Trainer
    fixed: FixedArrays
    packed: PackedTexts
    held_out: PackedTexts | None
    journal: Journal
    progress: ShowStep | None

    def __post_init__(self) -> None:
        self._settings = self.trainer.settings
        self._step, self._measure = self.trainer.programs()
        # All at once: a rate computed when it is reported would wait for the step that runs.
        self._rates = np.asarray(schedule(self._settings)(np.arange(self._settings.steps)))
        self._has_target = self.trainer.teacher.live is not None or self.packed.width > 0
        self._held_out_acceptance = self.journal.last_look().get("acceptance")
        self._tokens, self._start_time, self._start_step = 0, 0.0, 0
        self._weight, self._sums = 0.0, {"loss": 0.0, "acceptance": 0.0}  # of running means

    def train(
        self, state: State, first_step: int, stop: Stop, save: Callable[[int, State], None]
    ) -> tuple[State, int]:
        """Trains until the last step or a stop, and leaves a checkpoint there."""
        s = self._settings
        if self.progress is not None and first_step < s.steps:
            self.progress(first_step, s.steps, "compiling")
        if first_step == 0:
            self._measure_held_out(state, 0)
        step = saved_step = first_step
        dispatched: tuple[int, int, StepReport] | None = None  # dispatched, not read yet
        while step < s.steps and not stop.is_requested():
            rows = rows_of_step(len(self.packed), batch=s.batch, seed=s.seed, step=step)
            batch = self.packed.batch(rows)
            spread = self.trainer.spread(batch, micro_batches=s.accumulation)
            state, report = self._step(state, self.fixed, spread)
            if dispatched is not None:
                self._record(*dispatched)  # while the next step runs
            step += 1
            dispatched = (step, int(np.count_nonzero(batch.segments)), report)
            looks, saves = (
                step % interval == 0 or step == s.steps
                for interval in (s.evaluate_every, s.save_every)
            )
            if looks or saves:
                self._record(*dispatched)
                dispatched = None
            if looks:
                self._measure_held_out(state, step)
            if saves:
                save(step, state)
                saved_step = step
        if dispatched is not None:
            self._record(*dispatched)
        if saved_step < step:
            save(step, state)
        return state, step

    def _record(self, step: int, tokens: int, report: StepReport) -> None:
        figures = means(report.sums, with_target=self._has_target)
        norm = float(report.gradient_norm)
        if not math.isfinite(figures["loss"] + norm):
            problem = f"the loss is {figures['loss']}, the gradient's norm {norm}"
            raise _divergence_error(step, problem, self.journal.path.parent)
        now = time.monotonic()
        if self._start_time:  # the first step of a run compiles
            self._tokens += tokens
        else:
            self._start_time, self._start_step = now, step
        speed = self._tokens / (now - self._start_time) if now > self._start_time else 0.0
        self.journal.write(
            step=step,
            **figures,
            gradient_norm=norm,
            learning_rate=float(self._rates[step - 1]),
            tokens=tokens,
            tokens_per_second=round(speed, 1),
        )
        self._weight = _MEAN_DECAY * self._weight + 1
        for name in self._sums:
            self._sums[name] = _MEAN_DECAY * self._sums[name] + figures.get(name, 0.0)
        if self.progress is not None:
            done, steps = step - self._start_step, self._settings.steps
            seconds = (now - self._start_time) / done * (steps - step) if done else 0.0
            loss, acceptance = (total / self._weight for total in self._sums.values())
            line = f"loss {loss:.4f}"
            if self._has_target:
                line += f"  acceptance {acceptance:.3f}"
            if self._held_out_acceptance is not None:
                line += f" (held-out {self._held_out_acceptance:.3f})"
            remaining = datetime.timedelta(seconds=round(seconds))
            self.progress(step, steps, f"{line}  {speed:,.0f} tokens/s  {remaining} left")

    def _measure_held_out(self, state: State, step: int) -> None:
        if self.held_out is None:
            return
        size = math.lcm(self.trainer.mesh.size, self._settings.batch // self._settings.accumulation)
        total: Any = None
        for begin in range(0, len(self.held_out), size):
            rows = [i if i < len(self.held_out) else -1 for i in range(begin, begin + size)]
            sums = self._measure(state, self.fixed, self.trainer.spread(self.held_out.batch(rows)))
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        figures = means(total, with_target=self._has_target)
        if not math.isfinite(figures["loss"]):
            problem = f"the loss of held-out text is {figures['loss']}"
            raise _divergence_error(step, problem, self.journal.path.parent)
        self._held_out_acceptance = figures.get("acceptance")
        self.journal.write(step=step, held_out=figures)
