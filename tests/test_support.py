"""The page of what has run where: as its evidence says, and with everything that there is on it."""

import jax
import pytest

from ssd_jax.kernels.tree_attention.api import BACKENDS, GPU_BACKENDS
from ssd_jax.kernels.verify import api as verify_api
from tests import support
from tests.support import Note
from tests.tools.aot import specs


def test_the_page_is_what_the_evidence_says():
    assert support.PAGE.read_text() == support.render(support.read()), (
        "python -m tests.support --page"
    )


@pytest.mark.shipped
def test_every_backend_and_program_is_on_it_and_none_has_failed():
    notes = support.read()
    parts = {note.part for note in notes}
    assert {f"attention: {name}" for name in (*BACKENDS, "pallas_tpu", *GPU_BACKENDS)} <= parts
    wide = {f"attention: {name}{support.HEADS_OF_256}" for name in ("pallas_tpu", *GPU_BACKENDS)}
    assert wide <= parts
    assert {f"verification: {name}" for name in verify_api.BACKENDS} <= parts
    backends = "xla", "pallas_tpu", "pallas_gpu"
    of_experts = {f"experts: {name}, {kind}" for name in backends for kind in support.EXPERT_KINDS}
    assert of_experts <= parts
    for platform in ("cpu", "tpu", "gpu"):
        found = specs.programs(specs.config(vocab_size=1024), platform=platform)
        assert set(found) <= parts, f"survey {platform}: python -m tests.support"
    assert {note.platform for note in notes} >= {*support.COLUMNS}
    assert [note for note in notes if note.state == "failed"] == []


def test_new_notes_replace_old_ones_on_the_same():
    old = [Note("a", "cpu", "ran", "1", "x"), Note("a", "v5e", "compiled", "1", "x")]
    new = [Note("a", "cpu", "failed", "2", "y")]
    assert support.merged(old, new) == [new[0], old[1]]


def test_a_row_has_the_least_state_of_its_programs():
    notes = [
        Note("target accept 4 full", "cpu", "ran", "1", "x"),
        Note("target accept 4 greedy", "cpu", "failed", "1", "x"),
        Note("attention: xla", "cpu", "ran", "1", "x"),
    ]
    page = support.render(notes)
    assert "| target accept | failed |" in page
    assert "| attention: xla | ran |" in page
    assert "- `failed`: " in page
    assert "- `compiled`: " not in page


def test_a_backend_that_differs_or_does_not_compile_is_noted_as_failed(monkeypatch, capsys):
    place = support.Place("cpu", "cpu")
    (function, arguments), wanted = support.products("int8"), jax.numpy.zeros((4, 512))

    def parts(_place):
        yield "differs", "ran", support._try(place, function, arguments, wanted)
        yield "compiles not", "ran", support._try(place, lambda x, w: x @ x, arguments, None)
        yield "is right", "ran", support._try(place, function, arguments, function(*arguments))

    monkeypatch.setattr(support, "kernels", parts)
    monkeypatch.setattr(support, "programs", lambda _place: ())
    states = {note.part: note.state for note in support.survey(["cpu"])}
    assert states == {"differs": "failed", "compiles not": "failed", "is right": "ran"}
    assert "differs on cpu: AssertionError" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_backend_and_program_runs_on_this_gpu():
    kind = jax.devices("gpu")[0].device_kind
    assert [note for note in support.survey([kind]) if note.state != "ran"] == []
