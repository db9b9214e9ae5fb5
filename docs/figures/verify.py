"""`python docs/figures/verify.py`: the verification of eight sequences on a processor.

Milliseconds of `verify` with K = 7, 151,936 tokens, temperature 1 and top-p 0.9, by plain XLA and
with the thresholds of `kernels/verify/cpu.cc`; medians of calls in turn, and of the ratios of
pairs. Both must give the same tokens. Logits are normal numbers, among which twenty are likely: in
flat laws top-p keeps thousands of tokens, in sharp ones a few.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling import penalties
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.verification import verify

ROWS, K, VOCAB, SUPPORT = 8, 7, 151_936, 64
CALLS = 15
LAWS = {"flat": (3.0, 14.0), "sharp": (1.0, 30.0)}
"""Standard deviation of logits, and how much more the likely ones have at most."""


def case(deviation: float, most: float) -> tuple[jax.Array, Proposal]:
    """Logits, and proposals of the likeliest tokens with a q of p's likeliest ones."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, deviation, (ROWS, K + 1, VOCAB)).astype(np.float32)
    for row in logits.reshape(-1, VOCAB):
        row[rng.integers(0, VOCAB, 20)] += most * rng.random(20)
    support = np.argsort(-logits[:, :K], axis=-1)[..., :SUPPORT]
    weights = np.take_along_axis(logits[:, :K], support, axis=-1)
    q = np.exp(weights - weights[..., :1])
    proposal = Proposal(
        jnp.asarray(support[..., 0], jnp.int32),
        jnp.full(ROWS, K, jnp.int32),
        jnp.asarray(support, jnp.int32),
        jnp.asarray(q / q.sum(axis=-1, keepdims=True)),
    )
    return jnp.asarray(logits), proposal


def main() -> None:
    """See the module."""
    if reason := why_missing():
        sys.exit(f"there is no kernel: {reason}")
    rows = SamplingRows(ROWS, VOCAB)
    for row in range(ROWS):
        rows.set(SlotOpening(row, SamplingParams(temperature=1.0, top_p=0.9, seed=row)))
    start, history = jnp.arange(ROWS, dtype=jnp.int32), penalties.empty(ROWS, VOCAB)
    for law, shape in LAWS.items():
        logits, proposal = case(*shape)
        calls = {
            name: partial(
                jax.jit(partial(verify, tokens=VOCAB, backend=name)),
                logits, proposal, rows.on_device(), start, history,
            )
            for name in ("xla", "cpu")
        }  # fmt: skip
        xla, cpu = (jax.tree.map(np.asarray, call()) for call in calls.values())
        jax.tree.map(np.testing.assert_array_equal, xla, cpu)
        times: list[dict[str, float]] = []
        for _ in range(CALLS):
            taken = {}
            for name, call in calls.items():
                began = time.perf_counter()
                jax.block_until_ready(call())
                taken[name] = 1e3 * (time.perf_counter() - began)
            times.append(taken)
        for name in calls:
            median = statistics.median(taken[name] for taken in times)
            ratio = statistics.median(taken["xla"] / taken[name] for taken in times)
            print(f"{law:6} {name:4} {median:7.1f} ms {ratio:6.2f}x")


if __name__ == "__main__":
    main()
