"""Models in processes of their own, on processor cores of their own, to be measured in turns.

A process is pinned before JAX starts there, so that its threads are as many as its cores.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ssd_jax.bench.prompts import Prompt
from ssd_jax.bench.run import Variant
from ssd_jax.config import Config
from ssd_jax.errors import SsdError
from ssd_jax.runtime.request import SamplingParams


class PinnedModel:
    """An `LLM` in a process that ends with `close`, or with this one.

    Args:
      config: its settings; `target_cores` says where it runs.
      params: of every prompt.
      ks: values of K to prepare beside the configured one.
    """

    def __init__(self, config: Config, params: SamplingParams, *, ks: Sequence[int] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, params, tuple(ks)))
        self._process.daemon = True
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Waits until it is loaded.

        Raises:
          SsdError: it cannot be.
        """
        self._answer()

    def variant(self, mode: str, k: int | None) -> Variant:
        """Runs prompts there in a mode of `LLM.engine_of`."""

        return lambda prompt: self._answer((prompt, mode, k))

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()

    def _answer(self, question: tuple[Prompt, str, int | None] | None = None) -> Any:
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


def _serve(pipe: Connection, config: Config, params: SamplingParams, ks: tuple[int, ...]) -> None:
    """Answers with a result for each (prompt, mode, K); whatever fails is an answer, too."""
    from ssd_jax.bench.generation import prompt_result
    from ssd_jax.llm import LLM

    try:
        with LLM(config=config, ks=ks) as llm:
            pipe.send(None)
            while True:
                prompt, mode, k = pipe.recv()
                pipe.send(prompt_result(llm, prompt, params, mode, k))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(error)
