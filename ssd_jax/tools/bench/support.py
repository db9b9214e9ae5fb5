"""`--suite=support`: the acceptance that proposals lose if q is cut to its N likeliest tokens.

The target writes the texts. At each of their tokens a proposal drawn from q is accepted with
probability sum(min(p, q)) (the ratio rule), with p and q after temperature, top-k, top-p and min-p.
Penalties, logit biases, bad words and banned tokens are not applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices.sampling_rows import SamplingRows
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.outputs import Outputs
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.probs import likeliest_probs, sampled_probs
from ssd_jax.sampling.settings import Sampling
from ssd_jax.tools.bench.perplexity import TeacherForced
from ssd_jax.tools.bench.stats import Estimate, estimate_of
from ssd_jax.tools.bench.table import Column, Page, build_table, interval

SUPPORTS = (16, 64, 256)


class TargetText(NamedTuple):
    """A text of tokens [n] int32, the first `prompt` of which were given."""

    tokens: np.ndarray
    prompt: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """Acceptance of proposals whose q keeps N ids; N is None where q is whole.

    Attributes:
      acceptance: mean over all tokens.
      lost: acceptance with the whole q minus this one.
      by_text: median and interval of the same loss by text.
    """

    n: int | None
    acceptance: float
    lost: float
    by_text: Estimate


class Overlaps:
    """Acceptance at every token of a text, by N.

    Args:
      tokens: number of ids of the tokenizer; logits beyond are vocabulary padding.
      longest: tokens of the longest text.
      supports: each N; the whole q comes last.
      params: of the requests, which are sampled.
      draft_temperature: of q; None is the requests'.
    """

    def __init__(
        self,
        target: tuple[FunctionalModel, Parameters],
        draft: tuple[FunctionalModel, Parameters],
        *,
        tokens: int,
        longest: int,
        supports: Sequence[int],
        params: SamplingParams,
        draft_temperature: float | None = None,
    ) -> None:
        self._forced = [TeacherForced(*model, longest=longest) for model in (target, draft)]
        outputs: Outputs = draft[0].output_ids
        warmth = params.temperature if draft_temperature is None else draft_temperature
        sampling, draft_sampling = (
            _rows(each, self._forced[0].width, target[0].config.vocab_size)
            for each in (params, dataclasses.replace(params, temperature=warmth))
        )

        def compare(theirs: jax.Array, own: jax.Array) -> jax.Array:
            p = sampled_probs(theirs[:, :tokens], sampling)
            if outputs is None:
                own = own[:, :tokens]
            else:
                p = p[:, jnp.asarray(outputs)]  # what q cannot propose overlaps with nothing
            found = []
            for n in supports:
                q, ids = likeliest_probs(own, min(n, own.shape[1]), draft_sampling)
                found.append(jnp.minimum(jnp.take_along_axis(p, ids, axis=1), q).sum(axis=1))
            found.append(jnp.minimum(p, sampled_probs(own, draft_sampling)).sum(axis=1))
            return jnp.stack(found)

        self._compare = jax.jit(compare)

    def __call__(self, text: TargetText) -> np.ndarray:
        """Acceptance [number of N + 1, tokens that the target wrote], float32."""
        context = text.tokens[:-1]
        chunks = zip(*(forced.logits(context) for forced in self._forced), strict=True)
        found = np.concatenate([np.asarray(self._compare(p, q)) for p, q in chunks], axis=1)
        return found[:, text.prompt - 1 : len(context)]


def _rows(params: SamplingParams, rows: int, vocab: int) -> Sampling:
    """The same settings for every row."""
    made = SamplingRows(rows, vocab)
    for row in range(rows):
        made.set(SlotOpening(row, params))
    return made.on_device()


def measure_supports(
    overlaps: Callable[[TargetText], np.ndarray],
    texts: Sequence[TargetText],
    supports: Sequence[int],
    progress: Progress = lambda done, total: None,
) -> list[Support]:
    """A `Support` for each N of `supports`, and one for the whole q last.

    Args:
      texts: each with at least one token that the target wrote.
    """
    found = []
    for number, text in enumerate(texts):
        found.append(overlaps(text))
        progress(number + 1, len(texts))
    every = np.concatenate(found, axis=1, dtype=np.float64).mean(axis=1)
    means = np.array([each.mean(axis=1, dtype=np.float64) for each in found])
    return [
        Support(
            n=n,
            acceptance=float(every[place]),
            lost=float(every[-1] - every[place]),
            by_text=estimate_of((means[:, -1] - means[:, place]).tolist()),
        )
        for place, n in enumerate([*supports, None])
    ]


def supports_table(entries: Sequence[Support], *, judged: int) -> Page:
    """A line for each N."""
    columns: list[Column[Support]] = [
        Column("N", lambda row: "full" if row.n is None else str(row.n)),
        Column("acceptance", lambda row: f"{row.acceptance:.4f}"),
        Column("lost", lambda row: f"{row.lost:z.4f}"),
        Column("lost by text", lambda row: f"{row.by_text.value:z.4f}{_around(row.by_text)}"),
    ]
    return build_table(
        columns,
        entries,
        title="acceptance of a proposed token, by the ids that its q keeps (--proposal_support=N)",
        notes=[
            f"mean of sum(min(p, q)) over {judged} tokens that the target wrote",
            "lost by text: median over the texts, with its 95% interval",
        ],
    )


def _around(estimate: Estimate) -> str:
    ends = interval(estimate, "{:z.4f}", " to ")
    return "" if ends is None else f" ({ends})"
