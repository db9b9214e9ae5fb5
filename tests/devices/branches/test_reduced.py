"""Branches of a draft with a reduced vocabulary: tokens of its map, with the q of its law."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.branches import expansion_steps
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.branches.expansion_steps import ExpansionSteps
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.kernels.sparse import dense
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import Drafting
from ssd_jax.sampling import drafting, penalties
from ssd_jax.testing import tiny
from tests.sampling.edits import Edit, edited
from tests.sampling.rows import QUICKLY, history_of, rows, words

VOCAB, SLOTS, K, M, SUPPORT = 64, 2, 3, 4, 6
OUTPUTS = np.array([1, 3, 4, 8, 9, 14, 15, 18, 20, 33, 34, 40, 47, 52, 61, 63], np.int32)
COUNTS = np.array([[1, 1, 2, 0], [1, 1, 1, 1]], np.int32)
LENGTHS = np.array([2, 3], np.int32)
PROPOSED = np.array([[8, 5, 0], [20, 33, 8]], np.int32)  # 5, of n-grams, is not in the map
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": 0.6}
HEAT = np.array([0.9, 1.2])
WORDS = (5, 63), (33, 8), (61, 3), (20, 4)


@pytest.fixture(scope="module")
def programs():
    """Not compiled, in float32."""
    config = dataclasses.replace(
        ModelConfig.from_hf(tiny.config("llama", vocab_size=VOCAB, num_hidden_layers=1)),
        tie_embeddings=False,
        output_size=len(OUTPUTS),
    )
    model = FunctionalModel(config, Execution.for_platform("cpu", "float32"), output_ids=OUTPUTS)
    kind = Drafting(k=K, support=SUPPORT, rule="ratio", branches=M, predict="noise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_spec, "compile_all", lambda jobs, *_: dict(jobs))
        base = DraftPrograms(model, slots=SLOTS, context=32, tokens=VOCAB, drafting=kind)
        return ExpansionPrograms(base)


def drawn(programs):
    """Draws of all branches: (records, path, [branch, place] whether drawn, expected q)."""
    base, rng = programs.base, np.random.default_rng(0)
    parameters = [
        jnp.asarray(rng.normal(0, 0.5, struct.shape), struct.dtype)
        for struct in base.model.parameter_structs()
    ]
    of_slots = base.records(SLOTS)
    candidates = rng.permuted(np.tile(OUTPUTS, (SLOTS, K, 1)), axis=-1)
    of_slots = of_slots._replace(
        start=jnp.array([5, 9], jnp.int32),
        pending=jnp.array([7, 14], jnp.int32),
        proposal=of_slots.proposal._replace(
            tokens=jnp.asarray(PROPOSED), length=jnp.asarray(LENGTHS)
        ),
        candidates=jnp.asarray(candidates[:, :, : of_slots.candidates.shape[2]]),
        hidden=jnp.asarray(rng.normal(size=of_slots.hidden.shape), jnp.float32),
    )
    history = history_of(
        jnp.asarray(rng.random((SLOTS, VOCAB)) < 0.2),
        jnp.asarray(rng.poisson(0.3, (SLOTS, VOCAB)), jnp.int32),
        [[8], [20, 20]],
    )
    history = jax.tree.map(jnp.asarray, history)
    bans = {"bad_word_ids": words(*WORDS)}
    settings = (
        PENALTIES | bans | {"temperature": heat, "request": n} for n, heat in enumerate(HEAT)
    )
    sampling = jax.tree.map(jnp.asarray, rows(*settings))
    lowered = jnp.zeros((SLOTS, K), jnp.int32)

    def run(parameters):
        pages, scratch, expansion, _ = programs["expand"].function(
            parameters, base.new_pages(), history, None, programs.new_scratch(), of_slots,
            jnp.asarray(COUNTS), jnp.zeros_like(COUNTS), lowered, sampling,
        )  # fmt: skip
        *_, expansion, _ = programs["grow"].function(
            parameters, pages, history, None, scratch, expansion, lowered, sampling
        )
        return expansion, passes.logits(base.model, parameters, expansion.records.hidden)

    (records, path), logits = jax.jit(run, compiler_options=QUICKLY)(parameters)
    records, path, logits = jax.tree.map(np.asarray, (records, path, logits))
    lives = np.arange(K) < records.proposal.length[:, None]
    expected = np.zeros((SLOTS * M, K, VOCAB))
    for branch, place in np.argwhere(lives):
        row = branch // M
        tokens = [*path[branch], *records.proposal.tokens[branch, :place]]
        counts = np.asarray(history.output)[row].copy()
        np.add.at(counts, [token for token in tokens if token >= 0], 1)
        prompt = np.asarray(history.prompt)[row]
        tokens = [token for token in (*np.asarray(history.recent)[row], *tokens) if token >= 0]
        last = [last for first, last in WORDS if first == tokens[-1]]
        expected[branch, place] = law(logits[branch, place], counts, prompt, HEAT[row], last)
    return records, path, lives, expected


def law(logits, counts, prompt, heat, banned):
    """[VOCAB], of the likeliest tokens, with penalties as `penalties.penalise` says."""
    counts, prompt = counts[OUTPUTS], prompt[OUTPUTS]
    repeated = np.where(logits > 0, logits / 1.5, logits * 1.5)
    logits = np.where((counts > 0) | prompt, repeated, logits) - 0.8 * counts - 0.6 * (counts > 0)
    logits = np.where(np.isin(OUTPUTS, banned), -np.inf, logits)
    p = np.exp((logits - logits.max()) / heat)
    p[np.argsort(-p)[SUPPORT:]] = 0
    full = np.zeros(VOCAB)
    full[OUTPUTS] = p / p.sum()
    return full


def wrong(programs):
    """What is wrong with the branches."""
    records, path, lives, expected = drawn(programs)
    proposal, found = records.proposal, []
    q = np.stack(
        [dense(proposal.support[:, place], proposal.q[:, place], VOCAB) for place in range(K)], 1
    )
    if not np.isin(proposal.support[lives], [-1, *OUTPUTS]).all():
        found.append("support")
    if not np.isin(proposal.tokens[lives], OUTPUTS).all():
        found.append("tokens")
    if not np.allclose(q[lives], expected[lives], atol=1e-5):
        found.append("q")
    assert lives.sum(axis=1).tolist() == [2, 2, 1, 1, 2, 2, 2, 1]
    assert np.isin(path[:, -1], OUTPUTS).all()
    assert (path == 5).any()
    return found


@pytest.mark.more
def test_branches_propose_tokens_of_the_map_with_the_q_of_these(programs):
    assert wrong(programs) == []


@pytest.mark.slow  # `tests/sampling/test_outputs.py` has them on a toy
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            Edit(
                drafting,
                "draw",
                "jnp.where(q > 0, ids, -1)",
                "jnp.where(q > 0, jnp.searchsorted(jnp.asarray(outputs), ids), -1)",
            ),
            ["support", "q"],
        ),
        (
            Edit(
                penalties,
                "add_output",
                "columns_of(outputs, jnp.asarray(tokens))",
                "jnp.asarray(tokens)",
            ),
            ["q"],
        ),
    ],
)
def test_columns_taken_for_ids_are_caught(programs, edit, expected):
    with edited([edit]):
        assert wrong(programs) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("penalties.add_output(rows, output, self._outputs)", "rows"),
        ("penalties.add_output(rows, output, self._outputs)", "penalties.add_output(rows, output)"),
        ("[path, drafted]", "[path]"),
        ("[path, drafted]", "[drafted]"),
    ],
)
def test_branches_that_forget_what_they_said_are_caught(programs, monkeypatch, old, new):
    source = textwrap.dedent(inspect.getsource(ExpansionSteps.draw))
    assert source.count(old) == 1
    made: dict = {}
    exec(compile(source.replace(old, new), "<edited>", "exec"), vars(expansion_steps), made)
    monkeypatch.setattr(ExpansionSteps, "draw", made["draw"])
    assert wrong(programs) == ["q"]
