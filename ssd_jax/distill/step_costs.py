"""What a forward of the draft costs beside the target's, one text at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.bench.step import time_steps
from ssd_jax.devices import passes
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.tuning.throughput import Costs

Model = tuple[FunctionalModel, Parameters]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Forwards with logits of every token, medians.

    Attributes:
      target_ms: of the target's forward of one token.
      target, draft: by the number of tokens, paired ratios to that one.
    """

    target_ms: float
    target: dict[int, float]
    draft: dict[int, float]

    @property
    def costs(self) -> Costs:
        """For the predictions, in forwards of the target. Drafting is a forward of one token; a
        forward of M branches is taken to cost what one of M tokens of a text does, and to take
        nothing from the target."""
        return Costs(
            verify={tokens - 1: ratio for tokens, ratio in self.target.items()},
            draft=self.draft[1],
            backup=self.draft[1],
            step={tokens: ratio for tokens, ratio in self.draft.items() if tokens > 1},
        )


def measure_steps(
    target: Model,
    draft: Model,
    *,
    ks: Sequence[int],
    budgets: Sequence[int],
    context: int,
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> StepCosts:
    """Times all forwards in turn, so that a drift of the machine hits them alike.

    Args:
      target, draft: models and their parameters.
      ks: target forwards of K + 1 tokens.
      budgets: draft forwards of M tokens.
      context: positions of a page; half of them lie before what is run.
      repeats: of every forward.
      progress: called with (rounds done, rounds).
    """
    runs = [(target, 1 + k) for k in sorted({0, *ks})]
    runs += [(draft, m) for m in sorted({1, *budgets})]

    def forward(number: int) -> Callable[[], None]:
        (model, parameters), tokens = runs[number - 1]
        return _forward(model, parameters, tokens, context)

    # To `time_steps` each run is a width of its own; its ratios are to the first.
    timed = time_steps(
        forward,
        weight_bytes=1,
        widths=range(1, len(runs) + 1),
        repeats=repeats,
        progress=progress,
    )
    ratios = [row.ratio.median if row.ratio is not None else 1.0 for row in timed.steps]
    found = list(zip(runs, ratios, strict=True))
    return StepCosts(
        target_ms=timed.steps[0].ms.median,
        target={tokens: ratio for (of, tokens), ratio in found if of is target},
        draft={tokens: ratio for (of, tokens), ratio in found if of is draft},
    )


def _forward(
    model: FunctionalModel, parameters: Parameters, count: int, context: int
) -> Callable[[], None]:
    size = passes.page_size(context)
    pages = model.new_pages(1, size)
    tokens = jnp.zeros((1, count), jnp.int32)
    positions = jnp.asarray(context // 2 + np.arange(count)[None], jnp.int32)

    def forward(parameters: Parameters, pages, tokens, positions):
        hidden, pages = passes.step(model, parameters, pages, tokens, positions, size)
        return passes.logits(model, parameters, hidden), pages

    program = jax.jit(forward, donate_argnums=1)

    def run_once() -> None:
        nonlocal pages
        logits, pages = program(parameters, pages, tokens, positions)
        jax.block_until_ready(logits)

    return run_once
