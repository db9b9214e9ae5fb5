"""A draft's branches off trees are the trees that it proposes behind the same texts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.opening.models import open_model
from ssd_jax.devices.programs.batch_sizes import BatchSizes
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.trees import draft_programs as tree_draft_programs
from ssd_jax.devices.trees.branch_draft import TreeBranchDraft
from ssd_jax.devices.trees.draft_programs import TREES, TreeDraftPrograms
from ssd_jax.devices.trees.drafter import TreeDrafter
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.roles.records import (
    ExpansionRequest,
    SlotOpening,
    draft_batch,
    no_promotion,
    record_request,
)
from ssd_jax.sampling import penalties
from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.prediction import predict_bonus
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.testing import tiny
from tests.models.every_mechanism import in_windows
from tests.models.golden import our_logits
from tests.sampling.edits import Edit, edited
from tests.sampling.rows import rows
from tests.sampling.trees import path_of

SLOTS, NODES, K, M = 3, 7, 3, 5
SHAPE = TreeShape(nodes=NODES, depth=K)
PAGING = Paging(128, SLOTS)
REQUESTS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.6, presence_penalty=0.5),
)


def drafting(rule):
    return Drafting(k=K, support=64, rule=rule, branches=M, nodes=NODES, predict="noise")


class FixedRates(RankRates):
    """Rates that learn nothing, so that they do not depend on what was drafted before."""

    def observe(self, visits, *, hot):
        pass


@pytest.fixture(
    scope="module",
    params=[
        "coupled",
        "ratio",
        pytest.param("coupled, windows shorter than paths", marks=pytest.mark.more),
    ],
)
def parts(tmp_path_factory, request):
    """The programs that draft in turn, the draft's weights, its rule, and its checkpoint."""
    rule, _, windows = request.param.partition(", ")
    family, changes = ("granite", in_windows(2)) if windows else ("qwen3", {})
    path = tmp_path_factory.mktemp("trees") / "draft"
    opened = open_model(str(tiny.write_checkpoint(path, family, **changes)), "float32")
    sizes = {"slots": SLOTS, "context": 100, "tokens": tiny.TOKENS, "paging": PAGING}
    plain = TreeDraftPrograms(opened.model, **sizes, drafting=drafting(rule).in_turn, shape=SHAPE)
    return plain, opened.load(), rule, path


@pytest.fixture(scope="module")
def drafts(parts):
    return drafts_of(parts)


def drafts_of(parts):
    """How a draft that branches is made, and one that drafts in turn; and their checkpoint."""
    plain, weights, rule, path = parts
    branching = TreeExpansionPrograms(plain, drafting(rule))
    assert branching.shape.width == SHAPE.width
    return (
        lambda: TreeBranchDraft(branching, weights, rates=FixedRates(branching.shape)),
        lambda: TreeDrafter(plain, weights, rates=FixedRates(SHAPE)),
        path,
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


def proposed_behind(new_drafter, texts, limit=K):
    """What the drafter proposes behind a text of each slot: parents, and tokens with their q."""
    drafter = new_drafter()
    open_all(drafter, texts)
    batch = draft_batch(SLOTS, 1)
    for slot, text in enumerate(texts):
        drafter.prefill(slot, text.tokens[:-1], 0, last=True)
        batch.pending[slot], batch.position[slot] = text.tokens[-1], len(text.tokens) - 1
        batch.tokens[slot, 0], batch.counts[slot] = text.tokens[-1], 1
        batch.limit[slot] = batch.room[slot] = limit
    parents = np.asarray(drafter.propose(batch).parents)
    return parents, jax.tree.map(np.asarray, drafter.proposal())


def trees_behind(new_drafter, texts, limit=K):
    """The trees [(tokens, parents)] that the drafter proposes behind a text of each slot."""
    parents, (tokens, lengths, *_) = proposed_behind(new_drafter, texts, limit)
    return nodes_of(tokens, parents, lengths)


def nodes_of(tokens, parents, lengths):
    """The trees [(tokens, parents)] of all slots."""
    tokens, parents, lengths = map(np.asarray, (tokens, parents, lengths))
    return [
        (tokens[slot, : lengths[slot]].tolist(), parents[slot, : lengths[slot]].tolist())
        for slot in range(SLOTS)
    ]


def expand(draft, slots=range(SLOTS)):
    counts = np.zeros((SLOTS, K + 1), np.int32)
    counts[slots] = M
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


def promote(draft, texts, choose, drafts=(0,) * SLOTS, slots=range(SLOTS)):
    """Ends the round of these slots with an outcome: (row, t*, winner, tree) of `choose(slot)`.

    Slots with `drafts` get a tree just in time.
    """
    promotion = no_promotion(SLOTS, K, nodes=NODES)
    for slot in slots:
        text, (row, token, winner, (tokens, parents)) = texts[slot], choose(slot)
        committed = [*path_tokens(text, row), token]
        text.tokens += committed
        text.tree = tokens, parents
        promotion.position[slot], promotion.pending[slot] = len(text.tokens) - 1, token
        promotion.committed[slot, : len(committed)] = committed
        promotion.winner[slot], promotion.limit[slot] = winner, len(tokens)
        promotion.node[slot] = row
        promotion.tokens[slot, : len(tokens)] = tokens
        promotion.parents[slot, : len(tokens)] = parents
    request = record_request(promotion)._replace(drafts=np.array(drafts, np.int32))
    records = draft.record(request)
    if any(drafts):
        assert records.lengths().tolist() == [*drafts]
        found = nodes_of(records.tokens(), records.parents(), records.proposal().length)
        for slot in slots:
            texts[slot].tree = found[slot]
    return records


def missed(texts):
    """Outcomes that no branch was prepared for, behind the last row of each slot's tree."""
    return lambda slot: (len(texts[slot].tree[0]), 7, -1, ([], []))


def check_q(new_drafter, texts, records, limit=K):
    """Records keep the q that the drafter draws their first nodes from."""
    proposal = jax.tree.map(np.asarray, records.proposal())
    wanted = proposed_behind(new_drafter, texts, limit)[1]
    for slot in range(SLOTS):
        if REQUESTS[slot].temperature == 0:
            continue
        for node in range(proposal.length[slot]):
            assert proposal.tokens[slot, node] == wanted.tokens[slot, node]
            order = [np.argsort(answer.support[slot, node]) for answer in (proposal, wanted)]
            for name in ("support", "q"):
                both = (getattr(answer, name)[slot, node] for answer in (proposal, wanted))
                one, other = (array[at] for array, at in zip(both, order, strict=True))
                np.testing.assert_allclose(one, other, atol=1e-5)


def check_classes(draft, records, drawn=True):
    """Records keep the class of the probability that each node was drawn with."""
    record, proposal = jax.device_get(draft._record), jax.tree.map(np.asarray, records.proposal())
    for slot in range(SLOTS):
        for node in range(proposal.length[slot]):
            is_token = proposal.support[slot, node] == proposal.tokens[slot, node]
            q = proposal.q[slot, node][is_token].sum()
            expected = np.searchsorted(EDGES, q, side="right") if drawn else UNKNOWN
            assert record.q_class[slot, node] == expected


def check_bonus(path, text, node, bonus):
    """Outcomes of a sampled row are ranked by q and the noise of its bonus, without its children.

    Args:
      node, bonus: of the branches of slot 1.
    """
    for row in set(node.tolist()):
        accepted = path_tokens(text, row)
        logits = our_logits(path, np.array([[*text.tokens, *accepted]]))[:, -1]
        ranked = predict_bonus(
            jnp.asarray(logits),
            rows({"temperature": REQUESTS[1].temperature, "seed": (5, 0), "request": 1}),
            jnp.array([len(text.tokens) - 1]),
            jnp.array([len(accepted)]),
            lambda size=logits.shape[1]: penalties.empty(1, size),
            tokens=tiny.TOKENS,
            count=SHAPE.ranks,
            rule="ratio",
        )
        others = [token for token in ranked[0].tolist() if token not in children(text, row)]
        found = bonus[node == row].tolist()
        assert found == others[: len(found)]


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


def begun(new_draft):
    """A draft, the texts of its slots, and the branches behind their prompts."""
    draft, texts = new_draft(), prompts()
    open_all(draft, texts)
    promotion = no_promotion(SLOTS, K, nodes=NODES)
    for slot, text in enumerate(texts):
        draft.prefill(slot, text.tokens, 0)
        promotion.position[slot] = len(text.tokens) - 1
        promotion.pending[slot] = text.tokens[-1]
    draft.record(record_request(promotion))
    return draft, texts, expand(draft)


def test_branches_are_the_trees_behind_their_outcomes(drafts):
    new_draft, new_drafter, path = drafts
    draft, texts, branches = begun(new_draft)
    check(new_drafter, texts, branches)
    picks = itertools.cycle([lambda rows: 0, deepest, lambda rows: M - 1])
    for round_index in range(5):
        limit = 4 if round_index == 3 else NODES  # a tree cut short
        records = promote(draft, texts, won(branches, next(picks), limit))
        if draft.support > 1:
            check_q(new_drafter, texts, records)
            check_classes(draft, records)
        branches = expand(draft)
        check(new_drafter, texts, branches)
        if draft.support > 1 and round_index == 2:
            check_bonus(path, texts[1], branches.trees.node[1], branches.bonus[1])
    # A miss behind a deep row, with nothing to verify but the token itself.
    promote(draft, texts, missed(texts))
    branches = expand(draft)
    check(new_drafter, texts, branches)
    # A miss behind the pending token, with a chain that the draft did not make.
    records = promote(draft, texts, lambda slot: (0, 11, -1, ([5, 9], [0, 1])))
    given = jax.tree.map(np.asarray, records.proposal())
    assert (given.support[:, :2] == given.tokens[:, :2, None])[..., 0].all()
    assert (given.q[:, :2, 0] == 1).all()
    assert (given.support[:, :2, 1:] == -1).all()
    check_classes(draft, records, drawn=False)
    branches = expand(draft)
    check(new_drafter, texts, branches)
    promote(draft, texts, won(branches, deepest))
    check(new_drafter, texts, expand(draft))


def test_a_tree_drafted_after_a_miss_is_the_one_that_mode_sd_proposes(drafts):
    new_draft, new_drafter, _ = drafts
    draft, texts, branches = begun(new_draft)
    promote(draft, texts, won(branches, deepest))
    expand(draft)
    for limit in (K, 2):  # behind a branch's tree, and behind one that was drafted
        records = promote(draft, texts, missed(texts), [limit] * SLOTS)
        if draft.support > 1:
            check_q(new_drafter, texts, records, limit)
            check_classes(draft, records)
        assert [text.tree for text in texts] == trees_behind(new_drafter, texts, limit)
        branches = expand(draft)
        check(new_drafter, texts, branches)
    # One slot has a hit beside those that draft.
    hit, miss = won(branches, deepest), missed(texts)
    promote(draft, texts, lambda slot: (miss if slot else hit)(slot), [0, K, 1])
    for slot, limit in ((0, K), (1, K), (2, 1)):
        assert texts[slot].tree == trees_behind(new_drafter, texts, limit)[slot]
    check(new_drafter, texts, expand(draft))


def test_a_branch_that_has_grown_since_it_was_read_becomes_the_tree_that_was_read(drafts):
    new_draft, new_drafter, _ = drafts
    draft, texts, branches = begun(new_draft)
    for _ in range(2):
        promote(draft, texts, won(branches, deepest))
        counts = np.full((SLOTS, K + 1), M, np.int32)
        nothing = np.zeros(SLOTS, bool), np.zeros((SLOTS, K), np.int32)
        answer = draft.expand(ExpansionRequest(counts, *nothing, forwards=1))
        branches = answer.branches(1)
        answer.grow()
        records = promote(draft, texts, won(branches, deepest))
        if draft.support > 1:
            check_q(new_drafter, texts, records, 1)
        branches = expand(draft)
        check(new_drafter, texts, branches)


@pytest.fixture
def few(drafts, monkeypatch):
    """Has rounds of slot 0 alone run a batch of 1, or again all slots."""
    draft = drafts[0]()
    kinds = draft._programs, draft._programs.base

    def use(size, *, anew=False):
        for programs in kinds:
            sizes = BatchSizes((size, SLOTS) if size < SLOTS else (SLOTS,))
            if size < SLOTS:
                if anew or not any(f"batch {size}" in name for name in programs.names):
                    programs.compile_batch(size, TREES)
                sizes.add(size, [TREES])
            monkeypatch.setattr(programs, "batch_sizes", sizes)

    return use


def rounds_of_few(drafts):
    """What a draft makes while all slots have rounds, then slot 0 alone, then slots 0 and 2."""
    draft, texts, branches = begun(drafts[0])
    seen = []

    def round_of(slots, choose, drafted=(0,) * SLOTS):
        records = promote(draft, texts, choose, drafted, slots)
        proposal = jax.tree.map(np.asarray, records.proposal())
        branches = expand(draft, slots)
        idle = [slot for slot in range(SLOTS) if slot not in slots]
        assert (proposal.length[idle] == 0).all()
        assert (branches.bonus[idle] == -1).all()
        arrays = *proposal, *branches[:3], *branches.trees
        seen.extend(array[slots] for array in arrays)
        return branches

    branches = round_of([0, 1, 2], won(branches, deepest), (K, 0, K))
    for _ in range(2):
        branches = round_of([0], won(branches, deepest))
    branches = round_of([0], missed(texts), (K, 0, 0))
    branches = round_of([0], won(branches, deepest))
    texts[2] = Text([5, 9, 11, 30], 4)
    draft.open(SlotOpening(2, REQUESTS[2], 2, pages=(2,), prompt=4))
    draft.prefill(2, texts[2].tokens, 0)
    hit, begins = won(branches, deepest), (0, 40, -1, ([], []))
    round_of([0, 2], lambda slot: begins if slot else hit(slot))
    return seen


of_both_rules = pytest.mark.parametrize(
    "parts", ["ratio", pytest.param("coupled", marks=pytest.mark.more)], indirect=True
)


@of_both_rules
def test_trees_of_few_slots_are_those_of_all_slots(drafts, few):
    few(SLOTS)
    every = rounds_of_few(drafts)
    few(1)
    found = rounds_of_few(drafts)
    for one, other in zip(every, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@of_both_rules
@pytest.mark.parametrize("fault", [False, pytest.param(True, marks=pytest.mark.more)])
def test_a_slot_above_those_that_propose_has_no_tree_left(drafts, few, monkeypatch, fault):
    """It has none in its last round, and its tree of the round before was judged already."""
    if fault:
        monkeypatch.setattr(tree_draft_programs, "_without_nodes", lambda trees: trees)
    few(1, anew=fault)
    drafter, texts = drafts[1](), prompts()
    open_all(drafter, texts)
    for slot, text in enumerate(texts):
        drafter.prefill(slot, text.tokens[:-1], 0, last=True)
    lengths = []
    for live, limit in (([0, 2], K), ([0], 1)):  # which takes a single forward
        batch = draft_batch(SLOTS, 1)
        for slot in live:
            batch.pending[slot] = batch.tokens[slot, 0] = texts[slot].tokens[-1]
            batch.position[slot] = len(texts[slot].tokens) - 1 + len(lengths)
            batch.counts[slot], batch.limit[slot], batch.room[slot] = 1, limit, limit
        drafter.propose(batch)
        lengths.append(np.asarray(drafter.proposal().length).tolist())
    assert lengths[0][1] == 0 < lengths[0][2]
    assert (lengths[1][2] > 0) == fault


FLAWS = {
    "keys of other runs": ("jnp.maximum(run - 1, 0)", "jnp.maximum(run - 2, 0)"),
    "the record keeps its keys": ("slots[:, None] & (run > 0)", "slots[:, None] & (run < 0)"),
    "hits get the tree of another round": ("slots = drafts > 0", "slots = drafts >= 0"),
}


@pytest.mark.parametrize("parts", ["coupled"], indirect=True)
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_fault_in_adopting_a_drafted_tree_is_caught(parts, flaw):
    with edited([Edit(TreeExpansionPrograms, "_adopt_spec", *FLAWS[flaw])]):
        drafts = drafts_of(parts)
    with pytest.raises(AssertionError):
        test_a_tree_drafted_after_a_miss_is_the_one_that_mode_sd_proposes(drafts)
