"""A draft checkpoint with a reduced output vocabulary changes no text and no law.

Two models are compiled for all of it: one over a worker process, whose programs an inline draft
shares, and one for the law under the ratio rule.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs import program_spec
from ssd_jax.llm.llm import LLM
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import Drafting
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.rounds import walk
from ssd_jax.tools.distill.scoring import judge
from ssd_jax.tools.distill.shards import Sample
from tests.checkpoints import tiny_drafts
from tests.fakes.instrument import changing_proposals
from tests.llm import law
from tests.llm.policies import by_policy
from tests.llm.runs import outputs, requests
from tests.sampling.evidence import ALPHA

EVENS = np.array([*range(0, 256, 2), tiny.EOS, tiny.END_OF_TURN, tiny.PAD])
WITHOUT_A_LETTER = np.array([5, 40, *law.LETTERS[::2], 150, tiny.EOS, tiny.END_OF_TURN, tiny.PAD])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Four slots, coupled; the draft is the target but for the tokens that it cannot say."""
    root = tmp_path_factory.mktemp("reduced")
    target = tiny.write_checkpoint(root / "target", "qwen2")
    opened = tiny_drafts.open_target(target)
    draft = tiny_drafts.write(root / "draft", opened, EVENS, layers=2)
    with LLM(
        str(target),
        mode="ssd",
        draft=str(draft),
        context=320,
        dtype="float32",
        exact="bitwise",
        verify="coupled",
        slots=4,
        k="3",
        budget="8",
        draft_placement="process",
        compile_cache=jax.config.jax_compilation_cache_dir,  # both processes compile once
    ) as llm:
        llm.loaded.worker.patience = 120.0
        yield llm


@pytest.fixture(scope="module")
def inline(many):
    """The same model with the draft in its own process."""
    return dataclasses.replace(many.loaded, worker=None)


def equal(alone, spoken):
    assert [one.token_ids for one in alone] == [other.token_ids for other in spoken]
    metrics = [one.metrics for one in spoken]
    return np.concatenate([metric["acceptance_by_position"] or [[0, 0]] for metric in metrics])


@pytest.mark.more
def test_sampled_and_greedy_text_is_the_same_in_all_modes_and_placements(many, inline):
    asked = requests(many, "coupled")
    alone = outputs(many, asked, "ar")
    token_ids = {token for one in alone for token in one.token_ids}
    assert token_ids & {*EVENS.tolist()}
    assert token_ids - {*EVENS.tolist()}
    inside = dataclasses.replace(many.config)
    for spoken in (
        outputs(many, asked, "sd"),
        outputs(many, asked, "ssd"),
        by_policy(_With(many, inline, inside), asked, backup="draft", fan_out="geometric"),
    ):
        accepted, judged = equal(alone, spoken).sum(axis=0)
        assert 0.1 * judged < accepted < 0.9 * judged
    assert many.loaded.worker.counters["starts"] == 1


@dataclasses.dataclass
class _With:
    """A model as `by_policy` takes it, with other roles."""

    model: LLM
    loaded: object
    config: object

    def __getattr__(self, name):
        return getattr(self.model, name)


@pytest.mark.more
def test_rounds_are_those_that_teacher_forcing_predicts(many):
    """What `ssd-jax distill --stage=evaluate` says of a draft, the engine does with it."""
    prompts = [[1 + i, 40, 7 * i % 250] * (1 + i % 3) for i in range(8)]
    free = many.generate(prompts, SamplingParams(max_tokens=40), mode="ar")
    asked = []
    for place, (prompt, output) in enumerate(zip(prompts, free, strict=True)):
        stops = (output.token_ids[5 + 4 * place],) if place % 2 else ()  # in the middle of a round
        params = SamplingParams(max_tokens=33 + place, stop_token_ids=stops)
        asked.append(many.request(prompt, params, place))
    spoken = outputs(many, asked, "sd")
    assert {one.finish_reason for one in spoken} == {"stop", "length"}
    texts = [
        Sample(
            tokens=np.array([*request.prompt_ids, *one.token_ids], np.int32),
            prompt_length=len(request.prompt_ids),
        )
        for request, one in zip(asked, spoken, strict=True)
    ]
    target = (many.target.model, many.loaded.parameters)
    draft = (many.draft.model, many.draft.load())
    judged = judge(target, draft, texts, tokens=many.tokenizer.size, longest=64)
    agreed = [(one.rank == 0).astype(float) for one in judged]
    assert 0.1 < np.mean(np.concatenate(agreed)) < 0.9
    for one, agreements in zip(spoken, agreed, strict=True):
        expected = walk([agreements], 3).tokens_per_call if len(agreements) > 1 else None
        assert one.metrics["acceptance_length"] == pytest.approx(expected)


@pytest.mark.more
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_of_a_law_within_the_map_everything_is_accepted(many, mode):
    """The draft's noise of a token is the target's, wherever its column is, and so is what each
    has heard when it has said some of it itself."""
    bias = dict.fromkeys([96, 98, 100, 200], 60.0)
    params = SamplingParams(
        max_tokens=60,
        ignore_eos=True,
        temperature=1.5,
        logit_bias=bias,
        repetition_penalty=1.3,
        presence_penalty=0.8,
        frequency_penalty=0.4,  # the others know only the first time, which is soon past
    )
    (output,) = many.generate(["0101010101"], params, mode=mode)
    assert {*output.token_ids} == {*bias}
    accepted, judged = np.array(output.metrics["acceptance_by_position"]).T
    np.testing.assert_array_equal(accepted, judged)
    assert output.metrics["hit_rate"] in (None, 1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target, and a draft that cannot say one of the three letters."""
    target, _ = law.write_checkpoints(tmp_path_factory.mktemp("law"))
    opened = tiny_drafts.open_target(target)
    path = target.parent / "reduced"
    draft = tiny_drafts.write(path, opened, WITHOUT_A_LETTER, layers=2, noise=0.1)
    return target, draft


@pytest.fixture(scope="module")
def drafted(checkpoints):
    """One token after the other, from a q over the whole map."""
    return law.open_llm(checkpoints, "sd", proposal_support="full")


@pytest.fixture(scope="module")
def laws(checkpoints):
    return law.laws_of(checkpoints[0])


@pytest.mark.slow  # `tests/sampling` and `tests/devices` have it by array and by branch
def test_texts_follow_the_law_where_a_likely_token_is_outside_the_map(drafted, laws):
    missed = sum(
        p
        for law_of_texts in laws.values()
        for text, p in law_of_texts.items()
        if law.LETTERS[1] in text
    )
    assert missed > 0.5  # of 2
    metrics = law.assert_lawful(drafted, laws, drafted.engine, law.MANY)
    histograms = [metric["acceptance_histogram"] for metric in metrics]
    rounds = np.sum([np.pad(shape, (0, 4))[:4] for shape in histograms if shape], axis=0)
    assert (rounds[:3] > 0).all()


@pytest.mark.slow  # the mutants of `tests/speculation` have it on a toy
def test_columns_that_get_the_id_of_the_next_one_are_caught(drafted, laws):
    def misnamed(proposal):
        support = np.asarray(proposal.support)
        ids = np.roll(WITHOUT_A_LETTER, -1)[np.searchsorted(WITHOUT_A_LETTER, support)]
        return proposal._replace(support=np.where(support < 0, -1, ids).astype(np.int32))

    engine = law.engine_with(drafted, "sd", changing_proposals(misnamed))
    found, _ = law.run(engine, law.requests(drafted, law.MANY))
    assert min(law.p_values(laws, found).values()) <= ALPHA


@pytest.mark.slow
def test_texts_of_branches_follow_the_law_where_a_likely_token_is_outside_the_map(
    checkpoints, laws
):
    settings = {"saguaro_c": 0.5, "proposal_support": "2", "fan_out": "measured"}
    llm = law.open_llm(checkpoints, "ssd", budget="4", backup="draft", **settings)
    metrics = law.assert_lawful(llm, laws, llm.engine, law.MANY)
    assert 0.1 < np.mean([metric["hit_rate"] for metric in metrics]) < 0.95


VOCAB, OUTPUTS = 49_152, 8_192


@pytest.fixture(scope="module")
def one_row():
    """Programs of one row of a narrow draft of a real vocabulary, not compiled."""
    config = dataclasses.replace(
        ModelConfig.from_hf(tiny.config("llama", vocab_size=VOCAB, num_hidden_layers=1)),
        tie_embeddings=False,
        output_size=OUTPUTS,
    )
    model = FunctionalModel(
        config,
        Execution.for_platform("cpu", "bfloat16"),
        output_ids=np.arange(0, 2 * OUTPUTS, 2, dtype=np.int32),
    )
    drafting = Drafting(k=2, support=64, rule="ratio", branches=3, predict="noise", confident=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_spec, "compile_all", lambda jobs, *_: dict(jobs))
        room = {"slots": 1, "context": 32, "tokens": VOCAB}
        base = DraftPrograms(model, **room, drafting=drafting)
        return base, ExpansionPrograms(base)


@pytest.mark.more
@pytest.mark.parametrize("name", ["step", pytest.param("grow", marks=pytest.mark.slow)])
def test_a_step_makes_nothing_as_wide_as_the_vocabulary(one_row, name):
    """It reads rows of the embedding, and some of what has been said, and copies neither."""
    base, expansion = one_row
    job = base["step", 2] if name == "step" else expansion["grow"]
    arrays = made(job.compile(None).as_text())
    assert any(kind == "f32" and shape[-1:] == (OUTPUTS,) for kind, shape in arrays)
    assert not [(kind, shape) for kind, shape in arrays if VOCAB in shape]


def made(text):
    """Kinds and shapes of arrays that a compiled program makes; within a fusion none is made."""
    found, fused = set(), False
    for line in text.splitlines():
        if line and not line[0].isspace():
            fused = "fused" in line.split("(")[0] or "wrapped" in line.split("(")[0]
        match = re.match(r"\s+(?:ROOT )?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match and not fused and match[2] not in ("parameter", "tuple", "get-tuple-element"):
            shapes = re.findall(r"(\w+)\[([\d,]+)\]", match[1])
            found |= {(kind, tuple(map(int, shape.split(",")))) for kind, shape in shapes}
    return found
