"""What one step computes does not depend on how its work is cut up, nor on who shares a row."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from ssd_jax.testing import tiny
from ssd_jax.tools.distill.settings import DraftSettings, TrainSettings
from ssd_jax.tools.distill.training.data import PackedBatch, pack
from ssd_jax.tools.distill.training.journal import means
from ssd_jax.tools.distill.training.model import first_arrays, make_draft
from ssd_jax.tools.distill.training.step import Teacher, Trainer, load_live, mesh_of, schedule
from tests.checkpoints.tiny_drafts import open_target
from tests.tools.distill.training import own_text

LENGTH, ROWS = 16, 4
SETTINGS = TrainSettings(
    steps=4,
    batch=ROWS,
    length=2 * LENGTH,
    compute="float32",
    devices=1,
    chunk=24,
    clip=0.1,
    cross_entropy=0.2,
    kl=1.0,
    acceptance=0.5,
    learning_rate=0.1,
    warmup=1,
)
DRAFT = DraftSettings(layers=(0,), output_size=200, head="trained")
IDS = np.sort(np.random.default_rng(0).permutation(tiny.TOKENS)[:200]).astype(np.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(tiny.write_checkpoint(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def texts(target):
    return own_text.write(target, texts=2 * ROWS, prompt=3, length=LENGTH, top=tiny.ROWS)


def trainer(target, draft=DRAFT, teacher=None, tied=(), **changes):
    """A trainer, its first state and what it does not change."""
    settings = dataclasses.replace(SETTINGS, **changes)
    made = make_draft(draft, target.config, IDS if draft.output_size else None)
    built = Trainer(made, teacher or Teacher(), settings, mesh_of(settings.devices))
    trained, frozen = first_arrays(made, draft, target, seed=0)
    return built, built.first_state(trained), built.fixed_arrays(frozen, list(tied))


def batch_of(texts, length=2 * LENGTH):
    packed = pack(texts, length=length, seed=0, label="texts")
    return packed.batch(range(len(packed)))


def stepped(target, batch, **changes):
    """Means of two steps on a batch, and the arrays after them."""
    built, state, fixed = trainer(target, **changes)
    step, _ = built.programs()
    found = []
    for _ in range(2):
        spread = built.spread(batch, micro_batches=built.settings.accumulation)
        state, taken = step(state, fixed, spread)
        found.append(means(taken.sums) | {"norm": float(taken.gradient_norm)})
    return found, {name: np.asarray(array) for name, array in state.trained.items()}


def looked(target, batch, **changes):
    built, state, fixed = trainer(target, **changes)
    return built.programs()[1](state, fixed, built.spread(batch))


def close(one, other):
    for first, second in zip(one[0], other[0], strict=True):
        assert first == pytest.approx(second, rel=1e-4)
    for name, array in one[1].items():
        # A hundredth of an Adam step: where a gradient is nearly 0, rounding decides about more.
        np.testing.assert_allclose(array, other[1][name], atol=0.01 * SETTINGS.learning_rate)


def test_the_rates_of_all_steps_at_once_are_those_of_each():
    settings = dataclasses.replace(SETTINGS, steps=12, warmup=5)
    rates = np.asarray(schedule(settings)(np.arange(12)))
    singly = [float(schedule(settings)(step)) for step in range(12)]
    np.testing.assert_allclose(rates, singly, rtol=1e-6)
    assert rates.argmax() == 5
    assert rates[5] == pytest.approx(settings.learning_rate)


@pytest.mark.more
def test_two_devices_with_two_micro_batches_each_do_what_one_does(target, texts):
    batch = batch_of(texts)
    one = stepped(target, batch)
    several = {"devices": 2, "accumulation": 2, "chunk": 1024, "rematerialise": True}
    close(stepped(target, batch, **several), one)
    assert len(jax.devices()) >= 2
    assert one[0][0]["loss"] != one[0][1]["loss"]


@pytest.mark.shipped
@pytest.mark.parametrize(
    ("rows", "length"), [pytest.param(8, 500, marks=pytest.mark.more), (4, 128)]
)
def test_a_step_in_bfloat16_runs_with_any_number_of_tokens(target, rows, length):
    """XLA on CPU sees through a loop of one block, and cannot run the product that follows."""
    ones, tokens = np.ones((rows, length), np.int32), np.arange(length, dtype=np.int32)
    likeliest = np.tile(np.arange(4, dtype=np.int32), (rows, length, 1))
    probs = np.full((rows, length, 4), 0.2, np.float32)
    positions = np.tile(tokens, (rows, 1))
    batch = PackedBatch(ones, positions, ones, ones > 0, ones, likeliest, probs)
    settings = {"compute": "bfloat16", "length": length, "chunk": 200}
    found, _ = stepped(target, batch, **settings)
    assert found[1]["loss"] < found[0]["loss"]


def test_an_evaluation_step_takes_no_gradients(target, texts):
    built, state, fixed = trainer(target)
    batch = batch_of(texts)
    step, look = built.programs()
    made = jax.make_jaxpr(look)(state, fixed, built.spread(batch))
    learnt = jax.make_jaxpr(step)(state, fixed, built.spread(batch, micro_batches=1))
    assert (_head_products(made), _head_products(learnt)) == (1, 2)


def _head_products(program) -> int:
    """Products whose result has a side as long as the head: logits, and its gradient."""
    lines = [line.split("dot_general") for line in str(program).splitlines()]
    results = [line[0] for line in lines if len(line) > 1]
    return sum(bool(re.search(r"[\[,]200[\],]", result)) for result in results)


def test_texts_that_share_a_row_lose_what_they_lose_alone(target, texts):
    together = batch_of(texts)
    assert together.segments.max() == 2
    alone = looked(target, batch_of(texts, length=LENGTH))
    np.testing.assert_allclose(looked(target, together), alone, rtol=1e-5)
    mixed = together._replace(segments=np.minimum(together.segments, 1))
    assert float(looked(target, mixed).loss) != pytest.approx(float(alone.loss), rel=1e-3)


def test_prompts_and_padding_do_not_count(target, texts):
    batch = batch_of(texts)
    assert float(looked(target, batch).positions) == len(texts) * (LENGTH - 3)
    nothing = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    assert not any(float(value) for value in looked(target, nothing))


def test_the_live_target_is_what_all_cached_probabilities_say(target, texts):
    teacher, tied = load_live(target, tokens=tiny.ROWS, compute="float32")
    batch = batch_of(texts)
    cached = looked(target, batch)
    bare = PackedBatch(
        *batch[:5], *(np.zeros((*batch.tokens.shape, 0), d) for d in (np.int32, np.float32))
    )
    live = looked(target, bare, teacher=teacher, tied=tied)
    np.testing.assert_allclose(live, cached, rtol=1e-3)


def test_the_target_itself_as_its_draft_has_nothing_to_learn(target, texts):
    settings = DraftSettings(layers=(0, 1))
    found = means(looked(target, batch_of(texts), draft=settings, cross_entropy=0.0))
    assert found["kl"] == pytest.approx(0, abs=1e-5)
    assert found["acceptance"] == pytest.approx(1, abs=1e-5)
    assert found["agreement"] == 1
