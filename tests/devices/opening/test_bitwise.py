"""The bitwise mode: a row's logits are the same bits whatever runs beside it, and at any width."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from ssd_jax import LLM, SamplingParams, compat
from ssd_jax.devices.opening.exactness import costs_nothing, widths_agree
from ssd_jax.devices.target.programs import Programs
from ssd_jax.loading import load as loading
from ssd_jax.testing import tiny
from tests.devices.forwards import Forwards, forwards_only
from tests.selection import cases

shipped = pytest.mark.shipped

WIDTHS = (0, 1, 3, 8)
SLOTS, CONTEXT = 3, 320
TWO_WIDTHS: dict = {"slots": SLOTS, "context": CONTEXT, "widths": (0, 3), "accepts": True}
FAMILY_OF = {"float32": "qwen3", "bfloat16": "llama", "int8": "qwen2"}
TEXT = np.random.default_rng(5).integers(0, tiny.TOKENS, 150)  # two blocks of keys
PROMPTS = ["0101010101", "to be or not to be, that is the question", "one two one two one"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One key/value head each, so that no product has rows by accident."""
    root = tmp_path_factory.mktemp("bitwise")
    return {
        dtype: tiny.write_checkpoint(root / dtype, family, num_key_value_heads=1)
        for dtype, family in FAMILY_OF.items()
    }


@pytest.fixture(scope="module", params=cases(FAMILY_OF, "bfloat16"))
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def forwards(checkpoints, dtype):
    room = {"slots": SLOTS, "context": CONTEXT, "widths": WIDTHS}
    return Forwards.of(checkpoints[dtype], dtype, **room)


@pytest.fixture(scope="module")
def alone(checkpoints, dtype):
    """Logits of the text with one slot, token by token."""
    if not compat.widths_can_agree(dtype):
        pytest.skip(f"this JAX computes rows of {dtype} in another way at other numbers of rows")
    one = Forwards.of(checkpoints[dtype], dtype, slots=1, context=CONTEXT, widths=(0,))
    return one.logits(TEXT, 0)


@shipped
@pytest.mark.parametrize("width", WIDTHS)
def test_a_rows_logits_are_the_same_bits_at_every_width_and_number_of_slots(forwards, alone, width):
    np.testing.assert_array_equal(forwards.logits(TEXT, width), alone)


@shipped
@pytest.mark.parametrize("first", [1, 2, 5])
def test_where_a_block_of_tokens_begins_does_not_matter(forwards, alone, first):
    np.testing.assert_array_equal(forwards.logits(TEXT, 8, first=first), alone)


@shipped
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize(
    ("slot", "neighbour"),
    [(1, None), (2, None), (0, (7, 0)), (1, (11, 40)), (2, (3, 300)), (0, (250, CONTEXT - 10))],
)
def test_neither_slot_nor_neighbours_change_a_bit(forwards, alone, width, slot, neighbour):
    found = forwards.logits(TEXT, width, slot=slot, neighbour=neighbour)
    np.testing.assert_array_equal(found, alone)


@shipped
def test_other_tokens_have_other_logits(alone):
    assert len(np.unique(alone, axis=0)) == len(TEXT)


class OneBit(Programs):
    """Programs of which one forward is off by the last bit of a single logit."""

    def __getitem__(self, name):
        program = super().__getitem__(name)

        def perturbed(*arguments):
            logits, pages = program(*arguments)
            next_to_it = np.nextafter(np.asarray(logits)[0, 5], np.float32(np.inf))
            return logits.at[0, 5].set(next_to_it), pages

        return perturbed if name == ("forward", 0) else program


class Uneven(Programs):
    """Programs whose forwards, but the widest, give other logits: enough to change the text."""

    def __getitem__(self, name):
        program = super().__getitem__(name)

        def perturbed(*arguments):
            logits, pages = program(*arguments)
            return -logits, pages

        narrow = name[0] == "forward" and name[1] < self.verification.widths[-1]
        return perturbed if narrow else program


def test_one_bit_of_one_logit_at_one_width_is_noticed(checkpoints):
    off = Forwards.of(checkpoints["bfloat16"], "bfloat16", programs=OneBit, **TWO_WIDTHS)
    assert not widths_agree(off.programs, off.parameters)
    off.programs.widths = (3,)
    assert widths_agree(off.programs, off.parameters)


class Deviating(Programs):
    """Programs of which one `accept`, that of `width`, gives another `what`."""

    width, what = None, ""

    def __getitem__(self, name):
        program = super().__getitem__(name)

        def perturbed(logits, drafted, sampling, *others):
            packed, bonus, history = program(logits, drafted, sampling, *others)
            place = 0 if self.what == "k" else 1
            here = sampling.top_p[0] < 1 if self.what == "token under top-p" else 1
            return packed.at[0, place].add(here), bonus, history

        return perturbed if name == ("accept", self.slots, self.width) else program


def test_a_verification_that_differs_at_one_width_is_noticed(checkpoints):
    off = Forwards.of(checkpoints["bfloat16"], "bfloat16", programs=Deviating, **TWO_WIDTHS)
    assert widths_agree(off.programs, off.parameters)
    for off.programs.width in TWO_WIDTHS["widths"]:
        for off.programs.what in ("k", "token", "token under top-p"):
            case = off.programs.width, off.programs.what
            assert not widths_agree(off.programs, off.parameters), case


def load(path, **settings) -> LLM:
    settings = {"exact": "bitwise", "slots": SLOTS, "context": CONTEXT} | settings
    return LLM(str(path), mode="sd", draft="ngram", k="3", compile_cache="off", **settings)


def texts(llm, mode):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    return [output.token_ids for output in llm.generate(PROMPTS, params, mode=mode)]


@pytest.mark.more
def test_where_widths_disagree_bitwise_runs_all_at_the_widest_and_auto_falls_back(
    checkpoints, monkeypatch
):
    path = checkpoints["bfloat16"]
    expected = texts(load(path), "sd")
    monkeypatch.setattr(loading, "Programs", Uneven)
    bitwise, auto = load(path), load(path, exact="auto")
    assert (bitwise.loaded.exact, bitwise.loaded.programs.widths) == ("bitwise", (3,))
    assert texts(bitwise, "ar") == texts(bitwise, "sd") == expected
    assert (auto.loaded.exact, auto.loaded.programs.widths) == ("distribution", (0, 3))
    assert texts(auto, "ar") != expected  # what the fallback is for


@pytest.mark.more
def test_kernels_of_each_width_are_not_believed_because_a_few_rows_agree(checkpoints, monkeypatch):
    path = checkpoints["float32"]
    monkeypatch.setattr(compat, "widths_can_agree", lambda compute: compute != "float32")
    bitwise, auto = load(path, dtype="float32"), load(path, dtype="float32", exact="auto")
    assert (bitwise.loaded.exact, bitwise.loaded.programs.widths) == ("bitwise", (3,))
    assert texts(bitwise, "ar") == texts(bitwise, "sd")
    assert (auto.loaded.exact, auto.loaded.programs.widths) == ("distribution", (0, 3))


@pytest.mark.parametrize(
    ("version", "backend", "expected"),
    [
        ((0, 10, 2), "cpu", {"float32": True, "bfloat16": True, "int8": True}),
        ((0, 11, 0), "cpu", {"float32": False, "bfloat16": True, "int8": False}),
        ((0, 12, 0, 1), "cpu", {"float32": False, "bfloat16": True, "int8": False}),
        ((0, 12, 0, 1), "tpu", {"float32": True, "bfloat16": True, "int8": True}),
    ],
)
def test_which_kernels_can_agree_depends_on_the_jax_version(
    monkeypatch, version, backend, expected
):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert {dtype: compat.widths_can_agree(dtype) for dtype in expected} == expected


@pytest.mark.more
@pytest.mark.parametrize("dtype", FAMILY_OF)
def test_auto_is_bitwise_where_that_costs_nothing(checkpoints, dtype):
    with forwards_only(("forward", "accept")):
        auto = load(checkpoints[dtype], exact="auto", dtype=dtype)
        law = load(checkpoints[dtype], exact="distribution", dtype=dtype)
    execution = auto.target.model.execution
    free = costs_nothing(execution)
    can = execution.linear == "cpu" or compat.widths_can_agree(dtype)
    assert auto.loaded.exact == ("bitwise" if free and can else "distribution")
    assert law.loaded.exact == "distribution"
    assert free is (dtype != "float32")


@pytest.mark.more
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="this machine has one core: one thread count only"
)
@shipped
@pytest.mark.parametrize(
    "what",
    [["bfloat16"], pytest.param([*FAMILY_OF, "texts"], marks=pytest.mark.slow)],
    ids="-".join,
)
def test_logits_and_texts_are_the_same_bits_on_one_core_and_on_all(tmp_path, what):
    """A model wide enough that XLA splits its products over threads."""
    path = tiny.write_checkpoint(
        tmp_path / "wide",
        num_hidden_layers=1,
        hidden_size=256,
        intermediate_size=1536,
        head_dim=64,
        vocab_size=4160,
    )
    command = [sys.executable, "-m", "tests.devices.opening.bitwise_worker"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    workers = [
        subprocess.Popen(
            [*command, cores, str(path), *what],
            cwd=Path(__file__).parents[3],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for cores in ("one", "all")
    ]
    one, every = (worker.communicate()[0] for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0]
    assert one == every
    found = json.loads(one)
    for hashes in found["logits"].values():
        assert len(set(hashes.values())) == 1  # and the same at both widths
    if "texts" in what:
        alone, spoken = found["texts"]
        assert alone == spoken
        assert len(alone) == 32
