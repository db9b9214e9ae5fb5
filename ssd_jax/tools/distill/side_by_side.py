"""Works on shards side by side, in processes with a share of the cores each.

A forward of many rows has parts that run on one core, so that two engines on one core each generate
more than one engine on both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from ssd_jax.errors import SsdError
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.compile_cache import open_store, settings_in_use, use_store
from ssd_jax.system.cores import pin, usable_cores
from ssd_jax.system.host_memory import keep_freed_memory
from ssd_jax.system.leaving import end_with_parent
from ssd_jax.system.sums import check_sums
from ssd_jax.tools.distill.completions import CompletionJob, Report

Work = Callable[[CompletionJob, Iterable[tuple[int, Any]]], Iterator[Report]]
"""Takes shards by their places, each with what is to be done of it; the first report says that the
work can begin. It is a module's function."""


def core_groups(processes: int) -> list[tuple[int, ...]]:
    """Cores of each process, at most one process a core.

    Empty where processes cannot have cores of their own, or would share an accelerator.
    """
    import jax

    cores = sorted(usable_cores())
    count = min(processes, len(cores))
    if jax.default_backend() != "cpu":
        return []
    ends = [len(cores) * i // count for i in range(count + 1)] if count else []
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(ends)]


def run(work: Work, job: CompletionJob, shards: Mapping[int, Any]) -> Iterator[Report]:
    """Does the work in as many processes as the job asks for, or in this one.

    A process that is free takes the next shard.

    Raises: what the work raises, here or there.
      SsdError: a process ended without an answer.
    """
    groups = core_groups(min(job.settings.processes, len(shards)))
    if len(groups) < 2:
        yield from work(job, shards.items())
        return
    pending = iter(shards.items())
    with contextlib.ExitStack() as stack:
        workers: dict[Any, _Worker] = {}  # by what `wait` returns
        for cores in groups:
            worker = _Worker(work, job, cores)
            stack.callback(worker.close)
            workers[worker.pipe] = worker
            worker.send(next(pending, None))
        while workers:
            for pipe in wait([*workers]):
                report = workers[pipe].next_report()
                if report is None:
                    del workers[pipe]
                    continue
                yield report
                if report.shard is not None:
                    workers[pipe].send(next(pending, None))


class _Worker:
    """A process that works on the shards that it is given, until it is given None."""

    def __init__(self, work: Work, job: CompletionJob, cores: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_end = context.Pipe()
        quiet = dataclasses.replace(job, bar=_no_bar)
        store = settings_in_use()
        self._process = context.Process(target=_serve, args=(worker_end, work, quiet, cores, store))
        self._process.daemon = True
        self._process.start()
        worker_end.close()

    def send(self, shard: tuple[int, Any] | None) -> None:
        with contextlib.suppress(ConnectionError):  # `next_report` reports that it has ended
            self.pipe.send(shard)

    def next_report(self) -> Report | None:
        """Its next report; None if it is done."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise SsdError(
                f"one of several processes ended with exit status {self._process.exitcode}; the "
                "memory may be too small for the weights in each: lower processes. The "
                "same command goes on with the shards that are written"
            ) from None
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def _no_bar(_label: str, *, unit: str) -> contextlib.nullcontext[None]:
    del unit
    return contextlib.nullcontext()


def _serve(
    pipe: Connection, work: Work, job: CompletionJob, cores: tuple[int, ...], store: StoreSettings
) -> None:
    """Sends the reports of the work, then None; an exception is sent, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too; its starter ends it
    end_with_parent()
    try:
        pin(cores)  # before JAX starts, which has as many threads as cores
        keep_freed_memory()
        check_sums()
        use_store(open_store(store))
        for report in work(job, iter(pipe.recv, None)):
            pipe.send(report)
        pipe.send(None)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        pipe.send(error)
