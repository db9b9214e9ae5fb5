"""Which batch size a target's round runs with, by the slots and by what their requests ask for."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from ssd_jax.devices.programs.batch_sizes import Task
from ssd_jax.devices.target.batch_trial import same_logits, same_outcomes
from ssd_jax.devices.target.programs import Programs
from ssd_jax.roles.protocols import Pending
from ssd_jax.roles.records import SlotOpening


class RoundSize(NamedTuple):
    """The size of a round.

    Attributes:
      slots: of every group of devices.
      tasks: what it runs; see `batch_sizes`.
      trial: whether it has to give the bits of all slots.
    """

    slots: int
    tasks: tuple[Task, ...] = ()
    trial: bool = False


class RoundSizes:
    """Chooses the batch sizes of a target's rounds.

    Args:
      programs: of the target.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._reported = np.zeros(programs.slots, bool)  # slots whose tokens get log-probabilities
        self._masked = np.zeros(programs.slots, bool)  # slots whose texts have a grammar

    @property
    def all(self) -> RoundSize:
        """That of all slots."""
        return RoundSize(self._programs.batch_sizes.all)

    def open(self, opening: SlotOpening) -> None:
        """Notes what a slot's request asks for."""
        self._reported[opening.slot] = opening.params.logprobs is not None
        self._masked[opening.slot] = opening.masked

    def reported(self, slot: int) -> bool:
        """Whether a slot's tokens get log-probabilities."""
        return bool(self._reported[slot])

    def reports(self, lengths: Int32[np.ndarray, "B"]) -> bool:
        """Whether a round at these positions reports log-probabilities."""
        return bool((self._reported & (lengths >= 0)).any())

    def choose(self, lengths: Int32[np.ndarray, "B"], task: int | str) -> RoundSize:
        """The size of a round at these positions."""
        programs, sizes, live = self._programs, self._programs.batch_sizes, lengths >= 0
        if len(sizes.sizes) == 1:
            return self.all
        tasks: list[Task] = [task]
        if (self._reported & live).any():
            tasks.append((task, "logprobs"))
        if (self._masked & live).any():
            tasks.append((task, "grammar"))
        slots = programs.choose_size(live, *tasks)
        return RoundSize(slots, (*tasks,), sizes.on_trial(slots, *tasks))

    def judge(
        self,
        tried: RoundSize,
        logits: tuple[jax.Array, jax.Array],
        outcomes: tuple[Pending, Pending],
        lengths: Int32[np.ndarray, "B"],
    ) -> None:
        """Compares a round on trial with that of all slots, which comes second."""
        programs = self._programs
        live = (lengths >= 0).reshape(programs.model.data_shards, -1)
        few, every = outcomes
        same = same_logits(*logits, live) and same_outcomes(
            few.read(), every.read(), live.flatten()
        )
        programs.batch_sizes.judge(tried.slots, *tried.tasks, same=same)
