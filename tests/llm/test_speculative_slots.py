"""Speculation with a draft model in few slots and many, off and on again, up to the last position.

Sampled requests under the ratio rule too: their draws are keyed, so the same rounds give the same
text in whatever company.
"""

import collections

import pytest

from ssd_jax import LLM, SamplingParams
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.target.programs import Programs
from tests.checkpoints import tiny_pair
from tests.llm.runs import outputs

K, CONTEXT = 3, 128  # also the size of a page
PROMPTS = [
    "a",
    "to be or not to be, that is the question",
    "xyxyxyxyxyxyxyxyxyxy",
    "one two three one two three one two",
    "?",
    "0101010101",
    "The quick brown fox",
    "lazy dog",
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("slots"))


def load(checkpoints, slots):
    target, draft = checkpoints
    return LLM(
        target,
        mode="sd",
        draft=draft,
        k=str(K),
        dtype="float32",
        slots=slots,
        context=CONTEXT,
        compile_cache="off",
    )


@pytest.fixture(scope="module")
def many(checkpoints):
    return load(checkpoints, 8)


@pytest.fixture(scope="module")
def one(checkpoints):
    return load(checkpoints, 1)


def requests(llm, **changes):
    """Greedy and sampled in turns."""
    settings = [{}, {"temperature": 0.6, "top_p": 0.9, "seed": 3}]
    return [
        llm.request(
            prompt,
            SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | settings[i % 2] | changes)),
            i,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def test_acceptance_and_text_are_the_same_with_one_sequence_and_with_many(one, many):
    alone, together = outputs(one, requests(one)), outputs(many, requests(many))
    for single, beside in zip(alone, together, strict=True):
        assert single.token_ids == beside.token_ids
        for figure in ("acceptance_histogram", "acceptance_by_position"):
            assert single.metrics[figure] == beside.metrics[figure]
    lengths = [output.metrics["acceptance_length"] for output in together]
    assert max(lengths) > 2
    assert min(lengths) < max(lengths)


@pytest.mark.more
def test_a_text_that_ends_while_others_go_on_ends_as_it_does_alone(one, many):
    """Its last round proposes nothing: what it proposed before is not judged a second time."""

    def found(llm):
        generated = []
        for seed in range(8):
            sampled = {"temperature": 1.0, "ignore_eos": True, "seed": seed}
            params = [SamplingParams(max_tokens=2 + index % 5, **sampled) for index in range(8)]
            generated += llm.generate(PROMPTS, params)
        return [output.token_ids for output in generated]

    assert found(one) == found(many)


def test_speculation_can_be_switched_off_and_on_again(many, monkeypatch):
    used = collections.Counter()

    def counted(kind):
        original = kind.__getitem__

        def getitem(self, name):
            used[name if name[0] == "forward" else name[0]] += 1
            return original(self, name)

        monkeypatch.setattr(kind, "__getitem__", getitem)

    counted(Programs)
    counted(DraftPrograms)
    before = outputs(many, requests(many))
    assert used["start"] > 0
    assert used["forward", K] > 0
    used.clear()
    off = outputs(many, requests(many), "ar")
    assert used["start"] == used["forward", K] == 0
    chunk = max(many.loaded.programs.model.execution.prefill_chunks)
    chunks = [-(-len(many.encode(prompt)) // chunk) for prompt in PROMPTS]
    assert used["prefill"] == sum(chunks)  # of the target alone
    after = outputs(many, requests(many))
    assert [output.token_ids for output in before] == [output.token_ids for output in after]
    figures = [[out.metrics["acceptance_histogram"] for out in run] for run in (before, after)]
    assert figures[0] == figures[1]
    for greedy, plain in zip(after[::2], off[::2], strict=True):
        assert greedy.token_ids == plain.token_ids
        assert plain.metrics["acceptance_length"] is None


def test_modes_may_run_in_turns_and_share_nothing_but_the_weights(many):
    expected = {mode: outputs(many, requests(many), mode) for mode in ("ar", "sd")}
    streams = {mode: many.run(requests(many), mode) for mode in ("ar", "sd")}
    found = {mode: {} for mode in streams}
    while streams:
        for mode in list(streams):
            event = next(streams[mode], None)
            if event is None:
                del streams[mode]
            elif event.output is not None:
                found[mode][event.prompt_index] = event.output.token_ids
    for mode, texts in found.items():
        assert [texts[output.prompt_index] for output in expected[mode]] == [
            output.token_ids for output in expected[mode]
        ]


@pytest.mark.parametrize("length", range(CONTEXT - 2 * K - 2, CONTEXT, 3))
def test_a_request_runs_up_to_the_last_position_of_the_context(many, length):
    prompt = [65 + place % 5 for place in range(length)]
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    (spoken,), (plain,) = (many.generate([prompt], params, mode=mode) for mode in ("sd", "ar"))
    assert spoken.token_ids == plain.token_ids
    assert (len(spoken.token_ids), spoken.finish_reason) == (CONTEXT - length, "length")


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_cancelled_request_leaves_nothing_to_the_next_in_its_slot(one, steps):
    """The slot's pages, history and proposals in flight are those of another request."""
    expected = outputs(one, requests(one, presence_penalty=1.0))
    for place in (1, 4):
        asked = requests(one, presence_penalty=1.0)
        stream = one.run([asked[place - 1]], "sd")
        for _ in range(steps):
            next(stream)
        stream.close()
        (output,) = outputs(one, [asked[place]])
        assert output.token_ids == expected[place].token_ids
        figure = "acceptance_histogram"
        assert output.metrics[figure] == expected[place].metrics[figure]
