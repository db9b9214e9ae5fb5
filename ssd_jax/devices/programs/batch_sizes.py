"""Which batch sizes rounds run with, so that one request does not pay for all slots.

A program of batch size b runs the first b slots alone. Requests take the lowest free slot, so a
round whose highest row is in slot b - 1 needs no more. `first_rows` has how such a program is made
from that of all slots.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ssd_jax.system.forks import only_in_owner

_LOG = logging.getLogger(__name__)
PATIENCE = 5.0
"""Seconds of rounds that a smaller size would have served, before it is compiled: less is not
worth it."""
_LONGEST_ROUND = 0.25  # seconds that count of the time between two rounds
TRIALS = 3
"""Rounds in which a size runs beside that of all slots, before it is used in the bitwise mode."""

Task = int | str | tuple[int | str, str]
"""What a round runs: a number of proposed tokens, or "tree"; with the name of an extra, what it
runs besides for requests that need that, see `sampling.params.Extra`. A size is compiled for
each."""

CompileBatch = Callable[[int, Task], int]


class BatchPlan(NamedTuple):
    """Batch sizes besides that of all slots.

    Attributes:
      sizes: slots of each, of every group of devices, ascending.
      at_start: whether their programs are compiled with all others, or once rounds want them.
      together: whether a size is compiled for all tasks once rounds want it for one: so that what
        is chosen by the times of rounds is not chosen by which programs came first.
      patience: seconds of rounds that want a size before it is compiled.
    """

    sizes: tuple[int, ...] = ()
    at_start: bool = False
    together: bool = False
    patience: float = PATIENCE

    def below(self, slots: int) -> BatchPlan:
        """The sizes that are less than all `slots` of a group."""
        return self._replace(sizes=tuple(size for size in self.sizes if size < slots))


class BatchSizes:
    """The batch sizes of a role's programs; any thread may use it.

    A round runs the smallest size that holds its rows and is compiled. Where a smaller one would
    do, and rounds have wanted it for a while, a thread compiles it; rounds do not wait for it.

    Args:
      sizes: ascending; the last one, of all slots, is compiled.
      compile_batch: compiles the programs of a size for a task, and returns their number; None
        compiles nothing.
      together: tasks that a size is compiled for at once; see `BatchPlan`.
      patience: see `BatchPlan`.
      clock: seconds, monotonic.

    Attributes:
      trials: rounds in which a size runs beside that of all slots, and must give the same bits,
        before it is used; 0 where bits may differ.
      before_compiling: called by the thread that compiles.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        compile_batch: CompileBatch | None = None,
        *,
        together: Collection[Task] = (),
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trials = 0
        self.before_compiling: Callable[[], object] = lambda: None
        self._sizes, self._compile_batch = tuple(sizes), compile_batch
        self._together, self._patience, self._clock = tuple(together), patience, clock
        self._compiled: frozenset[tuple[int, Task]] = frozenset()
        self._wanted: Counter[tuple[int, tuple[Task, ...]]] = Counter()  # milliseconds
        self._agreed: Counter[tuple[int, Task]] = Counter()  # trials
        self._last_round = clock()
        self._threads: list[threading.Thread] = []  # the one that compiles
        # A process that ends while XLA compiles may crash.
        weakref.finalize(self, only_in_owner(_join), self._threads)

    @property
    def all(self) -> int:
        """The size of all slots."""
        return self._sizes[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that may be used, compiled or not, ascending."""
        return self._sizes

    def add(self, size: int, tasks: Collection[Task]) -> None:
        """Notes that the programs of a size are compiled for some tasks."""
        self._compiled |= {(size, task) for task in tasks}

    def ready(self, size: int, task: Task) -> bool:
        """Whether a size is compiled for a task."""
        return size == self.all or (size, task) in self._compiled

    def choose(self, rows: int, *tasks: Task) -> int:
        """The smallest size of so many rows or more that is compiled for all of these tasks."""
        fitting = [size for size in self._sizes if size >= rows]
        for task in tasks:
            if not self.ready(fitting[0], task):
                self._want(fitting[0], task)
                break
        return next(size for size in fitting if all(self.ready(size, task) for task in tasks))

    def on_trial(self, size: int, *tasks: Task) -> bool:
        """Whether a size has yet to give the same bits as that of all slots."""
        return size != self.all and any(self._agreed[size, t] < self.trials for t in tasks)

    def judge(self, size: int, *tasks: Task, same: bool) -> None:
        """Notes the result of a trial. A size with other bits is not used any more."""
        self._agreed.update((size, task) for task in tasks)
        if not same:
            _LOG.warning(
                "batches of %d are not used: their bits differ from those of %d, and exact is "
                "bitwise",
                *(size, self.all),
            )
            self.drop(size)

    def drop(self, *sizes: int) -> None:
        """Uses these sizes no more; that of all slots stays."""
        self._sizes = tuple(s for s in self._sizes if s not in sizes or s == self.all)

    def join(self) -> None:
        """Waits for the size that is being compiled, if any."""
        _join(self._threads)

    def _want(self, size: int, task: Task) -> None:
        now, last = self._clock(), self._last_round
        self._last_round = now
        together = self._together
        if isinstance(task, tuple):
            together = tuple((other, task[1]) for other in together if not isinstance(other, tuple))
        tasks = together if task in together else (task,)
        self._wanted[size, tasks] += round(1000 * min(now - last, _LONGEST_ROUND))
        if self._wanted[size, tasks] < 1000 * self._patience or self._compile_batch is None:
            return
        if self.ready(size, task):  # since the caller has looked
            return
        if not any(thread.is_alive() for thread in self._threads):
            thread = threading.Thread(
                target=self._compile,
                args=(self._compile_batch, size, tasks),
                daemon=True,
                name="batch size",
            )
            self._threads[:] = [thread]
            thread.start()

    def _compile(self, compile_batch: CompileBatch, size: int, tasks: Sequence[Task]) -> None:
        begin = self._clock()
        try:
            self.before_compiling()
            count = sum(compile_batch(size, task) for task in tasks)
        except Exception as error:
            _LOG.warning("batches of %d are not used: they cannot be compiled: %s", size, error)
            self.drop(size)
            return
        self.add(size, tasks)
        what, seconds = ", ".join(map(_name, tasks)), self._clock() - begin
        _LOG.info("batches of %d for %s: %d programs in %.1f s", size, what, count, seconds)


def _name(task: Task) -> str:
    if isinstance(task, tuple):
        return f"{_name(task[0])} with {task[1]}"
    return task if isinstance(task, str) else f"{task} proposed tokens"


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
