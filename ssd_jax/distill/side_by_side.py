"""Engines side by side that complete shards, each in a process of its own on a share of the cores.

A step of many rows has parts that one core does, so that two engines on a core each generate more
than one engine on both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from ssd_jax.distill.completions import (
    Completion,
    CompletionJob,
    Generated,
    Written,
    complete_shards,
)
from ssd_jax.errors import SsdError
from ssd_jax.system.cores import shown, usable_cores


def core_groups(processes: int) -> list[str | None]:
    """Cores of each process, at most one process a core; None is wherever the system likes."""
    import jax

    cores = sorted(usable_cores())
    count = min(processes, len(cores))
    if count < 2 or jax.default_backend() != "cpu":  # processes cannot share an accelerator
        return [None]
    ends = [len(cores) * i // count for i in range(count + 1)]
    return [shown(cores[a:b]) for a, b in itertools.pairwise(ends)]


def complete_side_by_side(
    job: CompletionJob,
    shards: Mapping[int, list[Completion]],
    groups: list[str | None],
    *,
    compile_cache: str,
) -> Iterator[Generated | Written]:
    """As `complete_shards`, with a process for each group of cores; who is free takes the next
    shard."""
    waiting = iter(shards.items())
    with contextlib.ExitStack() as until:
        engines: dict[Any, _Engine] = {}  # by what `wait` returns
        for cores in groups:
            engine = _Engine(job, cores, compile_cache)
            until.callback(engine.close)
            engines[engine.pipe] = engine
            engine.give(next(waiting, None))
        while engines:
            for pipe in wait([*engines]):
                event = engines[pipe].answer()
                if event is None:
                    del engines[pipe]
                    continue
                yield event
                if isinstance(event, Written):
                    engines[pipe].give(next(waiting, None))


class _Engine:
    """A process that completes the shards it is given, until it is given None."""

    def __init__(self, job: CompletionJob, cores: str | None, compile_cache: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        quiet = dataclasses.replace(job, bar=_no_bar)
        self._process = context.Process(target=_serve, args=(theirs, quiet, cores, compile_cache))
        self._process.daemon = True
        self._process.start()
        theirs.close()

    def give(self, shard: tuple[int, list[Completion]] | None) -> None:
        with contextlib.suppress(ConnectionError):  # `answer` says that it has ended
            self.pipe.send(shard)

    def answer(self) -> Generated | Written | None:
        """What it says next; None is that it is done."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise SsdError(
                f"a process that generates ended with exit status {self._process.exitcode}; with "
                "several engines the memory may be too small: lower generate.processes. The same "
                "command goes on with the shards that are written"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


@contextlib.contextmanager
def _no_bar(_label: str, *, unit: str) -> Iterator[None]:
    del unit
    yield


def _serve(pipe: Connection, job: CompletionJob, cores: str | None, compile_cache: str) -> None:
    """Answers with what becomes of shards; whatever fails is an answer, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too; its starter ends it
    try:
        given = iter(pipe.recv, None)
        for event in complete_shards(job, given, compile_cache=compile_cache, cores=cores):
            pipe.send(event)
        pipe.send(None)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        pipe.send(error)
