"""Where two outputs part."""

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.compare.pairs import pair_up
from tests.tools.compare.builders import generation, pair, refused


@pytest.mark.parametrize(
    ("a", "b", "kind", "position", "tokens", "common"),
    [
        (generation(1, 2, 3), generation(1, 2, 3), "identical", None, (None, None), (1, 2, 3)),
        (generation(), generation(), "identical", None, (None, None), ()),
        (generation(1, 2, 3), generation(1, 7, 3), "fork", 1, (2, 7), (1,)),
        (generation(5), generation(6, 7), "fork", 0, (5, 6), ()),
        (generation(1, 2), generation(1, 2, 3), "end", 2, (None, 3), (1, 2)),
        (generation(1, 2, 3), generation(1, 2), "end", 2, (3, None), (1, 2)),
        (generation(), generation(4), "end", 0, (None, 4), ()),
        (refused(), generation(1), "refused", None, (None, None), ()),
        (refused(), refused(), "refused", None, (None, None), ()),
        (None, generation(1), "missing", None, (None, None), ()),
    ],
)
def test_a_pair_knows_its_first_difference(a, b, kind, position, tokens, common):
    found = pair(a, b)
    assert (found.kind, found.position, found.tokens, found.common) == (
        kind,
        position,
        tokens,
        common,
    )


def test_prompts_of_either_run_are_paired_in_prompt_order():
    a = {2: generation(1, index=2), 0: generation(1)}
    b = {0: generation(1), 1: generation(1, index=1)}
    pairs = pair_up(a, b)
    assert [found.prompt_index for found in pairs] == [0, 1, 2]
    assert [found.kind for found in pairs] == ["identical", "missing", "missing"]


@pytest.mark.parametrize("b", [{3: generation(1, index=3)}, {0: refused()}])
def test_runs_without_a_common_answer_are_refused(b):
    with pytest.raises(InputError, match=r"no prompt has an answer in both.*0 to 0 against"):
        pair_up({0: generation(1)}, b)
