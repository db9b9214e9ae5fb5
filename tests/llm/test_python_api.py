"""What Python callers may give, and what they get for what they may not."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import ssd_jax
from ssd_jax import LLM, Config, InputError, SamplingParams
from ssd_jax.config.keywords import Settings
from ssd_jax.config.vllm_names import SAME_AS, TRANSLATED
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request_metrics import RequestMetrics
from ssd_jax.engine.round_thread import RoundThread
from ssd_jax.errors import SsdError
from ssd_jax.sampling.params import SamplingFields
from tests.idle import wait_until_idle

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
OF_SSD = {"mode": "ssd", "draft": "d"}
HOT = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
SEVERAL = SamplingParams(n=3)


@pytest.fixture(scope="module")
def statuses():
    """What loading said that it did."""
    return []


@pytest.fixture(scope="module")
def llm(tiny_checkpoint, statuses):
    room = {"max_num_seqs": 2, "max_model_len": 64}
    return LLM(Path(tiny_checkpoint), dtype="float32", status=statuses.append, **room)


def test_every_setting_is_a_typed_keyword():
    fields = {field.name for field in dataclasses.fields(Config)}
    assert set(Settings.__annotations__) == (fields - {"target"}) | {*SAME_AS, *TRANSLATED}
    sampling = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(SamplingFields.__annotations__) == sampling


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"k": 8, "mode": "sd", "draft": "ngram"}, "k", 8),
        ({"num_speculative_tokens": 3, "mode": "sd", "draft": "ngram"}, "k", 3),
        ({"k": "8", "mode": "sd", "draft": "ngram"}, "k", 8),
        ({"k": np.int64(8), "mode": "sd", "draft": "ngram"}, "k", 8),
        ({"kv_memory": 1 << 30}, "kv_bytes", 1 << 30),
        ({"max_num_seqs": 5}, "slots", 5),
        ({"max_model_len": 99}, "context", 99),
        ({"target": Path("models") / "x.gguf"}, "target", "models/x.gguf"),
        ({"budget": 4, "mode": "ssd", "draft": Path("d")}, "budget", 4),
        ({"draft_cores": 1, "mode": "ssd", "draft": "d"}, "draft_cores", "1"),
        ({"draft_temperature": np.float32(0.5), **OF_SSD}, "draft_temperature", 0.5),
        ({"saguaro_c": Fraction(1, 2), **OF_SSD}, "saguaro_c", 0.5),
        ({"fan_out": np.str_("uniform"), **OF_SSD}, "fan_out", "uniform"),
        ({"fan_out": [3, 3, 2, 4], "k": 3, "budget": 12, **OF_SSD}, "fan_out", "3,3,2,4"),
    ],
)
def test_numbers_paths_and_names_of_vllm_are_taken(given, name, expected):
    assert repr(getattr(Config(**given), name)) == repr(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": 2, "max_num_seqs": 2}, "max_num_seqs and slots are two names of one setting"),
        ({"k": 99, "mode": "sd", "draft": "ngram"}, "k = 99 is impossible; give auto or 1 to 16"),
        ({"k": True, "mode": "sd", "draft": "ngram"}, "k = True is impossible; give auto or 1 to"),
        ({"k": 2.5, "mode": "sd", "draft": "ngram"}, "k = 2.5 is impossible; give auto or 1 to 16"),
        ({"mode": None}, "mode = None is unknown; one of"),
        ({"k": np.array([1, 2]), "mode": "sd", "draft": "ngram"}, "k = .* give one value"),
        ({"slots": None}, "slots = None is not understood; give an integer"),
        ({"kv_memory": 1.5}, "kv_memory = 1.5 is not understood; give bytes, .* 90%, or auto"),
        ({"fan_out": [4, 0.5]}, r"fan_out = \[4, 0.5\] is not understood; give one value"),
        ({"chat_template": 1}, "chat_template = 1 is not understood; give true or false"),
        ({"model": "x", "target": "y"}, "model and target are two names of one setting; give one"),
        ({"max_num_sequences": 2}, "unknown key 'max_num_sequences'; did you mean 'max_num_seqs'"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(InputError, match=message):
        Config(**given)


@pytest.mark.more
def test_loading_tells_how_far_it_is(llm, statuses):
    *compiling, last = statuses
    programs = len(compiling) - 1
    assert programs > 1
    lines = [f"compiling target: {done} of {programs} programs" for done in range(programs + 1)]
    assert (compiling, last) == (lines, "checking exactness")


def test_prompts_may_be_one_several_or_any_iterable(llm):
    one = llm.generate("ab", SHORT)
    both = llm.generate((text for text in ("ab", "cd")), SHORT)
    assert len(one) == 1
    assert [output.prompt_index for output in both] == [0, 1]
    assert both[0].token_ids == one[0].token_ids
    assert llm.generate(np.array([5, 6]), SHORT)[0].token_ids
    assert llm.generate([], SHORT) == []


def test_each_prompt_may_have_parameters_of_its_own(llm):
    few, more = llm.generate(["ab", "ab"], [SHORT, dataclasses.replace(SHORT, max_tokens=5)])
    assert (len(few.token_ids), len(more.token_ids)) == (3, 5)
    assert more.token_ids[:3] == few.token_ids


def test_n_texts_of_each_prompt_have_noise_of_their_own(llm):
    outputs = llm.generate(["ab", "cd"], HOT, n=3)
    assert [output.prompt_index for output in outputs] == [0, 2, 4, 1, 3, 5]
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    plain = llm.generate(["ab", "cd"], HOT)
    assert [output.token_ids for output in plain] == [outputs[0].token_ids, outputs[3].token_ids]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "prompts are text, messages, ids, or a list of such, not 3"),
        (([["x", 5]],), "messages|token|prompt"),
        ((["ab", 5],), "a prompt is text, a list of messages or a list of token ids, not 5"),
        (("ab", {"temperature": 1}), "give SamplingParams"),
        (("ab", 7), "give SamplingParams"),
        ((["ab", "cd"], [SHORT]), "1 sampling_params for 2 prompts"),
        (("ab", [7]), "sampling_params = 7: give SamplingParams"),
        ((["ab", [1, -1]],), "prompt 1: token id -1 is not in the vocabulary"),
        (([[1, -1]],), "^token id -1 is not"),
        (([True, False],), r"messages or a list of token ids, not \[True, False\]"),
    ],
)
def test_wrong_arguments_raise_input_errors(llm, arguments, message):
    with pytest.raises(InputError, match=message):
        llm.generate(*arguments)


def test_a_text_that_can_neither_go_on_nor_end_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "size", 32)
    ends = dataclasses.replace(SHORT, stop_token_ids=range(32))
    assert llm.request([5], ends)
    assert llm.request([5], dataclasses.replace(ends, min_tokens=2, stop_token_ids=range(31)))
    with pytest.raises(InputError, match="min_tokens = 2: every token id ends the text"):
        llm.request([5], dataclasses.replace(ends, min_tokens=2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate("ab", foo=1),
            "unknown key 'foo'; known: mode, n, prompts, sampling_params",
        ),
        (
            lambda llm: llm.generate("ab", SEVERAL, n=2),
            r"n = 2 and SamplingParams\(n=3\): give one",
        ),
        (
            lambda llm: llm.generate("ab", SEVERAL, n=1),
            r"n = 1 and SamplingParams\(n=3\): give one",
        ),
        (lambda llm: llm.stream("ab", SEVERAL), "n = 3 is for generate"),
        (lambda llm: asyncio.run(anext(llm.stream_async("ab", SEVERAL))), "n = 3 is for generate"),
        (lambda llm: next(llm.run([llm.request("ab", SEVERAL)])), "n = 3 is for generate"),
        (lambda llm: llm.generate("ab", mode=""), "mode = '' is unknown"),
        (lambda llm: llm.stream(["ab", "cd"]), "not .*; generate takes several prompts"),
        (lambda llm: llm.request("ab", SHORT, "a"), "index = 'a' is out of range; give 0 to"),
        (lambda llm: llm.request("ab", SHORT, 1.5), "index = 1.5 is out of range"),
        (lambda llm: llm.request("ab", SHORT, True), "index = True is out of range"),
        (lambda llm: next(llm.run(["ab"])), "requests = .*: give a list of what `request` makes"),
        (lambda llm: next(llm.run(5)), "requests = 5: give a list"),
        (lambda llm: next(llm.run(llm.request("ab"))), "requests = Request.*: give a list"),
        (lambda llm: next(llm.run([llm.request("ab")], k="a")), "k = a was not prepared"),
        (lambda llm: llm.load(status=5), "status = 5 is not understood; give a function"),
    ],
)
def test_wrong_arguments_of_every_call_raise_input_errors(llm, call, message):
    with pytest.raises(InputError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"slots": 2}}, "config = {'slots': 2} is not understood; give a Config"),
        ({"config": Config(), "slots": 2}, "give either config or settings, not both"),
        *(
            ({"ks": ks}, f"ks = {ks!r} is impossible; give a list of numbers from 1 to 16")
            for ks in (3, "ab", [0], [-1], [2.5], [True], [17])
        ),
        ({"progress": 5}, "progress = 5 is not understood; give a function"),
        ({"status": 5}, "status = 5 is not understood; give a function"),
    ],
)
def test_a_model_is_not_opened_with_wrong_arguments(given, message):
    with pytest.raises(InputError) as error:
        LLM(**given)
    assert str(error.value) == message


def test_parameters_go_by_the_name_that_vllm_has_for_them(llm):
    (output,) = llm.generate("ab", sampling_params=SHORT)
    assert len(output.token_ids) == 3
    for call in (llm.generate, llm.generate_async, llm.stream, llm.stream_async, llm.request):
        assert list(inspect.signature(call).parameters)[1] == "sampling_params"


def test_an_output_has_the_fields_of_vllm(llm):
    text, ids = llm.generate(["ab", [5, 6]], dataclasses.replace(HOT, seed=3))
    assert (text.prompt, text.prompt_token_ids) == ("ab", llm.encode("ab"))
    assert (ids.prompt, ids.prompt_token_ids) == (None, [5, 6])
    assert text.finished
    (found,) = text.outputs
    for name in ("text", "token_ids", "finish_reason", "metrics", "logprobs", "prompt_index"):
        assert getattr(text, name) is getattr(found, name)
    assert (found.index, found.seed, found.finish_reason, found.stop_reason) == (
        0,
        3,
        "length",
        None,
    )
    assert (found.limit, text.limit, text.seed) == ("max_tokens", "max_tokens", 3)
    assert {*found.metrics} == {*RequestMetrics.__annotations__}


def test_several_texts_of_a_prompt_are_in_one_output_or_in_several(llm):
    flat = llm.generate(["ab", "cd"], HOT, n=3)
    texts = [(sample.text, sample.token_ids, sample.prompt_index) for sample in flat]
    assert [len(output.outputs) for output in flat] == [1] * 6
    asked = dataclasses.replace(HOT, n=3)
    for found in (
        llm.generate(["ab", "cd"], asked),
        asyncio.run(llm.generate_async(["ab", "cd"], asked)),
        llm.generate(["ab", "cd"], [asked, asked]),
    ):
        assert [[sample.index for sample in output.outputs] for output in found] == [[0, 1, 2]] * 2
        every = [sample for output in found for sample in output.outputs]
        assert [(sample.text, sample.token_ids, sample.prompt_index) for sample in every] == texts
        assert [output.prompt for output in found] == ["ab", "cd"]
    single, several = llm.generate(["ab", "cd"], [HOT, asked])
    assert single.token_ids == texts[0][1]
    assert [sample.token_ids for sample in several.outputs] == [text[1] for text in texts[3:]]


def test_a_drawn_seed_repeats_its_text(llm):
    fresh = dataclasses.replace(HOT, seed=None, n=2)
    one, other = llm.generate(["ab", "ab"], fresh)
    assert len({one.seed, other.seed, llm.generate("ab", fresh)[0].seed}) == 3
    assert {text.seed for text in one.outputs} == {one.seed}
    for text in (*one.outputs, *other.outputs):
        known = dataclasses.replace(HOT, seed=text.seed)
        *_, last = llm.run([llm.request("ab", known, text.prompt_index)])
        assert last.output.token_ids == text.token_ids


def test_no_max_tokens_goes_on_to_the_context(llm):
    (output,) = llm.generate([[5, 6]], dataclasses.replace(SHORT, max_tokens=None))
    assert (len(output.token_ids), output.limit) == (62, "context")


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_a_wrong_n_is_refused(llm, n):
    with pytest.raises(InputError, match=r"n = .* is impossible"):
        llm.generate("ab", SHORT, n=n)


def test_an_event_loop_generates_and_streams(llm):
    async def both():
        made = asyncio.gather(*(llm.generate_async(text, SHORT) for text in ("ab", "cd")))
        streamed = [event async for event in llm.stream_async("ab", SHORT)]
        return await made, streamed

    (ab, cd), events = asyncio.run(both())
    assert [answer[0].token_ids for answer in (ab, cd)] == [
        output.token_ids for text in ("ab", "cd") for output in llm.generate(text, SHORT)
    ]
    assert [token for event in events for token in event.token_ids] == ab[0].token_ids


def test_no_prompts_load_nothing(tiny_checkpoint):
    llm = LLM(tiny_checkpoint, dtype="float32", context=64, load=False)
    assert llm.generate([]) == asyncio.run(llm.generate_async([])) == []
    assert llm._loaded is None


def test_leaving_an_asynchronous_stream_cancels_it(llm):
    async def first():
        events = llm.stream_async("ab", dataclasses.replace(SHORT, max_tokens=50))
        found = await anext(events)
        await events.aclose()
        return found

    assert asyncio.run(first()).token_ids
    wait_until_idle(llm.engine)


def test_waiting_tasks_take_one_thread_in_all(llm):
    async def many():
        asked = [asyncio.create_task(llm.generate_async("ab", SHORT)) for _ in range(30)]
        while not all(future.done() for future in asked):
            threads.add(sum(thread.name.startswith("ssd_jax") for thread in threading.enumerate()))
            await asyncio.sleep(0.001)
        return [future.result()[0].token_ids for future in asked]

    threads = set()
    alone = llm.generate("ab", SHORT)[0].token_ids
    others = sum(thread.name.startswith("ssd_jax") for thread in threading.enumerate()) - 1
    assert asyncio.run(many()) == [alone] * 30
    assert max(threads) == others + 1


def test_an_error_of_a_round_reaches_a_task(llm, monkeypatch):
    def fails(engine):
        raise ValueError("this round")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fails)
        with pytest.raises(ValueError, match="this round"):
            asyncio.run(llm.generate_async("ab", SHORT))
    assert asyncio.run(llm.generate_async("ab", SHORT))


def slow(llm, monkeypatch):
    """Makes every round last, so that texts do not end before they are looked at."""
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: time.sleep(0.03) or step())


def test_tasks_threads_and_an_event_loop_that_is_busy_share_a_model(llm, monkeypatch):
    """A loop that is held up by other work holds up no other caller."""
    slow(llm, monkeypatch)

    async def busy():
        task = asyncio.create_task(llm.generate_async(["ab", "cd"], LONG))
        while not llm.engine._running:
            await asyncio.sleep(0)
        found = []
        thread = threading.Thread(target=lambda: found.extend(llm.generate("ab", SHORT)))
        thread.start()
        thread.join(300)  # holds up the loop
        return found, await task

    found, outputs = asyncio.run(busy())
    assert found[0].token_ids == llm.generate("ab", SHORT)[0].token_ids
    assert [output.finish_reason for output in outputs] == ["length", "length"]


def test_no_round_follows_for_a_task_whose_loop_stands_still_when_the_model_closes(
    tiny_checkpoint, monkeypatch
):
    llm = LLM(tiny_checkpoint, dtype="float32", context=64, slots=1)
    slow(llm, monkeypatch)

    async def held_up():
        task = asyncio.create_task(llm.generate_async("ab", LONG))
        while not llm.engine._running:
            await asyncio.sleep(0)
        llm.close()
        assert not llm._rounds._thread.is_alive()
        with pytest.raises(SsdError, match="closed"):
            await task

    asyncio.run(held_up())


def test_requests_that_wait_for_a_slot_take_no_thread_of_the_event_loop(llm, monkeypatch):
    slow(llm, monkeypatch)

    async def free():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        running = [llm.stream_async("ab", LONG) for _ in range(2)]
        for task in running:
            await anext(task)
        queued = asyncio.create_task(llm.generate_async("ab", SHORT))
        while not llm.engine._seats.waiting:
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.to_thread(str), 300)
        assert llm.engine._seats.waiting
        for task in running:
            await task.aclose()
        return await queued

    assert asyncio.run(free())


LONG = dataclasses.replace(SHORT, max_tokens=50)


def test_a_stream_that_is_kept_is_cancelled_when_it_is_closed(llm, monkeypatch):
    slow(llm, monkeypatch)
    events = llm.stream("ab", LONG)
    for _event in events:
        break
    assert llm.engine.has_work
    events.close()
    wait_until_idle(llm.engine)


async def streamed(llm):
    return [event async for event in llm.stream_async("ab", LONG)]


def test_an_event_loop_goes_on_while_many_requests_are_queued(llm, monkeypatch):
    monkeypatch.setattr("ssd_jax.llm.calls._BATCH", 2)
    happened, add = [], RoundThread.add

    def add_and_note(self, caller, requests):
        happened.append(len(requests))
        add(self, caller, requests)

    monkeypatch.setattr(RoundThread, "add", add_and_note)

    async def both():
        made = asyncio.create_task(llm.generate_async(["ab"] * 5, SHORT))
        while not happened:
            await asyncio.sleep(0)
        while not made.done():
            happened.append("beat")
            await asyncio.sleep(0)
        return await made

    assert len(asyncio.run(both())) == 5
    assert [event for event in happened if event != "beat"] == [2, 2, 1]
    assert happened.index(1) > happened.index("beat") > 0


@pytest.mark.parametrize("ask", [streamed, lambda llm: llm.generate_async(["ab", "cd"], LONG)])
def test_a_cancelled_task_is_told_so_and_cancels_what_it_asked_for(llm, monkeypatch, ask):
    began, goes_on, step, rounds = threading.Event(), threading.Event(), Engine.step, []

    def held(engine):
        rounds.append(began.set())
        assert goes_on.wait(300)
        return step(engine)

    async def cancel():
        task = asyncio.create_task(ask(llm))
        await asyncio.to_thread(began.wait, 300)
        task.cancel()
        await asyncio.wait([task])  # while the round goes on
        goes_on.set()
        return task.cancelled()

    monkeypatch.setattr(Engine, "step", held)
    assert asyncio.run(cancel())
    wait_until_idle(llm.engine)
    assert len(rounds) == 1


def test_public_names_help_and_repr_are_complete(llm):
    assert set(dir(ssd_jax)) == set(ssd_jax.__all__)
    assert {"DeviceError", "__version__"} <= set(dir(ssd_jax))
    assert issubclass(ssd_jax.DeviceError, SsdError)
    assert "  top_k: likeliest tokens kept; 0 or -1 is off." in SamplingParams.__doc__
    assert "  mode: decoding mode;" in Config.__doc__
    assert "slots=2" in repr(llm)
    assert "dtype='float32'" in repr(llm)


def test_requests_without_parameters_are_sampled_as_configured(tiny_checkpoint, tmp_path):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    fields = {"eos_token_id": 256, "temperature": 0.7, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(fields))
    plain = LLM(path, load=False)
    assert plain.get_default_sampling_params() == plain.request("x").params == SamplingParams()
    llm = LLM(path, load=False, generation_config="auto")
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=20)
    assert llm.request("x").params.temperature == 0.7
    assert llm.request("x", SHORT).params == SHORT


def test_a_closed_model_says_so(tiny_checkpoint):
    llm = LLM(tiny_checkpoint, dtype="float32", context=64, load=False)
    llm.close()
    llm.close()
    calls = [
        lambda: llm.generate("ab"),
        lambda: next(llm.stream("ab")),
        lambda: asyncio.run(llm.generate_async("ab")),
        lambda: llm.engine,
        llm.__enter__,
        llm.load,
        lambda: llm.loaded,
        lambda: llm.request("ab"),
        lambda: llm.encode("ab"),
    ]
    for call in calls:
        with pytest.raises(SsdError, match="this model is closed; open it again"):
            call()


@pytest.mark.parametrize(
    "setup",
    [
        {},
        pytest.param({"mode": "sd", "k": 2}, marks=pytest.mark.more),
        {"mode": "ssd", "k": 2, "budget": 4, "draft_placement": "inline"},
        {"mode": "auto", "k": 2, "budget": 4, "draft_placement": "inline"},
    ],
    ids=["ar", "sd", "ssd", "auto"],
)
def test_closing_frees_the_memory_of_devices(tiny_checkpoint, setup, tmp_path):
    if setup:
        setup = {"draft": tiny_checkpoint, **setup}
    gc.collect()
    others = {id(array) for array in jax.live_arrays()}
    llm = LLM(tiny_checkpoint, dtype="float32", context=64, compile_cache=str(tmp_path), **setup)
    next(llm.stream("ab", SHORT))
    mode, lines = llm.mode, llm.notices
    assert any(id(array) not in others for array in jax.live_arrays())
    llm.close()
    assert [a.shape for a in jax.live_arrays() if id(a) not in others] == []
    assert (llm.mode, llm.notices) == (mode, lines)
    assert mode in llm.modes


def test_a_model_that_is_closed_while_it_loads_ends_what_it_has_loaded(
    tiny_checkpoint, monkeypatch
):
    llm, ended = LLM(tiny_checkpoint, dtype="float32", context=64, load=False), []

    def load(*_, **__):
        llm.close()  # as another thread may
        return SimpleNamespace(
            fallbacks=SimpleNamespace(lines=()), close=lambda: ended.append(True)
        )

    monkeypatch.setattr(ssd_jax.llm.llm, "load", load)
    with pytest.raises(SsdError, match="this model is closed; open it again"):
        llm.load()
    assert ended == [True]


FORKS = """
import atexit, os, sys
from ssd_jax import LLM, SsdError
from ssd_jax.engine.rounds.trace import Event
target, path = sys.argv[1:]
with LLM(target, load=False, trace=path, compile_cache="off") as llm:
    llm._resources.trace.add(Event(1, "host", "a round", 0.0, 1.0, {}))
    llm._rounds._changed.acquire()  # as another thread has it
    if os.fork() == 0:
        try:
            llm.generate("hello")
        except SsdError as error:
            print("spawn" in str(error), flush=True)
        llm.close()
        atexit._run_exitfuncs()
        os._exit(0)  # JAX's own threads, which a fork has not, are waited for behind this
    os.wait()
    llm._rounds._changed.release()
    print(os.path.exists(path))
print(os.path.exists(path))
"""


@pytest.mark.more
def test_a_fork_refuses_calls_and_ends_and_writes_nothing_of_a_model(tiny_checkpoint, tmp_path):
    command = [sys.executable, "-c", FORKS, str(tiny_checkpoint), str(tmp_path / "trace.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


@pytest.mark.parametrize(
    ("mode", "k", "message"),
    [
        ("foo", None, "mode = 'foo' is unknown; one of ar, sd"),
        (
            "ssd",
            None,
            "mode = 'ssd' was not prepared; open the model with mode = 'ssd' and a draft",
        ),
        ("ar", 5, "mode ar: k = 5 was not prepared, only [0]"),
        ("sd", 0, "mode sd: k = 0 was not prepared, only [2]"),
        ("sd", 3, "mode sd: k = 3 was not prepared, only [2]; open with ks=[3]"),
        ("sd", 2.0, "mode sd: k = 2.0 was not prepared, only [2]"),
        ("ar", False, "mode ar: k = False was not prepared, only [0]"),
    ],
)
def test_a_mode_or_k_that_was_not_prepared_is_refused(tiny_checkpoint, mode, k, message):
    llm = LLM(tiny_checkpoint, dtype="float32", mode="sd", draft="ngram", k=2, load=False)
    with pytest.raises(InputError) as error:
        llm.engine_of(mode, k)
    assert str(error.value) == message
