"""Programs that read all of what they may, as on GPUs, in variants by how far that is."""

import dataclasses

import pytest

from ssd_jax import LLM, SamplingParams
from ssd_jax.devices.programs import paged as paged_programs
from ssd_jax.devices.programs.paged import PagedPrograms
from ssd_jax.kernels.tree_attention import xla
from ssd_jax.models.execution import Execution
from tests.checkpoints import tiny_pair
from tests.selection import cases

BLOCK = 128
CONTEXT = 4 * BLOCK
PROMPT = "to be or not to be, that is the question. "
LENGTHS = (20, 118, 60)  # of prompts; the second text goes on beyond a block
SETTINGS = {
    "ar": {},
    "sd": {"k": 3},
    "ssd": {"k": 2, "budget": 6, "draft_placement": "inline"},
    "ssd, pages": {"k": 2, "budget": 6, "draft_placement": "inline", "kv_memory": "1MiB"},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("reaches"))


@pytest.fixture
def used(monkeypatch):
    """Names of the programs that ran, of attention as on GPUs and of short blocks."""
    usual, reaching, names = Execution.for_platform, PagedPrograms.select_reach, []

    def as_on_gpus(platform, dtype, **choices):
        return dataclasses.replace(usual(platform, dtype, **choices), attention="xla_static")

    def noted(self, name, end):
        names.append(reaching(self, name, end))
        return names[-1]

    monkeypatch.setattr(Execution, "for_platform", as_on_gpus)
    monkeypatch.setattr(PagedPrograms, "select_reach", noted)
    monkeypatch.setattr(paged_programs, "_SHORT", BLOCK)
    for module in (paged_programs, xla):
        monkeypatch.setattr(module, "STATIC_BLOCK", BLOCK)
    return names


def texts(checkpoints, name):
    target, draft = checkpoints
    mode, given = name.split(",")[0], SETTINGS[name]
    with LLM(
        target,
        mode=mode,
        draft=None if mode == "ar" else draft,
        slots=3,
        context=CONTEXT,
        dtype="float32",
        verify="coupled",
        compile_cache="off",
        chat_template=False,
        **given,
    ) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
        prompts = [llm.tokenizer.encode(PROMPT * 4)[:length] for length in LENGTHS]
        return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(checkpoints):
    return texts(checkpoints, "ar")


@pytest.mark.parametrize(
    "name", [*cases(["ar", "sd", "ssd, pages"], "ar"), pytest.param("ssd", marks=pytest.mark.slow)]
)
def test_programs_by_reach_leave_texts_as_they_are_and_short_texts_read_little(
    checkpoints, expected, used, name
):
    assert texts(checkpoints, name) == expected
    kinds = {"ar": {"forward"}, "sd": {"forward", "start", "step"}}
    for kind in kinds.get(name, {"forward", "expand", "grow"}):
        assert {use[2:] for use in used if use[0] == kind} == {(), (BLOCK,)}


def test_a_program_that_reads_too_little_is_caught(checkpoints, expected, used, monkeypatch):
    reaching = PagedPrograms.select_reach
    monkeypatch.setattr(
        PagedPrograms, "select_reach", lambda self, name, end: reaching(self, name, end - 12)
    )
    assert texts(checkpoints, "ar") != expected


@pytest.mark.parametrize(
    ("capacity", "unit", "expected"),
    [
        (512, 512, (512,)),
        (2048, 512, (2048,)),
        (8192, 512, (2048, 8192)),
        (131072, 512, (2048, 8192, 32768, 131072)),
        (5120, 640, (1280, 5120)),
    ],
)
def test_each_reach_is_a_quarter_of_the_next_in_whole_units(capacity, unit, expected):
    assert paged_programs._reaches(capacity, unit) == expected
