"""`--suite=perplexity`: how well a model predicts a text, and so what quantising it costs.

The text is one stream of tokens, cut into windows that do not overlap; what is left at the end is
not used. A window starts with an empty cache, and each of its tokens but the first is predicted
from those before it in the window. The perplexity is exp of the mean of -log p over all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from ssd_jax.bench.report import SCHEMA_VERSION, json_safe
from ssd_jax.bench.table import Column, build_table
from ssd_jax.errors import InputError
from ssd_jax.kernels import kv_pages
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.runtime.passes import Job

WINDOW = 1024

Score = Callable[[np.ndarray], np.ndarray]
"""Tokens [window] int32 -> log p of each but the first, [window - 1]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """What one model made of a text.

    Attributes:
      window: tokens of a window; one fewer are predicted.
      nats: mean of -log p over each window. Two models' windows on one text are pairs.
      tokens: tokens of the whole text, those not used included.
    """

    window: int
    nats: tuple[float, ...]
    tokens: int

    @property
    def predicted(self) -> int:
        """How many tokens were predicted."""
        return len(self.nats) * (self.window - 1)

    @property
    def value(self) -> float:
        """The perplexity; infinite if a token had probability 0."""
        mean = float(np.mean(self.nats))
        return math.exp(mean) if math.isfinite(mean) else mean


def measure_perplexity(
    score: Score,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    windows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Scores the windows of a token stream.

    Args:
      score: gives the log-probabilities within one window.
      tokens: the stream.
      window: tokens of a window, at least 2.
      windows: use only so many, from the start.
      progress: called with (windows done, windows) after each.

    Raises:
      InputError: window or windows out of range, or a text shorter than one window.
    """
    if window < 2 or (windows is not None and windows < 1):
        raise InputError(
            f"window = {window} and windows = {windows}: give window >= 2 and windows >= 1"
        )
    stream = np.asarray(tokens, np.int32)
    count = len(stream) // window
    if not count:
        raise InputError(
            f"the text has {len(stream)} tokens, window = {window}: give a longer text or a "
            "smaller window"
        )
    count = count if windows is None else min(count, windows)
    nats = []
    for number, part in enumerate(stream[: count * window].reshape(count, window)):
        nats.append(-float(np.mean(score(part), dtype=np.float64)))
        if progress is not None:
            progress(number + 1, count)
    return Perplexity(window=window, nats=tuple(nats), tokens=len(stream))


class Scorer:
    """`Score` of a model, by one compiled program that runs a window in chunks.

    Args:
      model: static description.
      parameters: its arrays.
      window: tokens of a window.
      tokens: how many ids exist; logits beyond are vocabulary padding and get no probability.
    """

    def __init__(
        self, model: FunctionalModel, parameters: Parameters, *, window: int, tokens: int
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._window = window
        self._tokens = tokens
        self._width = max(model.execution.prefill_chunks)
        unit = math.lcm(self._width, kv_pages.BLOCK)  # the last chunk's padding lies in the page
        self._room = -(-window // unit) * unit
        self._pages = model.new_pages(1, self._room)
        chunk = jax.ShapeDtypeStruct((self._width,), jnp.int32)
        arguments = (
            model.parameter_structs(),
            model.page_structs(1, self._room),
            chunk,
            chunk,
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        self._program = Job(self._chunk, arguments, (1,)).compile(model.mesh)

    def __call__(self, window: np.ndarray) -> np.ndarray:
        """log p of tokens 1, 2, ... of a window [window] int32, float32 [window - 1]."""
        padded = np.zeros(self._room + 1, np.int32)
        padded[: self._window] = window
        parts = []
        for start in range(0, self._window, self._width):
            tokens = padded[start : start + self._width]
            following = padded[start + 1 : start + 1 + self._width]
            scores, self._pages = self._program(
                self._parameters, self._pages, tokens, following, np.int32(start)
            )
            parts.append(scores)
        return np.concatenate(parts)[: self._window - 1]

    def _chunk(self, parameters: Parameters, pages, tokens, following, start):
        module = self._model.module(parameters)
        positions = (start + jnp.arange(self._width))[None]
        table = kv_pages.Contiguous()
        hidden, pages, _ = module.hidden(tokens[None], positions, positions + 1, pages, table)
        logits = module.logits(hidden[0])[:, : self._tokens]
        chosen = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=1), pages


def read_text(path: Path) -> str:
    """A text file.

    Raises:
      InputError: it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"text {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"text {path} is not UTF-8: {error}; convert it first") from None


def perplexity_json(
    result: Perplexity, *, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result as an object for `json.dumps`; see `report.bench_json`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "suite": "perplexity",
        **environment,
        "settings": dict(settings),
        "perplexity": result.value,
        "predicted": result.predicted,
        **dataclasses.asdict(result),
    }
    return json_safe(document)


def perplexity_table(result: Perplexity, *, dtype: str) -> Table:
    """One line: dtype, perplexity, windows, tokens predicted."""
    columns: tuple[Column[Perplexity], ...] = (
        Column(title="dtype", cell=lambda _: dtype, justify="left"),
        Column(title="perplexity", cell=lambda row: f"{row.value:.3f}"),
        Column(title="windows", cell=lambda row: str(len(row.nats))),
        Column(title="tokens predicted", cell=lambda row: str(row.predicted)),
    )
    return build_table(
        columns,
        [result],
        title=f"perplexity, windows of {result.window} tokens that do not overlap",
        notes=[
            f"each token of a window but its first is predicted; {result.tokens} tokens in the text"
        ],
    )
