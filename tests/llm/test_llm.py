"""The whole engine on tiny checkpoints: same text in any company, no compile after start-up."""

import dataclasses
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax import LLM, InputError, SamplingParams
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.errors import DeviceError
from ssd_jax.kernels.kv_pages import BLOCK
from ssd_jax.testing import tiny
from tests.idle import wait_until_idle
from tests.models.golden import runner

FAMILIES = ("llama", "qwen2", "qwen3")
PROMPTS = ["hello", "a prompt of two chunks. " * 6, "x", "1 2 3"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: tiny.write_checkpoint(root / family, family) for family in FAMILIES}


def load(path, **settings):
    settings = {"dtype": "float32", "context": 200, "compile_cache": "off"} | settings
    return LLM(str(path), **settings)


@pytest.fixture(scope="module")
def llm(checkpoints):
    return load(checkpoints["llama"], slots=3, batch_sizes="off")


def greedy_by_full_forward(path, prompt_ids, count):
    """Greedy ids without a cache: one whole forward a token."""
    run = runner(path, slots=1, context=2 * BLOCK)
    ids = list(prompt_ids)
    for _ in range(count):
        padded = np.array([ids + [0] * (2 * BLOCK - len(ids))])  # causal: what follows is not seen
        logits = run(padded)[0, len(ids) - 1, : tiny.TOKENS]
        ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


def test_one_prompt_takes_several_chunks(llm):
    assert len(llm.encode(PROMPTS[1])) > max(llm.loaded.programs.model.execution.prefill_chunks)


def test_greedy_text_equals_forwards_without_a_cache(checkpoints, llm):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:2], params)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        expected = greedy_by_full_forward(checkpoints["llama"], llm.encode(prompt), 6)
        assert output.token_ids == expected


def test_text_does_not_depend_on_company_slots_or_arrival(llm, checkpoints):
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=50, top_p=0.95, seed=3)
    alone = load(checkpoints["llama"], slots=1)
    expected = [
        next(event.output for event in alone.run([alone.request(p, params, i)]) if event.output)
        for i, p in enumerate(PROMPTS)
    ]
    together = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    backwards = [llm.request(p, params, i) for i, p in list(enumerate(PROMPTS))[::-1]]
    outputs = [event.output for event in llm.run(backwards) if event.output]
    assert {o.prompt_index: o.token_ids for o in outputs} == {
        o.prompt_index: o.token_ids for o in expected
    }


def test_seed_and_index_change_sampled_text(llm):
    def text(seed, index):
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)
        events = llm.run([llm.request("hello", params, index)])
        return next(event.output.token_ids for event in events if event.output)

    assert text(1, 0) == text(1, 0)
    assert len({tuple(text(s, i)) for s, i in [(1, 0), (2, 0), (1, 1), (2**63, 0)]}) == 4


def test_no_program_is_compiled_after_start_up(llm, compilations):
    jnp.arange(3) * 2.5  # shows that the listener sees a compile
    assert compilations
    compilations.clear()
    mixed = [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=7, temperature=0.7, top_p=0.9, min_p=0.01, seed=9),
        SamplingParams(max_tokens=9, temperature=1.5, top_k=3, min_tokens=4),
        SamplingParams(max_tokens=3, stop=("e", "zz"), ignore_eos=True),
    ]
    requests = [llm.request(p, mixed[i % 4], i) for i, p in enumerate(PROMPTS * 2)]
    ids = [llm.engine.add(request) for request in requests[:4]]
    for _ in range(3):
        llm.engine.step()
    llm.engine.cancel(ids[1])
    ids += [llm.engine.add(request) for request in requests[4:]]
    ended = 0
    while llm.engine.has_work:
        ended += sum(event.output is not None for event in llm.engine.step())
    assert ended >= 7
    assert compilations == []


def test_padding_rows_of_the_vocabulary_are_never_generated(llm):
    """320 rows, 259 tokens: at a high temperature padding would soon be drawn."""
    params = SamplingParams(max_tokens=150, temperature=50.0, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    assert len(set(output.token_ids)) > 50
    assert max(output.token_ids) < tiny.TOKENS


def test_every_eos_id_of_the_checkpoint_ends_a_text(llm):
    for eos in (tiny.EOS, tiny.END_OF_TURN):
        (output,) = llm.generate("hello", SamplingParams(max_tokens=3, logit_bias={eos: 100.0}))
        assert (output.token_ids, output.finish_reason) == ([eos], "stop")


def test_min_tokens_keeps_eos_away(llm):
    params = SamplingParams(max_tokens=40, min_tokens=40, temperature=50.0, seed=1)
    (output,) = llm.generate("hello", params)
    assert (len(output.token_ids), output.finish_reason) == (40, "length")
    assert not {tiny.EOS, tiny.END_OF_TURN} & set(output.token_ids)


def test_a_presence_penalty_forbids_what_was_said(llm):
    params = SamplingParams(max_tokens=40, presence_penalty=1e4, ignore_eos=True)
    first, second = (llm.generate("hello", params)[0].token_ids for _ in range(2))
    assert len(set(first)) == 40
    assert first == second  # the slot's history begins anew


def test_a_repetition_penalty_counts_the_prompt_too(llm):
    def first(penalty, bias):
        params = SamplingParams(max_tokens=1, logit_bias=bias, repetition_penalty=penalty)
        return llm.generate([[65]], params)[0].token_ids

    # Penalties come before the bias. They divide the logit of 65, or multiply it below 0.
    behind, ahead = {65: 1000.0, 68: 1010.0}, {65: 1010.0, 68: 1000.0}
    assert (first(1.0, behind), first(1.0, ahead)) == ([68], [65])
    assert (first(1e-5, behind), first(1e5, ahead)) in (([65], [65]), ([68], [68]))


def test_a_logit_bias_of_an_unknown_token_is_refused(llm):
    with pytest.raises(InputError, match="token id 5000"):
        llm.request("x", SamplingParams(logit_bias={5000: 1.0}))


LETTERS = {65: 40.0, 66: 39.0, 67: 38.0}  # b, c, d
WORDS = ["bb", "bcb", "cc", "cdc", "d"]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_bad_words_are_not_said(llm, temperature):
    params = {"max_tokens": 40, "logit_bias": LETTERS, "temperature": temperature}
    free = llm.generate("bbb", SamplingParams(**params))[0].text
    assert any(word in free for word in WORDS)
    text = llm.generate("bbb", SamplingParams(**params, bad_words=WORDS[:-1]))[0].text
    assert len(text) == 40
    assert not any(word in text for word in WORDS[:-1])
    assert {*text} <= {*"bcd"}
    one = llm.generate("bbb", SamplingParams(**params, bad_words="d"))[0].text
    assert {*one} <= {*"bc"}
    assert llm.generate("bbb", SamplingParams(**params))[0].text == free  # of the slot no more


def test_bad_words_begin_behind_the_prompt(llm):
    params = SamplingParams(max_tokens=3, logit_bias={65: 100.0, 66: 50.0}, bad_words=["bb"])
    assert llm.generate("bbb", params)[0].text == "bcb"


def test_a_bad_word_is_banned_with_a_space_before_it_too(llm):
    request = llm.request("x", SamplingParams(bad_words=["no", "  yes"]))
    # In ids of bytes a word with a space ends as the word does.
    ids = [llm.tokenizer.encode(word, add_special_tokens=False) for word in ("no", "yes")]
    assert request.bad_word_ids == tuple(map(tuple, ids))


def test_bad_words_that_cannot_be_banned_are_refused(llm, monkeypatch):
    for words, message in [
        ([" \t"], "no tokens without its spaces"),
        (["abcdefgh", "abcdefghi"], "'abcdefghi' has 9 tokens; at most 8 are supported"),
    ]:
        with pytest.raises(InputError, match=message):
            llm.request("x", SamplingParams(bad_words=words))
    request = llm.request("x", SamplingParams(bad_words=["no"]))
    with pytest.raises(InputError, match="without their token ids"):
        llm.engine.add(dataclasses.replace(request, bad_word_ids=()))
    monkeypatch.setattr(llm.tokenizer, "size", 2)
    with pytest.raises(InputError, match="leave no token id"):
        llm.request([0], SamplingParams(bad_words=["!", '"']))
    llm.request([0], SamplingParams(bad_words=["!", '""']))


def test_coupled_text_depends_on_seed_and_position_only(llm, checkpoints):
    coupled = load(checkpoints["llama"], slots=3, verify="coupled")
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=4, ignore_eos=True)
    together = [output.token_ids for output in coupled.generate(PROMPTS, params)]
    events = coupled.run([coupled.request(PROMPTS[3], params, 3)])
    assert next(event.output.token_ids for event in events if event.output) == together[3]
    ratio = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in ratio] != together  # other keys


def test_streamed_events_add_up_to_the_output(llm):
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    events = list(llm.stream("hello", params))
    output = events[-1].output
    assert output is not None
    assert "".join(event.text for event in events) == output.text
    assert [i for event in events for i in event.token_ids] == output.token_ids
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_leaving_a_stream_frees_its_slot(llm):
    for _ in range(10):
        stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        stream.close()
    wait_until_idle(llm.engine)


def test_streams_may_be_read_in_turns(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [output.text for output in llm.generate(PROMPTS[:2], params)]
    streams = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    pairs = itertools.zip_longest(*streams)
    texts = [[event.text for event in stream if event] for stream in zip(*pairs, strict=True)]
    assert ["".join(text) for text in texts] == expected


def test_lost_pages_break_the_engine_with_an_error_that_says_so(llm, monkeypatch):
    (alone,) = llm.generate("hello", SamplingParams(max_tokens=150, ignore_eos=True))
    monkeypatch.setattr(llm, "_engines", {})
    deleted, came, step = threading.Event(), [], Engine.step

    def step_once_pages_are_gone(engine):
        if came:
            assert deleted.wait(60)
        events = step(engine)
        came.extend(events)
        return events

    monkeypatch.setattr(Engine, "step", step_once_pages_are_gone)
    stream = llm.stream("hello", SamplingParams(max_tokens=150, ignore_eos=True))
    events = [next(stream)]
    for array in jax.tree.leaves(llm.engine._target._pages):
        array.delete()
    deleted.set()
    with pytest.raises(DeviceError, match=r"deleted.*; open the model again"):
        events.extend(stream)
    output = events[-1].output
    assert output.finish_reason == "error"
    assert 0 < len(output.token_ids) < 150
    assert alone.token_ids[: len(output.token_ids)] == output.token_ids
    with pytest.raises(DeviceError, match="open the model again"):
        llm.generate("hello")


def test_a_token_id_outside_the_vocabulary_is_named(llm):
    with pytest.raises(InputError, match=r"token id 259 .* 0 to 258"):
        llm.request([5, 259])


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "small", vocab_size=200)
    with pytest.raises(InputError, match="tokenizer has 259 tokens, the model embeds 200"):
        LLM(str(path), load=False)


def test_misshapen_and_missing_tensors_are_named_before_anything_is_compiled(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "bad")
    (path / "config.json").write_text(json.dumps(tiny.config("llama", intermediate_size=40)))
    with pytest.raises(InputError, match=r"mlp.* has shape .*48.*, expected .*40"):
        LLM(str(path), load=False)
    (path / "config.json").write_text(json.dumps(tiny.config("qwen2")))
    with pytest.raises(InputError, match=r"'lm_head.weight' \(and \d+ more\) is missing"):
        LLM(str(path), load=False)


def test_a_batch_that_cannot_fit_is_refused_with_the_numbers(checkpoints):
    llm = LLM(str(checkpoints["llama"]), slots=10**7, load=False)
    with pytest.raises(InputError, match=r"slots = 10000000 .* GiB of memory"):
        llm.load()


def test_unknown_and_mistyped_settings_are_named(checkpoints):
    with pytest.raises(InputError, match="unknown key 'slotz'; did you mean 'slots'"):
        LLM(str(checkpoints["llama"]), slotz=3)
    with pytest.raises(InputError, match="slots = '3' is not understood; give an integer"):
        LLM(str(checkpoints["llama"]), slots="3")


def test_messages_without_the_template_are_refused(checkpoints):
    plain = LLM(str(checkpoints["llama"]), chat_template=False, load=False)
    with pytest.raises(InputError, match="messages need the chat template"):
        plain.request([{"role": "user", "content": "x"}])


def test_numpy_ids_are_ids(llm):
    params = SamplingParams(max_tokens=2)
    expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    assert llm.generate(np.array([5, 6, 7]), params)[0].token_ids == expected
    assert llm.generate([[np.int64(5), 6, 7]], params)[0].token_ids == expected


def test_messages_text_and_ids_are_all_prompts(llm):
    messages = [{"role": "user", "content": "hello"}]
    ids = llm.encode("hello")
    assert llm.encode(messages) == ids == llm.encode(ids)
    params = SamplingParams(max_tokens=3)
    one, two = llm.generate([messages, ids], params)
    assert one.token_ids == two.token_ids


def test_the_context_of_the_checkpoint_is_the_limit(checkpoints):
    with pytest.raises(InputError, match="context = 513 is more than the 512"):
        load(checkpoints["llama"], context=513)


def test_the_context_defaults_to_what_the_checkpoint_allows(checkpoints):
    assert LLM(str(checkpoints["llama"]), load=False).context == 512


def test_a_prompt_that_is_too_long_is_refused_before_weights_load(checkpoints):
    llm = LLM(str(checkpoints["llama"]), context=20, compile_cache="off", load=False)
    with pytest.raises(InputError, match=r"tokens; the context is 20"):
        llm.request("a prompt of more than twenty bytes")
    assert llm._loaded is None


def test_a_request_up_to_the_last_position_of_the_context(llm):
    (output,) = llm.generate([[65] * 195], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


@pytest.mark.more
def test_bfloat16_engine_equals_itself_in_other_company(checkpoints):
    llm = load(checkpoints["qwen3"], slots=4, dtype="bfloat16")
    params = SamplingParams(max_tokens=10)
    assert Request(prompt_ids=[1]).index == 0
    together = llm.generate(PROMPTS, params)
    single = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    assert [o.token_ids for o in together] == [o.token_ids for o in single]
