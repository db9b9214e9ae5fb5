"""Training a tiny draft on a tiny target's own text: it learns, stops, goes on, is exported."""

import dataclasses
import os
import signal
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from ssd_jax.checkpoints.drafts.checkpoint import TENSORS, identity_of
from ssd_jax.devices.opening.models import open_model
from ssd_jax.errors import InputError
from ssd_jax.tools.distill.manifest import file_digests
from ssd_jax.tools.distill.settings import DraftSettings, TrainSettings
from ssd_jax.tools.distill.training import loop
from ssd_jax.tools.distill.training.journal import METRICS, PICTURE, read_journal, write_picture
from ssd_jax.tools.distill.training.loop import run
from ssd_jax.tools.distill.training.losses import Sums
from ssd_jax.tools.distill.training.model import export, make_draft
from ssd_jax.tools.distill.training.step import StepReport
from tests.checkpoints.tiny_drafts import open_target
from tests.models.golden import Runner
from tests.tools.distill.training import own_text

LENGTH = 32
SETTINGS = TrainSettings(
    steps=20,
    batch=16,
    length=2 * LENGTH,
    learning_rate=1e-2,
    warmup=5,
    compute="float32",
    devices=1,
    held_out=8,
    evaluate_every=10,
    save_every=10,
    chunk=512,
    acceptance=0.5,
)
DRAFT = DraftSettings(layers=(0,), output_size=240)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(own_text.write_sharp_target(tmp_path_factory.mktemp("t") / "target"))


@pytest.fixture(scope="module")
def texts(target):
    return own_text.write(target, texts=192, prompt=4, length=LENGTH, top=16)


def train(target, texts, work, draft=DRAFT, progress=None, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return run(settings, draft, target=target, samples=texts, work=work, progress=progress)


def journal(work):
    """Lines without their times."""
    entries = read_journal(work / METRICS)
    return [{k: v for k, v in entry.items() if k != "tokens_per_second"} for entry in entries]


def files(work):
    """Leaves of the last checkpoint, and the exported tensors."""
    (last,) = (work / loop.CHECKPOINTS).glob("step_20")
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = checkpointer.restore(last.absolute() / "state")
    return leaves, (work / loop.DRAFT / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(target, texts, tmp_path_factory):
    """An uninterrupted run."""
    work = tmp_path_factory.mktemp("whole")
    return work, train(target, texts, work)


def same(work, other):
    leaves, tensors = files(work)
    expected, others = files(other)
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, expected[name])
    assert tensors == others
    assert journal(work) == journal(other)


@pytest.mark.more
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(
    target, texts, uninterrupted, tmp_path
):
    for step in (3, 14):  # before and after the first checkpoint

        def kill(done, _steps, _line, step=step):
            if done == step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(target, texts, tmp_path, progress=kill)
    assert [entry["step"] for entry in journal(tmp_path)][-1] == 14
    result = train(target, texts, tmp_path)
    assert (result.step, result.stop_reason) == (20, "")
    same(tmp_path, uninterrupted[0])


@pytest.mark.more
def test_a_signal_and_a_time_limit_stop_at_a_step_with_a_checkpoint(
    target, texts, uninterrupted, tmp_path
):
    def interrupt(step, _steps, _line):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    result = train(target, texts, tmp_path, progress=interrupt)
    assert result.stop_reason == "SIGTERM"
    assert 6 <= result.step < 10
    assert signal.getsignal(signal.SIGTERM) is before
    over = train(target, texts, tmp_path, max_seconds=1e-9)
    assert (over.step, over.stop_reason) == (result.step + 1, "max_seconds = 1e-09 are over")
    assert train(target, texts, tmp_path).stop_reason == ""
    same(tmp_path, uninterrupted[0])


@pytest.mark.more
def test_a_finished_run_is_not_trained_again(target, texts, uninterrupted):
    work, result = uninterrupted
    steps = []
    assert train(target, texts, work, progress=lambda *line: steps.append(line)) == result
    assert steps == []


@pytest.mark.slow
def test_training_raises_agreement_on_text_it_has_not_seen(target, texts, tmp_path):
    draft = dataclasses.replace(DRAFT, embedding="trained", head="trained")
    longer = {"steps": 150, "evaluate_every": 150, "save_every": 150}
    result = train(target, texts, tmp_path, draft=draft, **longer)
    before, after = journal(tmp_path)[0]["held_out"], result.held_out
    assert after["agreement"] > max(1.5 * before["agreement"], before["agreement"] + 0.1)
    assert after["acceptance"] > max(1.3 * before["acceptance"], before["acceptance"] + 0.05)
    assert after["loss"] < 0.8 * before["loss"]


@pytest.mark.more
def test_a_picture_is_drawn_if_that_can_be_done(uninterrupted, tmp_path, monkeypatch):
    """A full disk, and no matplotlib, are said; neither is an error."""
    work = tmp_path
    (work / METRICS).write_bytes((uninterrupted[0] / METRICS).read_bytes())
    assert write_picture(work) == ""
    picture = (work / PICTURE).read_bytes()
    assert picture.startswith(b"\x89PNG")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left" in write_picture(work)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'ssd-jax[plot]'" in write_picture(work)
    assert (work / PICTURE).read_bytes() == picture


@pytest.mark.more
@pytest.mark.parametrize("store", ["bfloat16", "int8"])
def test_the_engine_loads_the_exported_draft(target, texts, uninterrupted, tmp_path, store):
    """The engine's logits of the loaded draft give the held-out figures of training."""
    made = make_draft(DRAFT, target.config, _output_ids(uninterrupted[0]))
    leaves, _ = files(uninterrupted[0])
    names = sorted(name for name in made.model.checkpoint_structs() if name not in made.tied)
    trained = {name: leaves[f"{i:05}"] for i, name in enumerate(names)}
    identity = identity_of(target, made.tied)
    export(
        tmp_path / "draft",
        made,
        trained,
        store=store,
        target=identity,
        tokenizer=target.tokenizer,
        acceptance=0.51249,
    )
    opened = open_model(str(tmp_path / "draft"), "float32", target=target)
    assert opened.checkpoint.acceptance == 0.512
    tokens = np.stack([text.tokens for text in texts[:8]])
    engine = Runner(opened.model, opened.load(), slots=8)(tokens)
    stored = {
        name: array if array.ndim == 1 else _rounded(array) for name, array in trained.items()
    }
    target_model = own_text.parameters_of(target)
    frozen = {name: target_model[source] for name, source in made.tied.items()}
    frozen["lm_head.weight"] = frozen["lm_head.weight"][made.output_ids]
    expected = Runner(made.model, made.model.assemble({**stored, **frozen}), slots=8)(tokens)
    tolerance = 1e-4 if store == "bfloat16" else 0.1
    assert np.abs(engine - expected).max() <= tolerance * np.abs(expected).max()


def test_a_draft_is_replaced_only_by_a_whole_one(target, uninterrupted, tmp_path, monkeypatch):
    made = make_draft(DRAFT, target.config, _output_ids(uninterrupted[0]))
    leaves, _ = files(uninterrupted[0])
    names = sorted(name for name in made.model.checkpoint_structs() if name not in made.tied)
    trained = {name: leaves[f"{i:05}"] for i, name in enumerate(names)}
    place, identity = tmp_path / "draft", identity_of(target, made.tied)

    def write(store):
        export(place, made, trained, store=store, target=identity, tokenizer=target.tokenizer)
        return file_digests(place)

    first = write("bfloat16")
    assert first

    def full(*_args, **_named):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write("int8")
    assert file_digests(place) == first
    assert write("int8") != first
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_training_that_does_not_fit_is_refused_before_anything_is_compiled(
    target, texts, uninterrupted, tmp_path, compilations
):
    with pytest.raises(InputError, match=r"train\.seed was 0, is 1"):
        train(target, texts, uninterrupted[0], seed=1)
    with pytest.raises(InputError, match="texts was"):
        train(target, texts[:-1], uninterrupted[0])
    with pytest.raises(InputError, match="rows do not spread evenly over 3 devices"):
        train(target, texts, tmp_path, devices=3)
    with pytest.raises(InputError, match="there are"):
        train(target, texts, tmp_path, devices=999)
    with pytest.raises(InputError, match="layers: 7 is out of range"):
        train(target, texts, tmp_path, draft=DraftSettings(layers=(7,)))
    with pytest.raises(InputError, match="leave nothing to learn from"):
        train(target, texts, tmp_path, held_out=999)
    bare = [dataclasses.replace(text, top_ids=None, top_probs=None) for text in texts]
    with pytest.raises(InputError, match="no cached probabilities"):
        train(target, bare, tmp_path)
    assert not [event for event in compilations if event]


def test_training_goes_on_from_a_draft_that_is_there(target, texts, uninterrupted, tmp_path):
    begin = dataclasses.replace(DRAFT, begin=str(uninterrupted[1].draft))
    result = train(target, texts, tmp_path, draft=begin, steps=1, learning_rate=1e-9)
    [before, _, _] = journal(tmp_path)
    assert before["held_out"] == pytest.approx(uninterrupted[1].held_out, rel=1e-2)
    found, expected = (
        load_file(draft / TENSORS) for draft in (result.draft, uninterrupted[1].draft)
    )
    for name in found:
        np.testing.assert_allclose(_rounded(found[name]), _rounded(expected[name]), atol=1e-6)
    with pytest.raises(InputError, match="begin was"):
        train(target, texts, tmp_path, steps=1, learning_rate=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 1)}, "has num_layers 1, the other keys of \\[draft\\] say 2"),
        ({"head": "trained"}, "a trained head of fewer ids"),
        ({"begin": "nowhere"}, "nowhere"),
    ],
)
def test_a_draft_that_cannot_be_gone_on_from_is_refused(
    target, texts, uninterrupted, tmp_path, changes, message
):
    begin = dataclasses.replace(DRAFT, **({"begin": str(uninterrupted[1].draft)} | changes))
    with pytest.raises(InputError, match=message):
        train(target, texts, tmp_path, draft=begin)
    assert not list(tmp_path.iterdir())


@pytest.mark.more
def test_training_from_a_draft_keeps_its_tensors(target, texts, tmp_path):
    settings = dataclasses.replace(DRAFT, embedding="trained")
    made = train(target, texts, tmp_path / "first", draft=settings, steps=1)
    begin = dataclasses.replace(settings, begin=str(made.draft))
    train(target, texts, tmp_path / "second", draft=begin, steps=1)
    with pytest.raises(InputError, match='has trained its embedding; set embedding = "trained"'):
        train(
            target, texts, tmp_path / "third", draft=dataclasses.replace(begin, embedding="frozen")
        )


def test_figures_without_the_target_are_left_out(target, texts, tmp_path, monkeypatch):
    sums = Sums(positions=4, loss=8, cross_entropy=8, kl=0, overlap=0, agreements=0)
    programs = (lambda state, *_: (state, StepReport(sums, 1.0)), lambda *_: sums)
    monkeypatch.setattr(loop.Trainer, "programs", lambda _self: programs)
    bare = [dataclasses.replace(text, top_ids=None, top_probs=None) for text in texts]
    alone = {"kl": 0.0, "acceptance": 0.0, "cross_entropy": 1.0}
    lines = []
    train(target, bare, tmp_path, progress=lambda *line: lines.append(line[2]), steps=2, **alone)
    for entry in journal(tmp_path):
        found = entry.get("held_out", entry)
        assert found["loss"] == found["cross_entropy"] == 2
        assert not found.keys() & {"kl", "acceptance", "agreement"}
    assert "acceptance" not in lines[-1]
    assert "held-out" not in lines[-1]
    assert write_picture(tmp_path) == ""
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_not_finite_is_an_error_with_a_remedy(target, texts, tmp_path):
    wrong = [dataclasses.replace(text, top_probs=text.top_probs * np.nan) for text in texts]
    with pytest.raises(InputError, match="lower learning_rate"):
        train(target, wrong, tmp_path)
    assert not list((tmp_path / loop.CHECKPOINTS).iterdir())


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("held_out", "rate", "message"),
    [
        (1, 1e25, "step 1: the loss of held-out text is nan"),
        (0, 1e39, "step 1: some weights are no numbers"),
    ],
)
def test_a_last_step_that_leaves_no_numbers_makes_no_draft(
    target, texts, tmp_path, held_out, rate, message
):
    with pytest.raises(InputError, match=message):
        train(target, texts, tmp_path, steps=1, warmup=0, learning_rate=rate, held_out=held_out)
    assert not (tmp_path / loop.DRAFT).exists()
    assert not list((tmp_path / loop.CHECKPOINTS).iterdir())


def _output_ids(work):
    from safetensors.numpy import load_file

    return load_file(work / loop.DRAFT / "model.safetensors")["output_ids"]


def _rounded(array):
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16).astype(np.float32)
