"""`--suite=perplexity`: how well a model predicts a text, and so what quantising it costs.

The text is one stream of tokens, cut into windows that do not overlap; the rest at the end is not
used. A window starts with an empty cache, and each of its tokens but the first is predicted
from those before it in the window. The perplexity is exp of the mean of -log p over all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.paged import page_size
from ssd_jax.errors import InputError
from ssd_jax.kernels.kv_pages import Contiguous
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.system.stored_jit import StoredJit
from ssd_jax.tools.bench.table import Column, Page, build_table

WINDOW = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Scores of a text by one model.

    Attributes:
      window: tokens of a window; one fewer are predicted.
      nats: mean of -log p over each window. Two models' windows on one text are pairs.
      tokens: tokens of the whole text, those not used included.
    """

    window: int
    nats: tuple[float, ...]
    tokens: int

    @property
    def num_predicted(self) -> int:
        """Number of tokens that were predicted."""
        return len(self.nats) * (self.window - 1)

    @property
    def value(self) -> float:
        """The perplexity; infinite if a token had probability 0."""
        mean = float(np.mean(self.nats))
        return math.exp(mean) if math.isfinite(mean) else mean


def measure_perplexity(
    score: Callable[[np.ndarray], np.ndarray],
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    windows: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Perplexity:
    """Scores the windows of a token stream.

    Args:
      score: maps a window [window] int32 to log p of each token but the first, [window - 1].
      windows: number of windows to use, from the start; None is all.

    Raises:
      InputError: see `count_windows`.
    """
    stream = np.asarray(tokens, np.int32)
    count = count_windows(len(stream), window=window, windows=windows)
    nats = []
    for number, window_tokens in enumerate(stream[: count * window].reshape(count, window)):
        nats.append(-float(np.mean(score(window_tokens), dtype=np.float64)))
        progress(number + 1, count)
    return Perplexity(window=window, nats=tuple(nats), tokens=len(stream))


def count_windows(tokens: int, *, window: int, windows: int | None = None) -> int:
    """The number of windows that are scored of a text of `tokens` tokens.

    Raises:
      InputError: a text shorter than one window.
    """
    if tokens < window:
        raise InputError(
            f"the text has {tokens} tokens, window = {window}: give a longer text or a smaller "
            "window"
        )
    return tokens // window if windows is None else min(tokens // window, windows)


class TeacherForced:
    """One compiled program that runs a text in chunks, from an empty cache.

    Args:
      longest: tokens of the longest text.
      width: tokens of a chunk; None is the largest chunk of prefill.
    """

    def __init__(
        self,
        model: FunctionalModel,
        parameters: Parameters,
        *,
        longest: int,
        width: int | None = None,
    ) -> None:
        self.width = width = width or max(model.execution.prefill_chunks)
        length = page_size(-(-longest // width) * width)  # includes the last chunk's padding
        rows = model.data_shards  # each group of devices runs the text
        pages = model.page_struct(rows, length)
        self._parameters, self._pages = parameters, model.new_pages(rows, length)

        def chunk(parameters: Parameters, pages, tokens, start):
            positions = (start + jnp.arange(width))[None]
            hidden, pages = passes.step(
                model, parameters, pages, Contiguous(), tokens[None], positions, length
            )
            return passes.logits(model, parameters, hidden)[0], pages

        arguments = (
            model.parameter_structs(),
            pages,
            jax.ShapeDtypeStruct((width,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        results = None
        if model.mesh is not None:
            results = model.replicated, jax.tree.map(lambda struct: struct.sharding, pages)
        spec = program_spec.ProgramSpec(chunk, arguments, donate=(1,), results=results)
        self._program = spec.compile(model.mesh)

    def chunk(self, tokens: np.ndarray, start: int) -> jax.Array:
        """Logits [width, outputs] float32 after each of tokens [width] int32 from `start` on."""
        arguments = self._parameters, self._pages, tokens, np.int32(start)
        logits, self._pages = self._program(*arguments)
        return logits

    def logits(self, text: np.ndarray) -> Iterator[jax.Array]:
        """Logits of the token that follows each token of a text [n] int32, n at most `longest`.

        They come in chunks [width, outputs] float32; the last one's rows of padding mean nothing.
        """
        padded = np.zeros(-(-len(text) // self.width) * self.width, np.int32)
        padded[: len(text)] = text
        for start in range(0, len(padded), self.width):
            yield self.chunk(padded[start : start + self.width], start)


class TextScorer:
    """Scores windows with a model, for `measure_perplexity`.

    Args:
      tokens: number of ids that exist; logits beyond are vocabulary padding and get no probability.
    """

    def __init__(
        self, model: FunctionalModel, parameters: Parameters, *, window: int, tokens: int
    ) -> None:
        def scores(logits: jax.Array, next_tokens: jax.Array) -> jax.Array:
            id_logits = logits[:, :tokens]
            next_logits = jnp.take_along_axis(id_logits, next_tokens[:, None], axis=1)[:, 0]
            return next_logits - jax.nn.logsumexp(id_logits, axis=1)

        self._runner = TeacherForced(model, parameters, longest=window)
        self._scores = StoredJit(scores)

    def __call__(self, window: np.ndarray) -> np.ndarray:
        """log p of tokens 1, 2, ... of a window [window] int32, float32 [window - 1]."""
        width = self._runner.width
        next_tokens = np.zeros(len(window) + width, np.int32)
        next_tokens[: len(window) - 1] = window[1:]
        chunks = [
            self._scores(logits, next_tokens[chunk * width : (chunk + 1) * width])
            for chunk, logits in enumerate(self._runner.logits(window))
        ]
        return np.concatenate(chunks)[: len(window) - 1]


def perplexity_table(result: Perplexity, *, dtype: str) -> Page:
    """One line: dtype, perplexity, windows, tokens predicted."""
    columns: list[Column[Perplexity]] = [
        Column("dtype", lambda _: dtype, "left"),
        Column("perplexity", lambda row: f"{row.value:.3f}"),
        Column("windows", lambda row: str(len(row.nats))),
        Column("tokens predicted", lambda row: str(row.num_predicted)),
    ]
    title = f"perplexity, windows of {result.window} tokens that do not overlap"
    note = f"each token of a window but its first is predicted; {result.tokens} tokens in the text"
    return build_table(columns, [result], title=title, notes=[note])
