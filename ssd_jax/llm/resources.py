"""What a model takes of its process beside devices: cores, a trace, a store, other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterator, Sequence

from ssd_jax.config.config import Config
from ssd_jax.engine.rounds.trace import Trace
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.hosts.facts import model_facts
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader, lead
from ssd_jax.system.compile_cache import open_store
from ssd_jax.system.forks import only_in_owner


class ProcessResources:
    """Taken when a model opens, and given back when it closes or the process ends.

    Args:
      hosts: the other processes, for one that has joined them.

    Attributes:
      trace: records rounds; None if there is no file for it.
      store: of compiled programs; None keeps none.
      draft_cores: processor cores of a draft in a process of its own.
      hosts: the other processes that run the target; None if there are none.
      unpin: gives this process's threads their cores back.
    """

    def __init__(self, config: Config, hosts: Leader | Follower | None) -> None:
        self._process, self._config = os.getpid(), config
        self.hosts = hosts
        self.trace = None if config.trace is None else Trace(config.trace)
        if self.trace is not None:
            # Also when the program ends before `close`, for example by Ctrl-C.
            self._write_late = weakref.finalize(self, only_in_owner(self.trace.write_at_the_end))
        self.store = open_store(config.store)
        # Before JAX counts the cores for its threads.
        self.draft_cores, restore = config.cores.pin_target()
        self.unpin = weakref.finalize(self, restore)

    @property
    def inherited(self) -> bool:
        """Whether this is a process that was forked from the one that took them."""
        return os.getpid() != self._process

    def lead_hosts(self, ks: Sequence[int]) -> None:
        """Waits for the other processes of `Config.hosts`, and says what they are to open."""
        config = self._config
        if config.hosts is not None and self.hosts is None:
            self.hosts = lead(config.hosts, config.host_timeout)
            self.hosts.send_settings(dataclasses.asdict(config), ks)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Ends the other processes too if an error is raised within: they wait for this one."""
        try:
            yield
        except BaseException as error:
            if self.hosts is not None:
                self.hosts.fail(error)
            raise

    def agree(self, resolved: Resolved) -> None:
        """Checks that all processes have the same models, context and pages.

        Raises:
          SsdError: they have not.
        """
        if self.hosts is None:
            return
        facts = model_facts("target", resolved.target)
        if resolved.draft is not None:
            facts |= model_facts("draft", resolved.draft)
        pages = None if resolved.paging is None else resolved.paging.total
        self.hosts.agree(facts | {"context": resolved.context, "pages": pages})

    def close(self) -> None:
        """Ends the other processes, gives the cores back and writes the trace.

        Raises:
          OSError: the trace cannot be written.
        """
        with contextlib.ExitStack() as ends:  # calls all of them, whatever one raises
            if self.trace is not None and self._write_late.detach():
                ends.callback(self.trace.write)
            ends.callback(self.unpin)
            if self.hosts is not None:
                ends.callback(self.hosts.close)
