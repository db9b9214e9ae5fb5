"""A forward over a tree of tokens gives each token the logits that its path gives it, token by
token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous
from ssd_jax.models.token_tree import Tree
from ssd_jax.system.new_arrays import zeros
from ssd_jax.testing import tiny
from tests.kernels.attention_cases import entries_on, tree
from tests.models.golden import runner

NODES = 7
NOWHERE = BLOCK
"""A position outside the pages."""

COMPILED = pytest.param(
    "cpu", marks=pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
)


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
            jnp.asarray(tokens),
            length + depth[None],
            jnp.full((1, len(paths)), length + 1),
            pages,
            Contiguous(),
            Tree(branches, branch_and_path[None], written[None]),
        )
        return module.logits(hidden[0]), pages

    branches = zeros(run.model.branch_struct(1, NODES, 1))
    return step(run.parameters, run.pages, branches)


@pytest.mark.parametrize("attention", ["xla", COMPILED])
@pytest.mark.parametrize("length", [5, 60], ids=["one block", "a path over a block's edge"])
def test_each_token_has_the_logits_of_its_path(tiny_checkpoint, attention, length):
    rng = np.random.default_rng(1)
    paths = jnp.asarray([0, *tree(rng, NODES)], jnp.int32)
    prompt = rng.integers(0, tiny.TOKENS, (1, length)).astype(np.int32)
    tokens = rng.integers(0, tiny.TOKENS, (1, NODES + 1)).astype(np.int32)

    run = runner(tiny_checkpoint, slots=1, attention=attention)
    run(prompt)
    before = np.asarray(run.pages)
    logits, pages = forward(run, tokens, paths, length)
    np.testing.assert_array_equal(pages[:, :, length + 1 :], before[:, :, length + 1 :])
    for row, path in enumerate(paths):
        nodes = [0, *(entry + 1 for entry in entries_on(int(path)))]
        expected = run(tokens[:, nodes], length)[0, -1]
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)
