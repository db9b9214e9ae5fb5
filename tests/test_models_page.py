"""The page of models: as its notes say, and with every family."""

from ssd_jax.models.families.registry import FAMILIES
from tests import models_page


def test_the_page_is_what_the_notes_say():
    assert models_page.PAGE.read_text() == models_page.render(models_page.read()), (
        "python -m tests.models_page --page"
    )


def test_every_family_with_stored_logits_ran_and_none_failed():
    notes = models_page.read()
    assert {note.part for note in notes if note.state == "ran"} == {*models_page.goldens()}
    assert {note.part for note in notes} <= {*FAMILIES}
    assert not [note for note in notes if note.state == "failed"]
