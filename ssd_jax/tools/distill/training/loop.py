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
from ssd_jax.checkpoints.draft_checkpoint import identity_of
from ssd_jax.errors import InputError
from ssd_jax.tools.distill.settings import DraftSettings, TrainSettings, recorded
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
    State,
    StepReport,
    Teacher,
    Trainer,
    Untrained,
    load_live,
    mesh_of,
    schedule,
)

DRAFT, CHECKPOINTS = "draft", "checkpoints"
_REMEMBERED = 0.95
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
    there = jax.device_count()
    if settings.devices > there:
        raise InputError(
            f"devices = {settings.devices}, but there are {there}; set 0 for all of them"
        )
    rows, devices = settings.batch // settings.accumulation, settings.devices or there
    if rows % devices:
        raise InputError(
            f"batch / accumulation = {rows} rows do not spread evenly over {devices} devices; "
            "change batch or accumulation, or set devices"
        )


class Stop:
    """Whether to stop at the next step: a time limit, SIGTERM, Ctrl-C.

    Attributes:
      why: the reason in words, once a stop is asked for.
    """

    def __init__(self, max_seconds: float) -> None:
        self._deadline: float | None = None  # counts from the first question: one step is taken
        self._limit = max_seconds
        self.why = ""

    def asked(self) -> bool:
        """Whether something has asked to stop, or time is up."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + (self._limit or math.inf)
        if not self.why and now >= self._deadline:
            self.why = f"max_seconds = {self._limit:g} are over"
        return bool(self.why)

    @contextlib.contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Within, a signal asks to stop; the second one acts as it does elsewhere.

        Does nothing outside the main thread, where signals cannot be handled.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def take(number: int, _frame: object) -> None:
            self.why = self.why or signal.Signals(number).name
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in _SIGNALS:
            signal.signal(number, take)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Result(NamedTuple):
    """Where training stands.

    Attributes:
      stopped: why `step` is not the last one, in words; empty if it is.
      held_out: means at the last look at held-out text; empty without one.
      draft: directory of the draft checkpoint, as trained so far.
    """

    step: int
    stopped: str
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
    saved: Callable[[], None] | None = None,
) -> Result:
    """Trains a draft, from the last checkpoint in `work` if there is one.

    The run so far is a function of settings, target and samples, however often it was stopped:
    arrays, optimiser and metrics, to the bit on the same machine with as many devices.

    Args:
      target: opened; only the tensors that are needed are read.
      samples: texts, the same at each call; read once everything else is checked.
      work: gets `checkpoints/`, `metrics.jsonl` and `draft/`.
      progress: called after each step, with running means over training text.
      saved: called after each checkpoint.

    Raises:
      InputError: settings that do not fit the target or the texts, or with which the checkpoint was
        not made; a loss that is not finite.
    """
    stop = Stop(settings.max_seconds)
    check(settings, draft, target)
    tokenizer, seed = target.tokenizer, settings.seed
    where = f"training text for {work}"
    into_rows = functools.partial(pack, length=settings.length, seed=seed, where=where)
    texts, looked = list(samples), None
    if settings.held_out:
        tokens = settings.held_out * settings.length
        texts, aside = set_aside(texts, tokens=tokens, seed=seed, where=where)
        looked = into_rows(aside)
    packed = into_rows(texts)
    if settings.compares and not packed.width:
        raise InputError(
            f"{where}: no cached probabilities, which kl and acceptance need; generate with "
            'top_n above 0, set probabilities = "live", or train on cross_entropy alone'
        )
    ids = None
    if draft.output_size:
        always = tokenizer.eos_ids | tokenizer.special_ids
        ids = most_frequent(texts, count=draft.output_size, size=tokenizer.size, always=always)
    made = make_draft(draft, target.config, ids)
    identity = identity_of(target, made.tied)
    work.mkdir(parents=True, exist_ok=True)
    made_with = recorded("train", settings) | recorded("draft", draft)
    made_with |= {"texts": packed.digest(), "target": identity.sha256}
    begun = open_beginning(draft, target)
    if begun is not None and begun.digest:
        made_with["begin"] = begun.digest()
    checkpoints = Checkpoints(work / CHECKPOINTS, made_with=made_with, keep=settings.keep)
    teacher, theirs = Teacher(), []
    if settings.probabilities == "live":
        teacher, theirs = load_live(target, tokens=tokenizer.size, compute=settings.compute)
    trainer = Trainer(made, teacher, settings, mesh_of(settings.devices))
    trained, frozen = first_arrays(made, draft, target, seed=seed, begun=begun)
    state, first = trainer.first_state(trained), 0
    restored = checkpoints.restore(state)
    if restored is not None:
        state, first = trainer.everywhere(restored.state), restored.step
    journal = Journal(work / METRICS, step=-1 if restored is None else first)
    untrained = trainer.untrained(frozen, theirs)
    session = _Session(trainer, untrained, packed, looked, journal, progress)

    def save(step: int, state: State) -> None:
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.trained)):
            raise _diverged(step, "some weights are no numbers", work)
        checkpoints.save(step, state)
        if saved is not None:
            saved()

    with stop.heeding_signals():
        state, step = session.train(state, first, stop, save)
    export(
        work / DRAFT,
        made,
        state.trained,
        store=draft.store,
        target=identity,
        tokenizer=tokenizer,
        acceptance=journal.last_look().get("agreement"),
    )
    stopped = "" if step == settings.steps else stop.why
    return Result(step, stopped, journal.last_look(), work / DRAFT)


def _diverged(step: int, what: str, work: Path) -> InputError:
    return InputError(
        f"step {step}: {what}; lower learning_rate or raise warmup, and remove {work} to begin "
        "again"
    )


@dataclasses.dataclass
class _Session:
    """One call of `run`, from its first step on."""

    trainer: Trainer
    untrained: Untrained
    packed: PackedTexts
    looked: PackedTexts | None
    journal: Journal
    progress: ShowStep | None

    def __post_init__(self) -> None:
        self._settings = self.trainer.settings
        self._step, self._look = self.trainer.programs()
        # All at once: a rate computed when it is reported would wait for the step that runs.
        self._rates = np.asarray(schedule(self._settings)(np.arange(self._settings.steps)))
        self._known = self.trainer.teacher.live is not None or self.packed.width > 0
        self._held_out = self.journal.last_look().get("acceptance")
        self._tokens, self._since, self._began = 0, 0.0, 0
        self._weight, self._sums = 0.0, {"loss": 0.0, "acceptance": 0.0}  # of running means

    def train(
        self, state: State, first: int, stop: Stop, save: Callable[[int, State], None]
    ) -> tuple[State, int]:
        """Trains until the last step or a stop, and leaves a checkpoint there."""
        s = self._settings
        if self.progress is not None and first < s.steps:
            self.progress(first, s.steps, "compiling")
        if first == 0:
            self._look_at_held_out(state, 0)
        step = saved = first
        running: tuple[int, int, StepReport] | None = None  # dispatched, not read yet
        while step < s.steps and not stop.asked():
            rows = rows_of_step(len(self.packed), batch=s.batch, seed=s.seed, step=step)
            batch = self.packed.batch(rows)
            spread = self.trainer.spread(batch, micro_batches=s.accumulation)
            state, taken = self._step(state, self.untrained, spread)
            if running is not None:
                self._record(*running)  # while the next step runs
            step += 1
            running = (step, int(np.count_nonzero(batch.segments)), taken)
            looks, saves = (
                step % every == 0 or step == s.steps for every in (s.evaluate_every, s.save_every)
            )
            if looks or saves:
                self._record(*running)
                running = None
            if looks:
                self._look_at_held_out(state, step)
            if saves:
                save(step, state)
                saved = step
        if running is not None:
            self._record(*running)
        if saved < step:
            save(step, state)
        return state, step

    def _record(self, step: int, tokens: int, taken: StepReport) -> None:
        found, norm = means(taken.sums, known=self._known), float(taken.gradient_norm)
        if not math.isfinite(found["loss"] + norm):
            what = f"the loss is {found['loss']}, the gradient's norm {norm}"
            raise _diverged(step, what, self.journal.path.parent)
        now = time.monotonic()
        if self._since:  # the first step of a run compiles
            self._tokens += tokens
        else:
            self._since, self._began = now, step
        speed = self._tokens / (now - self._since) if now > self._since else 0.0
        self.journal.write(
            step=step,
            **found,
            gradient_norm=norm,
            learning_rate=float(self._rates[step - 1]),
            tokens=tokens,
            tokens_per_second=round(speed, 1),
        )
        self._weight = _REMEMBERED * self._weight + 1
        for name in self._sums:
            self._sums[name] = _REMEMBERED * self._sums[name] + found.get(name, 0.0)
        if self.progress is not None:
            done, steps = step - self._began, self._settings.steps
            seconds = (now - self._since) / done * (steps - step) if done else 0.0
            loss, acceptance = (each / self._weight for each in self._sums.values())
            line = f"loss {loss:.4f}"
            if self._known:
                line += f"  acceptance {acceptance:.3f}"
            if self._held_out is not None:
                line += f" (held-out {self._held_out:.3f})"
            left = datetime.timedelta(seconds=round(seconds))
            self.progress(step, steps, f"{line}  {speed:,.0f} tokens/s  {left} left")

    def _look_at_held_out(self, state: State, step: int) -> None:
        if self.looked is None:
            return
        size = math.lcm(self.trainer.mesh.size, self._settings.batch // self._settings.accumulation)
        total: Any = None
        for begin in range(0, len(self.looked), size):
            rows = [i if i < len(self.looked) else -1 for i in range(begin, begin + size)]
            sums = self._look(state, self.untrained, self.trainer.spread(self.looked.batch(rows)))
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        found = means(total, known=self._known)
        if not math.isfinite(found["loss"]):
            what = f"the loss of held-out text is {found['loss']}"
            raise _diverged(step, what, self.journal.path.parent)
        self._held_out = found.get("acceptance")
        self.journal.write(step=step, held_out=found)
