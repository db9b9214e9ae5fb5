"""The guesses of a round are those that its outcome was looked up among."""

from __future__ import annotations

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.traces.guesses import Guesses, draw_guesses, example, guesses
from ssd_jax.tools.traces.read import EngineLanes, Slice


def engine(*rows):
    """Rounds of one request, each (committed, prepared)."""
    target = [
        Slice("", n, n + 1, {"round": n, "rows": [{"request": 0, "tokens": t, "prepared": p}]})
        for n, (t, p) in enumerate(rows)
    ]
    return EngineLanes(name="ssd", target=target, drafts=[])


LANES = engine(([7], []), ([1, 2, 9], [[7, 8], [5], [6]]), ([4], [[3], [2], [8, 9]]), ([5], []))


def test_an_outcome_stands_beside_what_was_prepared_for_it():
    first, second = guesses(LANES)
    assert first == Guesses(1, [7], [[7, 8], [5], [6]])
    assert second == Guesses(2, [1, 2, 9], [[3], [2], [8, 9]])
    assert first.hit
    assert second.hit
    assert not Guesses(1, [1, 9], [[9], [8]]).hit


def test_the_example_is_a_hit_behind_accepted_tokens():
    assert example(LANES).round == 2
    with pytest.raises(InputError, match="no prepared branches"):
        example(engine(([7], []), ([8], [])))


@pytest.mark.parametrize("committed", [[1, 2, 9], [1, 77], [3]])
def test_the_picture_shows_the_tokens_of_every_k_and_the_one_that_came(
    committed, tmp_path, monkeypatch
):
    kind = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(kind, "savefig", lambda figure, *_, **__: drawn.append(figure))
    found = Guesses(2, committed, [[3], [2], [8, 9]])
    draw_guesses(found, lambda ids: f" t{ids[0]}", tmp_path / "guesses.png")
    (axes,) = drawn[0].axes
    words = [text.get_text() for text in axes.texts]
    assert {" t3", " t2", " t8", " t9", f" t{committed[-1]}"} <= {*words}
    assert ("a hit" if found.hit else "a miss") in axes.get_title(loc="left")
