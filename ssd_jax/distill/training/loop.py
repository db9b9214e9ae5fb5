"""Training from a draft's first weights, or its last checkpoint, to the last step or a stop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ssd_jax.checkpoints.draft_checkpoint import Identity, Target, identity_of
from ssd_jax.distill.settings import DraftSettings, TrainSettings, recorded
from ssd_jax.distill.training.checkpoints import Checkpoints
from ssd_jax.distill.training.data import (
    Packed,
    TrainingText,
    check_output_size,
    most_frequent,
    pack,
    rows_of_step,
    set_aside,
)
from ssd_jax.distill.training.journal import METRICS, Journal, StepReport, means, read_journal
from ssd_jax.distill.training.model import draft_config, export, first_arrays, make_draft
from ssd_jax.distill.training.step import (
    State,
    Taken,
    Teacher,
    Trainer,
    Untrained,
    load_live,
    mesh_of,
    schedule,
)
from ssd_jax.errors import InputError


def check(settings: TrainSettings, draft: DraftSettings, target: Target) -> None:
    """Refuses a draft that the target cannot have, and batches that the devices cannot share.

    Raises:
      InputError: the value, what it may be, and what to change.
    """
    draft_config(draft, target.checkpoint.config)
    tokenizer = target.tokenizer
    if draft.output_size:
        always = tokenizer.eos_ids | tokenizer.special_ids
        check_output_size(draft.output_size, size=tokenizer.size, always=always)
    _check_batch(settings, min(settings.devices or jax.device_count(), jax.device_count()))


def check_probabilities(settings: TrainSettings, packed: Packed, where: str) -> None:
    """Refuses texts without the probabilities that the losses need.

    Raises:
      InputError: there are none; `where` names the texts.
    """
    if settings.compares and not packed.width:
        raise InputError(
            f"{where}: no cached probabilities, which kl and acceptance need; generate with "
            'top_n above 0, set probabilities = "live", or train on cross_entropy alone'
        )


def _check_batch(settings: TrainSettings, devices: int) -> None:
    if settings.devices > devices:
        raise InputError(
            f"devices = {settings.devices}, but there are {devices}; set 0 for all of them"
        )
    micro = settings.batch // settings.accumulation
    if micro % devices:
        raise InputError(
            f"batch / accumulation = {micro} rows do not spread evenly over {devices} devices; "
            "change batch or accumulation, or set devices"
        )


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether to stop at the next step.

    Attributes:
      why: in words, once it is asked for.
    """

    def __init__(self, max_seconds: float) -> None:
        self._deadline = time.monotonic() + max_seconds if max_seconds else float("inf")
        self._limit = max_seconds
        self.why = ""

    def ask(self, why: str) -> None:
        """Asks to stop at the next step."""
        self.why = self.why or why

    def asked(self) -> bool:
        """Whether something has asked to stop, or time is up."""
        if time.monotonic() >= self._deadline:
            self.ask(f"max_seconds = {self._limit:g} are over")
        return bool(self.why)


@contextlib.contextmanager
def stop_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask to stop; the second one acts as it does elsewhere.

    Does nothing outside the main thread, where signals cannot be taken.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def take(number: int, _frame: object) -> None:
        stop.ask(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for number in _SIGNALS:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


DRAFT, CHECKPOINTS = "draft", "checkpoints"
_REMEMBERED = 0.95
"""Share of a running mean that stays at each step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Where training stands.

    Attributes:
      step: steps done.
      finished: whether those are all.
      stopped: why not, in words.
      held_out: means at the last look at held-out text; empty without one.
      draft: directory of the draft checkpoint, as trained so far.
    """

    step: int
    finished: bool
    stopped: str
    held_out: dict[str, float]
    draft: Path


def run(
    settings: TrainSettings,
    draft: DraftSettings,
    *,
    target: Target,
    samples: Iterable[TrainingText],
    work: Path,
    progress: Callable[[StepReport], None] | None = None,
    stop: Stop | None = None,
    saved: Callable[[], None] | None = None,
) -> Result:
    """Trains a draft, from the last checkpoint in `work` if there is one.

    The run so far is a function of settings, target and samples, however often it was stopped:
    arrays, optimiser and metrics, to the bit on the same machine with as many devices.

    Args:
      settings, draft: sections of a configuration.
      target: opened; only the tensors that are needed are read.
      samples: texts, the same at each call; read once everything else is checked.
      work: gets `checkpoints/`, `metrics.jsonl` and `draft/`.
      progress: called after each step.
      stop: asks to stop; by default `settings.max_seconds` and signals do.
      saved: called after each checkpoint.

    Raises:
      InputError: settings that do not fit the target or the texts, or with which the checkpoint was
        not made; a loss that is not finite.
    """
    stop = Stop(settings.max_seconds) if stop is None else stop
    check(settings, draft, target)
    mesh = mesh_of(settings.devices)
    where = f"training text for {work}"
    texts, aside = list(samples), []
    if settings.held_out:
        tokens = settings.held_out * settings.length
        texts, aside = set_aside(texts, tokens=tokens, seed=settings.seed, where=where)
    packed = pack(texts, length=settings.length, seed=settings.seed, where=where)
    looked = pack(aside, length=settings.length, seed=settings.seed, where=where) if aside else None
    check_probabilities(settings, packed, where)
    tokenizer, ids = target.tokenizer, None
    if draft.output_size:
        always = tokenizer.eos_ids | tokenizer.special_ids
        ids = most_frequent(texts, count=draft.output_size, size=tokenizer.size, always=always)
    made = make_draft(draft, target.checkpoint.config, ids)
    identity = identity_of(target, made.tied)
    work.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(
        work / CHECKPOINTS,
        made_with=_made_with(settings, draft, packed, identity),
        keep=settings.keep,
    )
    teacher, theirs = Teacher(), []
    if settings.probabilities == "live":
        teacher, theirs = load_live(
            target.checkpoint, tokens=tokenizer.size, compute=settings.compute
        )
    trainer = Trainer(made, teacher, settings, mesh)
    trained, frozen = first_arrays(made, draft, target.checkpoint, seed=settings.seed)
    state, first = trainer.first_state(trained), 0
    restored = checkpoints.restore(state)
    if restored is not None:
        state, first = trainer.everywhere(restored.state), restored.step
    session = _Session(
        trainer,
        trainer.fixed(frozen, theirs),
        packed,
        looked,
        checkpoints,
        Journal(work / METRICS, step=-1 if restored is None else first),
        progress,
        saved,
    )
    with stop_signals(stop):
        state, step = session.train(state, first, stop)
    arrays = {name: np.asarray(array) for name, array in state.trained.items()}
    export(
        work / DRAFT,
        made,
        arrays,
        store=draft.store,
        target=identity,
        tokenizer=target.tokenizer,
    )
    looks = _looks(read_journal(work / METRICS))
    return Result(
        step=step,
        finished=step == settings.steps,
        stopped="" if step == settings.steps else stop.why,
        held_out=looks[-1] if looks else {},
        draft=work / DRAFT,
    )


@dataclasses.dataclass
class _Session:
    """One call of `run`, from its first step on."""

    trainer: Trainer
    fixed: Untrained
    packed: Packed
    looked: Packed | None
    checkpoints: Checkpoints
    journal: Journal
    progress: Callable[[StepReport], None] | None
    saved: Callable[[], None] | None

    def __post_init__(self) -> None:
        self._settings = self.trainer.settings
        self._step, self._look = self.trainer.programs()
        # All at once: a rate computed when it is reported would wait for the step that runs.
        self._rates = np.asarray(schedule(self._settings)(np.arange(self._settings.steps)))
        self._loss, self._acceptance = _RunningMean(), _RunningMean()
        self._known = self.trainer.teacher.live is not None or self.packed.width > 0
        looks = _looks(self.journal.entries())
        self._held_out = looks[-1].get("acceptance") if looks else None
        self._tokens, self._since, self._began = 0, 0.0, 0

    def train(self, state: State, first: int, stop: Stop) -> tuple[State, int]:
        """Steps until the last one or a stop, where it leaves a checkpoint."""
        s = self._settings
        if first == 0:
            self._look_at_held_out(state, 0)
        self._began, step, saved = first, first, first
        running: tuple[int, int, Taken] | None = None  # dispatched, not read yet
        while step < s.steps and not stop.asked():
            batch = self.packed.batch(
                rows_of_step(len(self.packed), batch=s.batch, seed=s.seed, step=step)
            )
            spread = self.trainer.spread(batch, micro_batches=s.accumulation)
            state, taken = self._step(state, self.fixed, spread)
            if running is not None:
                self._record(*running)  # while the next step runs
            step += 1
            running = (step, int(np.count_nonzero(batch.segments)), taken)
            looks = step % s.evaluate_every == 0 or step == s.steps
            saves = step % s.save_every == 0 or step == s.steps
            if looks or saves:
                self._record(*running)
                running = None
            if looks:
                self._look_at_held_out(state, step)
            if saves:
                self._save(step, state)
                saved = step
        if running is not None:
            self._record(*running)
        if saved < step:
            self._save(step, state)
        return state, step

    def _save(self, step: int, state: State) -> None:
        self.checkpoints.save(step, state)
        if self.saved is not None:
            self.saved()

    def _record(self, step: int, tokens: int, taken: Taken) -> None:
        found = means(taken.sums, known=self._known)
        if not math.isfinite(found["loss"] + float(taken.gradient_norm)):
            raise InputError(
                f"step {step}: the loss is {found['loss']}, the gradient's norm "
                f"{float(taken.gradient_norm)}; lower learning_rate or raise warmup, and remove "
                "the checkpoints if it happens again"
            )
        now = time.monotonic()
        if self._since:  # the first step of a run compiles
            self._tokens += tokens
        else:
            self._since, self._began = now, step
        speed = self._tokens / (now - self._since) if now > self._since else 0.0
        self.journal.write(
            step=step,
            **found,
            gradient_norm=float(taken.gradient_norm),
            learning_rate=float(self._rates[step - 1]),
            tokens=tokens,
            tokens_per_second=round(speed, 1),
        )
        self._loss.add(found["loss"])
        if self._known:
            self._acceptance.add(found["acceptance"])
        if self.progress is not None:
            done, left = step - self._began, self._settings.steps - step
            self.progress(
                StepReport(
                    step=step,
                    steps=self._settings.steps,
                    loss=self._loss.value,
                    acceptance=self._acceptance.value if self._known else None,
                    held_out=self._held_out,
                    tokens_per_second=speed,
                    seconds_left=(now - self._since) / done * left if done else 0.0,
                )
            )

    def _look_at_held_out(self, state: State, step: int) -> None:
        if self.looked is None:
            return
        size = math.lcm(self.trainer.mesh.size, self._settings.batch // self._settings.accumulation)
        total: Any = None
        for begin in range(0, len(self.looked), size):
            rows = [i if i < len(self.looked) else -1 for i in range(begin, begin + size)]
            sums = self._look(state, self.fixed, self.trainer.spread(self.looked.batch(rows)))
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        found = means(total, known=self._known)
        self._held_out = found.get("acceptance")
        self.journal.write(step=step, held_out=found)


def _looks(entries: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    return [entry["held_out"] for entry in entries if "held_out" in entry]


class _RunningMean:
    """A mean in which older values count less."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = _REMEMBERED * self._sum + value
        self._weight = _REMEMBERED * self._weight + 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight


def _made_with(
    settings: TrainSettings, draft: DraftSettings, packed: Packed, target: Identity
) -> dict[str, Any]:
    """Everything that decides what is trained."""
    return {
        **recorded("train", settings),
        **recorded("draft", draft),
        "texts": packed.digest(),
        "target": target.sha256,
    }
