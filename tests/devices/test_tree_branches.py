"""A draft's branches off trees are the trees that it proposes behind the same texts."""

import dataclasses
import itertools

import numpy as np
import pytest

from ssd_jax.devices.opened import open_model
from ssd_jax.devices.paged_programs import Paging
from ssd_jax.devices.tree_branch_draft import TreeBranchDraft
from ssd_jax.devices.tree_draft_programs import TreeDraftPrograms
from ssd_jax.devices.tree_drafter import TreeDrafter
from ssd_jax.devices.tree_expansion_programs import TreeExpansionPrograms
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.roles.records import (
    ExpansionRequest,
    SlotOpening,
    draft_batch,
    no_promotion,
    record_request,
)
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.testing import tiny
from tests.sampling.trees import path_of

SLOTS, NODES, K, M = 3, 7, 3, 5
SHAPE = TreeShape(nodes=NODES, depth=K)
PAGING = Paging(128, SLOTS)
REQUESTS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.6, presence_penalty=0.5),
)


class FixedRates(RankRates):
    """Rates that learn nothing, so that they do not depend on what was drafted before."""

    def observe(self, visits, *, hot):
        pass


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("trees") / "draft", "qwen3")
    opened = open_model(str(path), "float32")
    sizes = {"slots": SLOTS, "context": 100, "tokens": tiny.TOKENS, "paging": PAGING}
    drafting = Drafting(k=K, support=64, rule="coupled", branches=M, nodes=NODES)
    branching = TreeExpansionPrograms(opened.model, **sizes, drafting=drafting)
    assert branching.shape.width == SHAPE.width
    plain = TreeDraftPrograms(opened.model, **sizes, drafting=drafting, shape=SHAPE)
    weights = opened.load()
    return (
        lambda: TreeBranchDraft(branching, weights, rates=FixedRates(branching.shape)),
        lambda: TreeDrafter(plain, weights, rates=FixedRates(SHAPE)),
    )


@dataclasses.dataclass
class Text:
    """A slot's text, and the tree that a target would verify behind it."""

    tokens: list[int]
    prompt: int
    start: int = 0
    tree: tuple[list[int], list[int]] = ((), ())


def prompts():
    rng = np.random.default_rng(3)
    return [
        Text(rng.integers(3, tiny.TOKENS, 9 + slot).tolist(), 9 + slot) for slot in range(SLOTS)
    ]


def open_all(draft, texts):
    for slot, text in enumerate(texts):
        opening = SlotOpening(slot, REQUESTS[slot], slot, pages=(slot,), prompt=text.prompt)
        draft.open(opening)


def trees_behind(new_drafter, texts):
    """The trees [(tokens, parents)] that the drafter proposes behind a text of each slot."""
    drafter = new_drafter()
    open_all(drafter, texts)
    batch = draft_batch(SLOTS, 1)
    for slot, text in enumerate(texts):
        drafter.prefill(slot, text.tokens[:-1], 0, last=True)
        batch.pending[slot], batch.position[slot] = text.tokens[-1], len(text.tokens) - 1
        batch.tokens[slot, 0], batch.counts[slot] = text.tokens[-1], 1
        batch.limit[slot] = batch.room[slot] = K
    drafted = drafter.propose(batch)
    tokens, parents = np.asarray(drafted.tokens), np.asarray(drafted.parents)
    lengths = np.asarray(drafter.proposal().length)
    return [
        (tokens[slot, : lengths[slot]].tolist(), parents[slot, : lengths[slot]].tolist())
        for slot in range(SLOTS)
    ]


def expand(draft):
    counts = np.full((SLOTS, K + 1), M, np.int32)
    nothing = np.zeros(SLOTS, bool)
    request = ExpansionRequest(counts, nothing, np.zeros((SLOTS, K), np.int32), forwards=K)
    return draft.expand(request).branches(K)


def check(new_drafter, texts, branches):
    """Every branch has the tree of the text that leads to it, and no two the same outcome."""
    for index in range(M):
        longer = []
        for slot, text in enumerate(texts):
            row = int(branches.trees.node[slot, index])
            accepted = path_tokens(text, row)
            token = int(branches.bonus[slot, index])
            assert token >= 0
            assert token not in children(text, row)
            tokens = [*text.tokens, *accepted, token]
            longer.append(Text(tokens, text.prompt))
        for slot, (tokens, parents) in enumerate(trees_behind(new_drafter, longer)):
            length = int(branches.lengths[slot, index])
            assert branches.tokens[slot, index, :length].tolist() == tokens
            assert branches.trees.parents[slot, index, :length].tolist() == parents
    for slot in range(SLOTS):
        outcomes = [*zip(branches.trees.node[slot], branches.bonus[slot], strict=True)]
        assert len(set(outcomes)) == M


def path_tokens(text, row):
    tokens, parents = text.tree
    return [tokens[node] for node in path_of(parents, row)]


def children(text, row):
    tokens, parents = text.tree
    return [token for token, parent in zip(tokens, parents, strict=True) if parent == row]


def promote(draft, texts, branches, choose):
    """Ends the round of every slot with an outcome: (row, t*, winner, tree) of `choose(slot)`."""
    promotion = no_promotion(SLOTS, K, nodes=NODES)
    for slot, text in enumerate(texts):
        row, token, winner, (tokens, parents) = choose(slot)
        committed = [*path_tokens(text, row), token]
        text.tokens += committed
        text.tree = tokens, parents
        promotion.position[slot], promotion.pending[slot] = len(text.tokens) - 1, token
        promotion.committed[slot, : len(committed)] = committed
        promotion.winner[slot], promotion.limit[slot] = winner, len(tokens)
        promotion.node[slot] = row
        promotion.tokens[slot, : len(tokens)] = tokens
        promotion.parents[slot, : len(tokens)] = parents
    draft.record(record_request(promotion))


def won(branches, pick, limit=NODES):
    """Outcomes that come true: of each slot, the branch `pick` of its rows."""

    def choose(slot):
        index = pick(branches.trees.node[slot].tolist())
        length = min(int(branches.lengths[slot, index]), limit)
        tree = (
            branches.tokens[slot, index, :length].tolist(),
            branches.trees.parents[slot, index, :length].tolist(),
        )
        row = int(branches.trees.node[slot, index])
        return row, int(branches.bonus[slot, index]), index, tree

    return choose


def deepest(rows):
    return rows.index(max(rows))


def test_branches_are_the_trees_behind_their_outcomes(drafts):
    new_draft, new_drafter = drafts
    draft, texts = new_draft(), prompts()
    open_all(draft, texts)
    promotion = no_promotion(SLOTS, K, nodes=NODES)
    for slot, text in enumerate(texts):
        draft.prefill(slot, text.tokens, 0)
        promotion.position[slot] = len(text.tokens) - 1
        promotion.pending[slot] = text.tokens[-1]
    draft.record(record_request(promotion))
    branches = expand(draft)
    check(new_drafter, texts, branches)
    picks = itertools.cycle([lambda rows: 0, deepest, lambda rows: M - 1])
    for round_index in range(5):
        limit = 4 if round_index == 3 else NODES  # a tree cut short
        promote(draft, texts, branches, won(branches, next(picks), limit))
        branches = expand(draft)
        check(new_drafter, texts, branches)
    # A miss behind a deep row, with nothing to verify but the token itself.
    promote(draft, texts, branches, lambda slot: (len(texts[slot].tree[0]), 7, -1, ([], [])))
    branches = expand(draft)
    check(new_drafter, texts, branches)
    # A miss behind the pending token, with a chain that the draft did not make.
    promote(draft, texts, branches, lambda slot: (0, 11, -1, ([5, 9], [0, 1])))
    branches = expand(draft)
    check(new_drafter, texts, branches)
    promote(draft, texts, branches, won(branches, deepest))
    check(new_drafter, texts, expand(draft))
