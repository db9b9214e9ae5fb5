"""What the parts of a round take with the programs of a batch size. Pure host code.

Where these were there when costs were measured, they were measured, too. Others come while rounds
run, and are worked out from those of all slots: a forward is taken for a part that does not depend
on its tokens, such as a read of all weights, and one for each token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ssd_jax.tuning.throughput import Costs


def costs_of_batch(costs: Costs, batch: int, slots: int) -> Costs:
    """Costs of rounds that run `batch` slots.

    Args:
      costs: of all slots, and of the batch sizes that were measured.
      batch: 0 where it is not known, which counts as all.
    """
    if batch in costs.few:
        return costs.few[batch]
    if not 0 < batch < slots:
        return costs
    share = batch / slots
    verify = _with_fewer_tokens(costs.verify, share, fixed=1)
    # The draft's forwards of one token a slot are those of a smaller model.
    of_forward = verify[min(verify)] / costs.verify[min(verify)]
    draft, step = costs.draft * of_forward, _with_fewer_tokens(costs.step, share, fixed=0)
    if len(costs.step) == 1:  # which does not tell what a token costs
        step = {m: seconds * of_forward for m, seconds in costs.step.items()}
    few = dataclasses.replace(
        costs,
        verify=verify,
        ahead=costs.ahead * of_forward,
        draft=draft,
        backup=costs.backup * of_forward,
        step=step,
    )
    rounds = {k: costs.host + few.verify_seconds(k) + k * draft for k in costs.rounds}
    return dataclasses.replace(few, rounds=rounds)


def _with_fewer_tokens(
    seconds: Mapping[int, float], share: float, *, fixed: int
) -> dict[int, float]:
    """Seconds of forwards of `share` as many rows, each of `fixed` tokens and as many as the key
    says."""
    if not seconds:
        return {}
    (least, fewest), (most, longest) = min(seconds.items()), max(seconds.items())
    a_token = (longest - fewest) / (most - least) if most > least else 0.0
    a_token = min(max(a_token, 0.0), fewest / (least + fixed))  # no part is negative
    return {
        count: time - (1 - share) * a_token * (count + fixed) for count, time in seconds.items()
    }
