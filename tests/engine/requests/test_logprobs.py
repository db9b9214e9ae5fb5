"""Log-probabilities: the model's own or the law's, the same numbers in every mode."""

import dataclasses
import json
from threading import Event, Thread

import numpy as np
import pytest

from ssd_jax import LLM, InputError, SamplingParams
from ssd_jax.cli.main import main
from ssd_jax.devices.target import logprob_programs
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.target.prompt_scores import PromptScores
from ssd_jax.sampling.params import MAX_LOGPROBS
from ssd_jax.testing import tiny
from tests.models.golden import our_logits
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import next_law
from tests.selection import cases

PROMPTS = ["0101010101", "one two one two one", "x"]
SETTINGS = [
    # Two letters for ever, so that n-grams match; by the penalty they take turns.
    {"logit_bias": {65: 30.0, 66: 29.0}, "frequency_penalty": 1.0},
    {"temperature": 0.6, "top_k": 6, "presence_penalty": 0.5, "seed": 5},
    {"temperature": 0.8, "top_p": 0.3, "logit_bias": {65: 2.0}, "seed": 6},
]
COUNT = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("logprobs") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def raw(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def processed(checkpoint):
    return load(checkpoint, logprobs_of="processed")


@pytest.fixture(params=cases(["raw", "processed"], "raw"))
def llm(request):
    return request.getfixturevalue(request.param)


def load(checkpoint, **settings):
    settings = {"slots": 3, "exact": "bitwise"} | settings
    return LLM(
        str(checkpoint),
        dtype="float32",
        mode="sd",
        draft="ngram",
        k="3",
        context=200,
        compile_cache="off",
        **settings,
    )


def outputs(llm, mode, wanted):
    requests = [
        llm.request(
            prompt,
            SamplingParams(max_tokens=COUNT, ignore_eos=True, logprobs=wanted, **settings),
            index,
        )
        for index, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True))
    ]
    found = [event.output for event in llm.run(requests, mode) if event.output]
    return requests, sorted(found, key=lambda output: output.prompt_index)


def expected_laws(llm, checkpoint, request, output, settings):
    """Probabilities [tokens, V] of every id at every position of an output, by plain forwards."""
    ids = [*request.prompt_ids, *output.token_ids]
    logits = our_logits(checkpoint, np.array([ids]))[0, len(request.prompt_ids) - 1 : -1]
    if llm.config.logprobs_of == "raw":
        weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)
    bias = settings.get("logit_bias", {})
    settings = {"temperature": 0.0, **settings}
    settings |= {"bias_ids": tuple(bias), "bias": tuple(bias.values())}
    padded = np.where(np.arange(tiny.ROWS) < tiny.TOKENS, logits, -np.inf)
    token_ids = output.token_ids
    return np.array(
        [next_law(row, settings, request.prompt_ids, token_ids[:i]) for i, row in enumerate(padded)]
    )


@pytest.mark.parametrize("mode", ["ar", "sd"])
def test_each_token_and_the_likeliest_have_the_logprobs_of_a_plain_forward(llm, checkpoint, mode):
    for request, output, settings in zip(*outputs(llm, mode, MAX_LOGPROBS), SETTINGS, strict=True):
        laws = expected_laws(llm, checkpoint, request, output, settings)
        np.testing.assert_allclose(laws.sum(-1), 1)
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == COUNT
        for token, entry, law in zip(output.token_ids, output.logprobs, laws, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(np.log(law[token]), abs=2e-3)
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            tokens = law[: tiny.TOKENS]  # the rows beyond are padding
            likeliest = np.sort(tokens[tokens > 0])[::-1][:MAX_LOGPROBS]
            assert values == pytest.approx(np.log(likeliest), abs=2e-3)
            for top, value in entry.top:
                assert value == pytest.approx(np.log(law[top]), abs=2e-3)


def test_logprobs_have_the_same_bits_in_every_mode(llm):
    (_, (alone, *_)), (_, (spoken, *_)) = (outputs(llm, mode, 4) for mode in ("ar", "sd"))
    assert spoken.metrics["acceptance_length"] > 1  # speculation is not switched off by asking
    assert alone.token_ids == spoken.token_ids
    assert alone.logprobs == spoken.logprobs


@pytest.mark.more
@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_as_many_likeliest_tokens_are_reported_as_asked_for(llm, wanted):
    _, most = outputs(llm, "sd", MAX_LOGPROBS)
    _, fewer = outputs(llm, "sd", wanted)
    for all_, some in zip(most, fewer, strict=True):
        assert [entry.logprob for entry in all_.logprobs] == [e.logprob for e in some.logprobs]
        assert [entry.top[:wanted] for entry in all_.logprobs] == [e.top for e in some.logprobs]


@pytest.mark.more
def test_a_law_that_is_truncated_sums_to_one_over_what_is_reported(processed):
    _, (greedy, top_k, _) = outputs(processed, "sd", MAX_LOGPROBS)
    for entry in greedy.logprobs:
        assert entry.top == ((entry.token_id, 0.0),)
    for entry in top_k.logprobs:
        assert len(entry.top) == 6
        assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-5)


def test_logprobs_of_padding_ids_are_not_reported(raw):
    """The embedding has more rows than there are tokens; what they would say is no token."""
    _, found = outputs(raw, "ar", MAX_LOGPROBS)
    ids = {token for output in found for entry in output.logprobs for token, _ in entry.top}
    assert max(ids) < tiny.TOKENS


@pytest.mark.more
def test_a_row_without_neighbours_has_the_bits_of_a_batch_in_every_mode(checkpoint, raw):
    """Of one row, a product or a sum would round in its own way."""
    single = load(checkpoint, slots=1)
    found = [outputs(llm, mode, 4)[1][0] for llm in (single, raw) for mode in ("ar", "sd")]
    assert all(output.token_ids == found[0].token_ids for output in found)
    assert all(output.logprobs == found[0].logprobs for output in found)


def test_streamed_logprobs_add_up_to_those_of_the_output(llm):
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, logprobs=1)
    events = list(llm.stream(PROMPTS[0], params))
    output = events[-1].output
    assert output is not None
    assert [entry for event in events for entry in event.logprobs] == output.logprobs
    assert [entry.token_id for entry in output.logprobs] == output.token_ids


def test_a_request_without_logprobs_gets_none(llm):
    (output,) = llm.generate("x", SamplingParams(max_tokens=3))
    assert output.logprobs is None


def test_logprobs_end_where_the_text_ends(llm):
    text = llm.generate(PROMPTS[1], SamplingParams(max_tokens=COUNT, ignore_eos=True))[0].text
    stop = text[len(text) // 2 :][:2]
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, stop=(stop,), logprobs=2)
    (output,) = llm.generate(PROMPTS[1], params)
    assert output.finish_reason == "stop"
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert len(output.token_ids) < COUNT


def test_logprobs_are_no_setting_of_a_model(checkpoint):
    with pytest.raises(
        InputError, match="logprobs = 2 means nothing here: give it to `SamplingParams`"
    ):
        LLM(str(checkpoint), logprobs=2, load=False)


@pytest.fixture
def used(monkeypatch):
    """Tasks of the target's programs that are run, in order."""
    found, usual = [], Programs.__getitem__

    def noted(programs, name):
        found.append(name[0])
        return usual(programs, name)

    monkeypatch.setattr(Programs, "__getitem__", noted)
    return found


REPORTING = {"logprobs", "law", "prompt_logprobs"}


def test_requests_that_do_not_ask_run_the_old_programs_in_an_engine_that_had_some_that_do(
    processed, used
):
    plain = [SamplingParams(max_tokens=6, **settings) for settings in SETTINGS]
    asking = [
        dataclasses.replace(params, logprobs=1, prompt_logprobs=place or None)
        for place, params in enumerate(plain)
    ]
    found = []
    for params in (plain, asking, plain):
        used.clear()
        found.append([output.token_ids for output in processed.generate(PROMPTS, params)])
        assert {*used} & REPORTING == (REPORTING if params is asking else set())
    assert found[0] == found[1] == found[2]


def test_programs_load_beside_the_rounds_of_others_and_change_nothing(checkpoint, raw, monkeypatch):
    _, expected = outputs(raw, "sd", 3)
    llm, may, begun, answers = load(checkpoint), Event(), Event(), []
    assert not {name[0] for name in llm.loaded.programs.names} & REPORTING
    usual = logprob_programs.load

    def late(programs, report):
        begun.set()
        assert may.wait(60)
        usual(programs, report)

    monkeypatch.setattr(logprob_programs, "load", late)
    params = [SamplingParams(max_tokens=COUNT, ignore_eos=True, **setting) for setting in SETTINGS]
    asking = llm.request(PROMPTS[1], dataclasses.replace(params[1], logprobs=3), 1)
    events = llm.stream(PROMPTS[0], params[0])
    next(events)
    thread = Thread(target=lambda: answers.extend(llm.run([asking])))
    thread.start()
    assert begun.wait(60)
    for _ in range(3):
        next(events)
    assert not answers
    may.set()
    *_, last = events
    thread.join(60)
    assert last.output.token_ids == expected[0].token_ids
    assert last.output.logprobs is None
    assert answers[-1].output.token_ids == expected[1].token_ids
    assert answers[-1].output.logprobs == expected[1].logprobs


LENGTHS = [1, 2, 31, 32, 33, 64, 65, 70]
"""About the borders of chunks of 32 tokens."""


def log_laws(checkpoint, ids):
    """Log-softmax [tokens, V] of the model's own logits, in NumPy."""
    logits = our_logits(checkpoint, np.array([ids]))[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def are_those_of_a_plain_forward(entries, checkpoint, ids, wanted):
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == ids[1:]
    for entry, law in zip(entries[1:], log_laws(checkpoint, ids), strict=False):
        law = law[: tiny.TOKENS]  # the rows beyond are padding
        assert entry.logprob == pytest.approx(law[entry.token_id], abs=2e-3)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(np.sort(law)[::-1][:wanted], abs=2e-3)
        assert values == pytest.approx([law[token] for token, _ in entry.top], abs=2e-3)
    return True


def prompts_of(lengths):
    return [[(7 * at * at + size) % tiny.TOKENS for at in range(size)] for size in lengths]


@pytest.mark.parametrize("mode", cases(["ar", "sd"], "sd"))
def test_prompt_tokens_have_the_logprobs_of_a_plain_forward(llm, checkpoint, mode):
    """Never processed: temperature and penalties are about tokens that are sampled."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=3, temperature=0.3, top_k=2,
                            repetition_penalty=1.5)  # fmt: skip
    prompts = prompts_of(LENGTHS)
    for ids, output in zip(prompts, llm.generate(prompts, params, mode=mode), strict=True):
        assert are_those_of_a_plain_forward(output.prompt_logprobs, checkpoint, ids, 3)


def test_a_prompt_whose_tokens_are_judged_by_their_own_positions_is_noticed(raw, checkpoint):
    (ids,) = prompts_of([40])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with edited(
        [Edit(PromptScores, "score", ": len(scored)] = scored", "1 : len(scored)] = scored[:-1]")]
    ):
        (output,) = raw.generate([ids], params)
    with pytest.raises(AssertionError):
        are_those_of_a_plain_forward(output.prompt_logprobs, checkpoint, ids, 0)


def test_texts_of_prompts_that_are_scored_have_the_same_bits(raw):
    prompts = prompts_of([33, 70])
    plain = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    expected = raw.generate(prompts, plain)
    found = raw.generate(prompts, dataclasses.replace(plain, prompt_logprobs=1))
    assert [output.logprobs for output in found] == [output.logprobs for output in expected]


@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1])
def test_logprobs_out_of_range_are_refused(value):
    with pytest.raises(InputError, match=f"logprobs = {value} is out of range"):
        SamplingParams(logprobs=value)


def test_the_command_line_prints_logprobs(checkpoint, capsys):
    command = ["generate", f"--target={checkpoint}", "--prompt=hello", "--json", "--ignore_eos"]
    command += ["--max_tokens=4", "--dtype=float32", "--context=200", "--compile_cache=off"]
    assert main([*command, "--logprobs=2", "--prompt_logprobs=1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    for entry in answer["logprobs"]:
        assert entry["logprob"] == entry["top"][0][1]  # greedy
        assert entry["top"][0][0] == entry["token_id"]
        assert len(entry["top"]) == 2
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [len(entry["top"]) for entry in others] == [1] * len(others)
    assert others


def test_a_request_without_a_token_has_no_logprobs(llm):
    engine = llm.engine_of("ar")
    engine.cancel(engine.add(llm.request([1, 2], SamplingParams(logprobs=1))))
    (output,) = [event.output for event in engine.step() if event.output is not None]
    assert (output.token_ids, output.logprobs) == ([], [])
