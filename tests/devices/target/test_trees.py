"""A target's forward over a tree, and the keys and values that its verification leaves behind."""

import dataclasses

import jax
import numpy as np
import pytest

from ssd_jax.devices.opening.models import open_model
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.devices.target import tree_programs
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.target.target import DeviceTarget
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling import verification
from ssd_jax.sampling.judgement import coupled, outcome
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.testing import tiny
from tests.devices.forwards import forwards_only
from tests.models.golden import execution_as
from tests.sampling.edits import Edit, edited
from tests.sampling.trees import path_of, random_parents

SLOTS, NODES, DEPTH, TEXT = 2, 7, 4, 70  # a text longer than a block of attention
KINDS = ("forward", "accept", "forward_tree", "accept_tree")
PENALISED = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.8, presence_penalty=0.9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("trees") / "target", "qwen3")
    opened = open_model(str(path), "float32", bitwise=True, trees=True)
    return opened, opened.load()


@dataclasses.dataclass
class Target:
    """Programs of a target with trees, and what its slots hold; slot 1 stays idle."""

    programs: Programs
    parameters: list[jax.Array]

    def __post_init__(self):
        self.pages, self.history = self.programs.new_pages(), self.programs.new_history()
        vocab = self.programs.model.config.vocab_size
        self.rows = SamplingRows(SLOTS, vocab)
        self.place(0, IDLE)

    def place(self, token: int, position: int) -> None:
        """Sets the pending token; arrays are new, since programs may still read the last ones."""
        self.pending = np.array([token, 0], np.int32)
        self.lengths = np.array([position, IDLE], np.int32)

    def open(self, params: SamplingParams) -> None:
        self.rows.set(SlotOpening(0, params, 3))

    def forward(self, token: int, position: int) -> jax.Array:
        self.place(token, position)
        nothing = np.zeros((SLOTS, DEPTH), np.int32)
        text = self.parameters, self.pages, None, self.pending, nothing, self.lengths
        logits, self.pages = self.programs["forward", 0](*text)
        return logits

    def next(self, token: int, position: int) -> int:
        """The token after one at a position, which runs alone."""
        logits = self.forward(token, position)
        blank = self.programs.verification.blank(SLOTS)
        sampling, start = self.rows.on_device(), self.lengths
        packed, _, self.history = self.programs["accept", SLOTS, 0](
            logits, blank, sampling, start, self.history, np.int32(0)
        )
        return int(packed[0, 1])

    def tree(self, token: int, position: int, tokens, parents, length: int):
        """(logits [m + 1, V], outcome [K + 3]) of a tree behind a token at a position."""
        self.place(token, position)
        nodes, rows = np.zeros((2, SLOTS, NODES), np.int32)
        nodes[0], rows[0] = tokens, parents
        logits, self.pages, branches = self.programs["forward_tree",](
            self.parameters, self.pages, None, self.pending, nodes, rows, self.lengths
        )
        lengths = np.array([length, 0], np.int32)
        drafted = Proposal(nodes, lengths, nodes[:, :, None], np.ones((SLOTS, NODES, 1), "f4"))
        sampling, start = self.rows.on_device(), self.lengths
        packed, _, self.history, self.pages, _ = self.programs["accept_tree",](
            logits, drafted, rows, branches, self.pages, None, sampling, start, self.history
        )
        return np.asarray(logits)[: NODES + 1], np.asarray(packed)[0]


def target(model) -> Target:
    opened, parameters = model
    with forwards_only(KINDS):
        return Target(programs_of(opened), parameters)


def plain_text(model, params: SamplingParams, count: int) -> list[int]:
    """A text of `count` tokens whose first is 5, each of which runs alone."""
    one_by_one, text = target(model), [5]
    one_by_one.open(params)
    while len(text) < count:
        text.append(one_by_one.next(text[-1], len(text) - 1))
    return text


def text_by_trees(model, params: SamplingParams, count: int, plain: list[int]) -> list[int]:
    """The same by trees, which know some of the plain text and other tokens beside it."""
    trees, text, rng = target(model), [5], np.random.default_rng(0)
    trees.open(params)
    while len(text) < count:
        parents = random_parents(rng, 1, NODES)[0]
        tokens = rng.integers(0, 60, NODES)
        for node in range(NODES):  # of each row's children the last is right
            depth = len(path_of(parents, node + 1))
            if len(text) + depth - 1 < len(plain):
                tokens[node] = plain[len(text) + depth - 1] if node % 3 else tokens[node]
        _, packed = trees.tree(text[-1], len(text) - 1, tokens, parents, NODES)
        text += packed[1 : packed[0] + 2].tolist()
    return text[:count]


@pytest.fixture(scope="module")
def plain(model):
    return plain_text(model, PENALISED, TEXT + 20)


@pytest.mark.skipif(why_missing() is not None, reason="attention of XLA is not bitwise for trees")
def test_every_row_of_a_tree_has_the_bits_of_its_path_run_alone(model):
    rng, alone, trees = np.random.default_rng(1), target(model), target(model)
    prefix = rng.integers(0, 60, TEXT).tolist()
    for begin in (0, 1, 60, 62, 63, 64, TEXT - 1):
        for position, token in enumerate(prefix[: begin + 1]):
            alone.forward(token, position)
            trees.forward(token, position)
        tokens, parents = rng.integers(0, 60, NODES), random_parents(rng, 1, NODES)[0]
        logits, _ = trees.tree(prefix[begin], begin, tokens, parents, NODES)
        for row in range(NODES + 1):
            last = alone.forward(prefix[begin], begin)
            for depth, node in enumerate(path_of(parents, row), 1):
                last = alone.forward(int(tokens[node]), begin + depth)
            assert np.array_equal(np.asarray(last)[0], logits[row]), (begin, row)


def test_a_text_by_trees_is_the_text_token_by_token(model, plain):
    assert text_by_trees(model, PENALISED, TEXT, plain) == plain[:TEXT]


def programs_of(model, nodes=NODES):
    return Programs(
        model.model,
        slots=SLOTS,
        context=128,
        tokens=model.tokenizer.size,
        verification=Verification(widths=(0, DEPTH), rule="coupled", nodes=nodes),
    )


def test_an_accelerator_gets_a_tree_of_the_host_in_one_array(tmp_path):
    """Also where programs of trees were compiled beside those of chains."""
    path = tiny.write_checkpoint(tmp_path, "qwen3")
    with execution_as(one_array=True), forwards_only(()):
        opened = open_model(str(path), "float32", trees=True)
        chains = programs_of(opened, nodes=0)
        DeviceTarget(chains, opened.load())  # which has what sends its proposals compiled
        for programs in (programs_of(opened), chains.with_trees(NODES)):
            DeviceTarget(programs, opened.load())
            tree = jax.tree.map(lambda a: np.full(a.shape, 3, a.dtype), programs.blank_tree())
            sent = programs.to_device(tree)
            jax.tree.map(np.testing.assert_array_equal, sent, tree)
            assert isinstance(sent.q, jax.Array)


MUTANTS = {
    "noise by node in place of depth": Edit(
        verification,
        "_positions",
        "position = start[row] + 1 + topology.depth_of(path)",
        "position = start[row] + 1 + jnp.tile(jnp.arange(count), batch)",
    ),
    "penalties along the rows in place of the path": Edit(
        verification,
        "_positions",
        "block.row, block.path)",
        "block.row, (1 << topology.depth_of(block.path)) - 1)",
    ),
    "a wrong parent": Edit(
        outcome,
        "accept_equal",
        "jnp.take_along_axis(target, parents, axis=1)",
        "jnp.take_along_axis(target, jnp.roll(parents, 1, axis=1), axis=1)",
    ),
    "a draw where the text does not come": Edit(
        coupled,
        "_draw_along_paths",
        "parent[sequence, node]",
        "jnp.roll(parent, 1, axis=1)[sequence, node]",
    ),
    "keys of a rejected sibling left in the path": Edit(
        tree_programs,
        "accept_spec",
        "entries=jnp.maximum(path[:, 1:] - 1, 0)",
        "entries=jnp.maximum(path[:, 1:] - 2, 0)",
    ),
    "positions by node in place of depth": Edit(
        tree_programs,
        "forward_spec",
        "start + topology.depth_of(path)",
        "start + jnp.arange(nodes + 1)",
    ),
    "a node that sees all before it": Edit(
        tree_programs,
        "forward_spec",
        "jnp.where(start < 0, 0, path)",
        "jnp.where(start < 0, 0, topology.chain_paths(nodes))",
    ),
    "the accepted path counted to its depth": Edit(
        verification,
        "commit",
        "topology.on_path(outcome.path, ",
        "topology.on_path((1 << outcome.accepted) - 1, ",
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_in_trees_changes_the_text(model, plain, fault):
    with edited([MUTANTS[fault]]):
        assert text_by_trees(model, PENALISED, TEXT, plain) != plain[:TEXT]
