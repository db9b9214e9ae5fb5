"""A forward over a tree of tokens gives each token the logits that its path gives it, token by
token."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous
from ssd_jax.kernels.tree_attention import variant, xla
from ssd_jax.models import decoder
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.models.token_tree import Tree
from ssd_jax.system.new_arrays import zeros
from ssd_jax.testing import tiny
from tests.kernels.attention_cases import entries_on, tree
from tests.models.every_mechanism import AT_ONCE, SIDE_BY_SIDE, in_windows
from tests.models.golden import FLOAT32, ON_GPUS, ON_TPUS, Runner, parameters
from tests.models.golden_logits import GOLDENS, NAMES
from tests.sampling.edits import Edit, edited
from tests.selection import cases

NODES = 7
NOWHERE = 2 * BLOCK
"""A position outside the pages."""

COMPILED = pytest.param(
    {"attention": "cpu"},
    marks=pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler"),
    id="cpu",
)
XLA = pytest.param({}, id="xla")


def runner(directory: Path, *, slots=1, devices=1, expert_parallel=False, **changes):
    checkpoint = open_checkpoint(str(directory))
    model = FunctionalModel(
        checkpoint.config.for_context(NOWHERE),
        dataclasses.replace(FLOAT32, **changes),
        mesh=mesh_of(jax.devices()[:devices]) if devices > 1 else None,
        expert_parallel=expert_parallel,
    )
    return Runner(model, parameters(checkpoint, model), slots=slots, context=NOWHERE)


@functools.cache
def tree_of(directory: Path, length: int):
    """A prompt, the tokens of a tree behind it and their paths, and the logits of each as the last
    of a text by itself."""
    rng = np.random.default_rng(1)
    run = runner(directory, slots=NODES + 1)
    paths = [0, *tree(rng, NODES)]
    ids = min(tiny.TOKENS, run.model.config.vocab_size)
    prompt = rng.integers(0, ids, length).astype(np.int32)
    tokens = rng.integers(0, ids, NODES + 1).astype(np.int32)
    nodes = [[0, *(entry + 1 for entry in entries_on(path))] for path in paths]
    texts = np.zeros((NODES + 1, length + NODES + 1), np.int32)
    for row, path in enumerate(nodes):
        texts[row, : length + len(path)] = [*prompt, *tokens[path]]
    ends = [length + len(path) - 1 for path in nodes]
    return prompt, tokens, jnp.asarray(paths, jnp.int32), run(texts)[np.arange(NODES + 1), ends]


def forward(run, tokens, paths, length):
    """Logits and pages after one forward of the token at `length`, of which the tree's are
    descendants: it goes to the pages, they to the scratch."""
    depth = jnp.asarray([len(entries_on(int(path))) for path in paths], jnp.int32)

    @jax.jit
    def step(parameters, pages, branches):
        module = run.model.module(parameters)
        branch_and_path = jnp.stack([jnp.zeros_like(paths), paths], axis=-1)
        written = jnp.where(depth == 0, length, NOWHERE)
        hidden, pages, _ = module.hidden(
            jnp.asarray(tokens)[None],
            length + depth[None],
            jnp.full((1, len(paths)), length + 1),
            pages,
            Contiguous(),
            Tree(branches, branch_and_path[None], written[None]),
        )
        return module.logits(hidden[0]), pages

    branches = zeros(run.model.branch_struct(1, NODES, 1))
    return step(run.parameters, run.pages, branches)


def error(directory: Path, length: int, **how) -> float:
    """The largest difference between the logits of a tree's tokens and those of their texts."""
    prompt, tokens, paths, expected = tree_of(directory, length)
    run = runner(directory, **how)
    run(prompt[None])
    before = np.asarray(run.pages)
    logits, pages = forward(run, tokens, paths, length)
    behind = np.s_[:, :, length + 1 :]
    np.testing.assert_array_equal(np.asarray(pages)[behind], before[behind])
    return float(np.abs(np.asarray(logits) - expected).max())


@pytest.mark.parametrize("changes", [XLA, COMPILED])
@pytest.mark.parametrize("length", [5, 60], ids=["one block", "a path over a block's edge"])
def test_each_token_has_the_logits_of_its_path(tiny_checkpoint, changes, length):
    assert error(tiny_checkpoint, length, **changes) < 1e-4


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("name", cases(NAMES, "gemma2", "gpt-oss"))
def test_so_has_each_of_every_family(name):
    """Behind several of its windows, of 12 tokens."""
    assert error(GOLDENS / name, 60, attention="cpu") < 1e-4


@pytest.mark.parametrize("changes", [ON_TPUS, ON_GPUS], ids=["tpu", "gpu"])
@pytest.mark.parametrize(
    "name", cases(["cohere2", "gemma3", "gpt-oss", "hunyuan-moe", "phi3-long"], "gpt-oss")
)
def test_so_has_each_as_on_accelerators(name, changes):
    assert error(GOLDENS / name, 60, **changes) < 1e-4


MADE = {
    "at once": AT_ONCE,
    "side by side": SIDE_BY_SIDE,
    "windows shorter than paths": in_windows(2),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {name: tiny.write_checkpoint(root / name, "granite", **MADE[name]) for name in MADE}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("at once", {}),
        *(
            pytest.param(name, changes, marks=pytest.mark.more)
            for name in MADE
            for changes in ({}, ON_TPUS, ON_GPUS, {"attention": "cpu"})
            if (name, changes) != ("at once", {})
            if changes.get("attention") != "cpu" or why_missing() is None
        ),
    ],
)
def test_so_has_each_of_a_decoder_with_every_mechanism(made, name, changes):
    assert error(made[name], 130, **changes) < 1e-4


@pytest.mark.parametrize(
    ("name", "devices", "expert_parallel", "changes"),
    [
        ("at once", 2, True, {}),
        *(
            pytest.param(name, devices, shared, changes, marks=pytest.mark.more)
            for name, devices, shared in (
                ("at once", 2, False),
                ("at once", 4, False),
                ("side by side", 4, False),
            )
            for changes in ({}, ON_TPUS, ON_GPUS)
        ),
    ],
)
def test_devices_that_share_a_decoder_give_what_one_gives(
    made, name, devices, expert_parallel, changes
):
    how = changes | {"devices": devices, "expert_parallel": expert_parallel}
    assert error(made[name], 130, **how) < 1e-4


ATTENTION = xla, "_attend"
MUTANTS = {
    "a window that ends where the path begins": Edit(
        variant.AttentionVariant, "first_seen", "count = visible + ", "count = visible + 0 * "
    ),
    "a window that counts a path as one token": Edit(
        variant.AttentionVariant,
        "first_seen",
        "jax.lax.population_count(scratch.paths[..., 1])",
        "(scratch.paths[..., 1] > 0)",
    ),
    "all of a path in its window": Edit(
        variant.AttentionVariant, "within", "scratch is None or self.window is None", "True"
    ),
    "a sink for the pages and one for the path": Edit(
        *ATTENTION,
        "output = normalise(state)",
        "extra = jnp.exp(variant.tiled_sinks(*grouped.shape[1:3]) - state.maximum)\n"
        "    output = normalise(state._replace(total=state.total + extra[..., None]))",
    ),
    "paths without a soft cap": Edit(
        *ATTENTION,
        "in_window, group, score)",
        "in_window, group, lambda products: products * variant.scale_for(head_dim))",
    ),
    "paths with the usual scale": Edit(
        *ATTENTION,
        "in_window, group, score)",
        "in_window, group, lambda products: variant.cap(products * head_dim**-0.5))",
    ),
    "experts for the pages' tokens alone": Edit(
        decoder.CausalLM,
        "hidden",
        "(visible > 0) | jnp.any(paths != 0, axis=2)",
        "(visible > 0) & jnp.all(paths == 0, axis=2)",
    ),
    "queries that turn where they are written": Edit(
        decoder.CausalLM,
        "hidden",
        "rotations(self.config, positions)",
        "rotations(self.config, write_positions)",
    ),
}
SHORTER = "all of a path in its window"
"""Shows where windows are shorter than paths."""


@pytest.mark.parametrize("fault", cases(MUTANTS, *(name for name in MUTANTS if name != SHORTER)))
def test_a_fault_in_what_a_path_sees_shows(made, fault):
    path = made["windows shorter than paths" if fault == SHORTER else "at once"]
    tree_of(path, 130)
    jax.clear_caches()
    with edited([MUTANTS[fault]]):
        assert error(path, 130) > 0.01
    jax.clear_caches()
