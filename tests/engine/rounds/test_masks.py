"""The masks of a round: those of the text up to each position, and a grammar that stays where the
committed tokens are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ssd_jax.engine import grammar as grammar_module
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.grammar import TextGrammar, allows
from ssd_jax.engine.request import Request
from ssd_jax.engine.rounds.masks import round_masks
from ssd_jax.errors import InputError, SsdError
from ssd_jax.roles.records import Drafted, ProposedTokens
from ssd_jax.sampling.masks import ANY_TOKEN
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import FakeTarget, Letters
from tests.fakes.grammars import Successors
from tests.sampling.edits import Edit, edited

VOCAB, END = 40, 0
SUCCESSORS = {None: {1, 2}, 1: {2, 33}, 2: {1, 2, END}, 33: {END}}
EVERY = set(range(VOCAB))


def allowed(masks):
    """The tokens of each row."""
    return [{token for token in range(VOCAB) if allows(mask, token)} for mask in masks]


def text(output=()):
    grammar = Successors(SUCCESSORS, VOCAB)
    return grammar, TextGrammar(grammar, frozenset({END})), [*output]


CASES = [
    # output, proposed tokens, L, what may follow each position
    ([], [], 0, [{1, 2}]),
    ([1], [], 0, [{2, 33}]),
    ([1, 2], [1, 33, END], 3, [{1, 2, END}, {2, 33}, {END}, EVERY]),
    ([1], [2, 2, 1], 3, [{2, 33}, {1, 2, END}, {1, 2, END}, {2, 33}]),
    ([1], [1, 2, 2], 3, [{2, 33}, EVERY, EVERY, EVERY]),
    ([1], [2, 33, 2], 3, [{2, 33}, {1, 2, END}, EVERY, EVERY]),
    ([1], [2, 1, 2], 1, [{2, 33}, {1, 2, END}, EVERY, EVERY]),
]


def look_at_chains():
    for output, tokens, depth, expected in CASES:
        grammar, place, committed = text(output)
        for _ in range(2):  # looking along a proposal moves nothing
            assert allowed(place.masks(committed, tokens, None, depth)) == expected
        assert grammar.started[0].text == committed


def test_each_position_has_the_mask_of_the_text_up_to_it():
    look_at_chains()


def look_at_a_tree():
    _, place, output = text([1])
    tokens, parents = [2, 33, 1, 2, 5, 33], [0, 0, 1, 1, 1, 3]
    behind = [{2, 33}, {1, 2, END}, {END}, {2, 33}, {1, 2, END}, EVERY, {END}]
    assert allowed(place.masks(output, tokens, parents, 3)) == behind
    assert allowed(place.masks(output, tokens, parents, 2)) == [*behind[:6], EVERY]


def test_nodes_of_a_tree_have_the_masks_of_their_paths():
    look_at_a_tree()


def test_a_grammar_follows_what_is_committed_and_never_what_was_rejected():
    grammar, place, output = text()
    place.masks(output, [2, 1, 33], None, 3)
    output += [2, 2]  # the second was the bonus token
    assert allowed(place.masks(output)) == [SUCCESSORS[2]]
    assert grammar.started[0].text == [2, 2]


def look_at_all():
    look_at_chains()
    look_at_a_tree()
    test_a_grammar_follows_what_is_committed_and_never_what_was_rejected()


FAULTS = {
    "moved by drafted tokens": ("masks", "self._matcher.rollback(1)", "pass"),
    "moved by rejected tokens": ("masks", "self._matcher.rollback(1)", "self._followed += 1"),
    "the mask of the row before": ("masks", "masks[node + 1] = ", "masks[node] = "),
    "filled behind a forbidden token": (
        "masks",
        "if token not in self._ends and allows(masks[row], token):",
        "if True:",
    ),
    "filled behind an end": ("masks", "token not in self._ends and ", ""),
    "nodes deeper than L": ("masks", "if left else ()", "if True else ()"),
    "the text of the last round forgotten": (
        "masks",
        "output[self._followed :]",
        "output[self._followed + 1 :]",
    ),
    "a tree taken for a chain": ("masks", "node if parents is None else parents[node]", "node"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_masks_are_caught(fault):
    function, old, new = FAULTS[fault]
    edits = [Edit(TextGrammar, function, old, new)]
    with edited(edits), pytest.raises((AssertionError, KeyError)):
        look_at_all()


def states(*with_grammar):
    """Rows of requests, by slot, some of which have a grammar that has read one token."""
    made = {}
    for slot in with_grammar:
        _, place, output = text([1])
        made[slot] = SimpleNamespace(sequence=SimpleNamespace(grammar=place, output=output))
    return made


def rows_of(made, *without):
    plain = SimpleNamespace(sequence=SimpleNamespace(grammar=None))
    return [*made.items(), *((slot, plain) for slot in without)]


class Reading:
    """A target that says which proposals were read."""

    def __init__(self):
        self.reads = 0

    def read_tokens(self, drafted):
        self.reads += 1
        parents = None if drafted.parents is None else np.asarray(drafted.parents)
        return ProposedTokens(np.asarray(drafted.tokens), parents)


def refuse(state, error):
    raise error


def test_a_round_without_a_grammar_has_no_masks_and_reads_no_tokens():
    target = Reading()
    drafted = Drafted(np.array([2, 2]), np.full((2, 2), 2))
    assert round_masks(rows_of({}, 0, 1), 2, target, drafted, refuse) is None
    assert target.reads == 0


def test_rows_without_a_grammar_may_go_on_with_any_token():
    target, drafted = Reading(), Drafted(np.array([2, 1, 0]), np.array([[2, 1], [2, 2], [0, 0]]))
    masks = round_masks(rows_of(states(0, 2), 1), 3, target, drafted, refuse)
    assert masks is not None
    assert masks.dtype == np.int32
    assert allowed(masks[0]) == [{2, 33}, {1, 2, END}, {2, 33}]
    assert (masks[1] == ANY_TOKEN).all()
    assert allowed(masks[2]) == [{2, 33}, EVERY, EVERY]
    assert target.reads == 1


class OnManyHosts:
    """An array that no process can read alone."""

    def __array__(self, *_args, **_kwargs):
        raise RuntimeError("spans devices that are not addressable")


def test_a_proposal_is_read_by_the_target_alone_also_the_shape_of_a_tree():
    class Gathering(Reading):
        def read_tokens(self, drafted):
            return ProposedTokens(np.array([[2, 33, 1]] * 2), np.array([[0, 0, 1]] * 2))

    drafted = Drafted(np.array([0, 2]), OnManyHosts(), parents=OnManyHosts())
    masks = round_masks(rows_of(states(1)), 2, Gathering(), drafted, refuse)
    assert masks is not None
    assert allowed(masks[1]) == [{2, 33}, {1, 2, END}, {END}, {2, 33}]


def test_a_round_without_a_proposal_has_one_mask_a_row():
    masks = round_masks(rows_of(states(1)), 2, Reading(), None, refuse)
    assert masks is not None
    assert [allowed(row) for row in masks] == [[EVERY], [{2, 33}]]


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch):
    made, failed = states(0, 1), []

    def too_complex():
        raise SsdError("too complex")

    monkeypatch.setattr(made[0].sequence.grammar._matcher, "mask", too_complex)
    masks = round_masks(
        rows_of(made), 2, Reading(), None, lambda state, error: failed.append((state, str(error)))
    )
    assert failed == [(made[0], "too complex")]
    assert masks is not None
    assert [allowed(row) for row in masks] == [[EVERY], [{2, 33}]]


class Masked(FakeTarget):
    """A target that says the first token that may follow, and ends where only that may."""

    def _token(self, masks, slot, otherwise):
        return min(allowed(masks[slot])[0] - {END}, default=END) if masks is not None else otherwise

    def prefill_last(self, slot, tokens, offset, masks=None):
        pending = super().prefill_last(slot, tokens, offset)
        token = self._token(masks, 0, int(pending.bonus[0]))
        return self._saying(pending, 0, token)

    def accept(self, logits, proposal=None, masks=None):
        pending = super().accept(logits, proposal)
        for slot in range(self.slots):
            pending = self._saying(
                pending, slot, self._token(masks, slot, int(pending.bonus[slot]))
            )
        return pending

    def _saying(self, pending, row, token):
        pending.bonus[row] = pending.read().tokens[row, 0] = token
        return pending

    def forward(self, tokens, lengths, drafted=None):
        self.calls.append("forward")
        return [[9]] * self.slots, [[]] * self.slots


def ask(**more):
    grammar = Successors({None: {33}, 33: {34}, 34: {35}, 35: {END}}, VOCAB)
    params = SamplingParams(structured_outputs={"regex": "any"}, max_tokens=9)
    return Request(prompt_ids=[5], params=params, grammar=grammar, **more)


def decoded():
    """The token ids of a text that a grammar dictates, and the parameters that the target got."""
    target = Masked(lambda _prompt, _position: 9)
    engine, outputs = Engine(target, Letters, frozenset({END})), []
    engine.add(ask())
    while engine.has_work:
        outputs += [event.output for event in engine.step() if event.output is not None]
    return [output.token_ids for output in outputs], target.opened[0].params


def test_an_engine_decodes_what_a_grammar_dictates():
    texts, params = decoded()
    assert texts == [[33, 34, 35, END]]
    assert params.structured_outputs is None  # roles know no grammars


def test_an_engine_that_looks_ahead_under_a_grammar_is_caught():
    old = "if any(state.sequence.grammar is not None for state in self._running.values()):"
    with edited([Edit(Engine, "_look_ahead", old, "if False:")]):
        assert decoded()[0] != [[33, 34, 35, END]]


def test_a_grammar_that_was_not_compiled_is_refused():
    engine = Engine(Masked(lambda *_: 9), Letters, frozenset({END}))
    params = SamplingParams(structured_outputs={"json_object": True})
    with pytest.raises(InputError, match="compiled grammar"):
        engine.add(Request(prompt_ids=[5], params=params))


def test_bits_are_read_as_they_are_written():
    mask = np.array([1 << 31, -(2**31) ^ -1, 0b101], np.int64).astype(np.int32)
    assert [token for token in range(96) if grammar_module.allows(mask, token)] == [
        31,
        *range(32, 63),
        64,
        66,
    ]
