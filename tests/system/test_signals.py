"""Real SIGINTs at random moments of a tiny model's calls: the next call works and says the same."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from ssd_jax import LLM, SamplingParams
from tests.checkpoints import tiny_pair

PROMPTS = ["hello", "a prompt of two chunks. " * 6, "x", "1 2 3"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=7)
FEW, MANY = 5, 100


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("signals")
    tiny_pair.write(root, "qwen3")
    return root


def opened(root, **settings):
    """Coupled, so that every mode says the same."""
    settings = {"draft_placement": "inline", "slots": 4, "k": "3", "budget": "8"} | settings
    return LLM(
        str(root / "target"),
        mode="ssd",
        draft=str(root / "draft"),
        verify="coupled",
        exact="bitwise",
        dtype="float32",
        context=320,
        fan_out="confidence",
        compile_cache=jax.config.jax_compilation_cache_dir,
        **settings,
    )


@pytest.fixture(scope="module")
def llm(checkpoints):
    with opened(checkpoints) as llm:
        yield llm


@pytest.fixture(scope="module")
def remote(checkpoints):
    with opened(checkpoints, draft_placement="process") as llm:
        yield llm


def generated(llm, mode, place):
    """All prompts at once, or one of them as a stream; ids by place."""
    if place % 2:
        return {i: o.token_ids for i, o in enumerate(llm.generate(PROMPTS, PARAMS, mode=mode))}
    stream = llm.stream(PROMPTS[0], PARAMS, mode=mode)
    return {0: [token for event in stream for token in event.token_ids]}


def interrupted(call, seconds):
    """Calls while a SIGINT comes within these seconds; returns whether it was heard."""

    def shoot():
        time.sleep(random.uniform(0, seconds))
        os.kill(os.getpid(), signal.SIGINT)

    shooter = threading.Thread(target=shoot)
    try:
        shooter.start()
        call()
        shooter.join()
        time.sleep(1e-3)
    except KeyboardInterrupt:
        return True
    finally:
        shooter.join()
    return False  # Python drops what is raised where it collects garbage


def interrupt_often(llm, mode, count):
    random.seed(count)
    right = dict(enumerate(o.token_ids for o in llm.generate(PROMPTS, PARAMS, mode="ar")))
    began = time.perf_counter()
    generated(llm, mode, 1)
    usual = time.perf_counter() - began
    interruptions = 0
    for place in range(count):
        interruptions += interrupted(lambda place=place: generated(llm, mode, place), usual)
        found = generated(llm, mode, place // 2)
        assert found == {i: right[i] for i in found}, f"after SIGINT {place}"
    assert interruptions > count / 2
    engine = llm.engine_of(mode)
    assert engine.broken is None
    assert not engine._running


@pytest.mark.more
@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_after_ctrl_c_the_next_call_is_right(llm, mode):
    interrupt_often(llm, mode, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_after_any_of_many_ctrl_c_the_next_call_is_right(llm, mode):
    interrupt_often(llm, mode, MANY)


@pytest.mark.slow
def test_after_ctrl_c_a_draft_in_a_process_goes_on(remote):
    interrupt_often(remote, "ssd", 2 * FEW)


def interrupt_among_threads(llm, mode, count, others=3):
    """The main thread is interrupted; what other threads ask for meanwhile is as ever."""
    random.seed(count)
    right = dict(enumerate(o.token_ids for o in llm.generate(PROMPTS, PARAMS, mode="ar")))
    done, calls = threading.Event(), [0] * others

    def keep_calling(number):
        while not done.is_set():
            found = generated(llm, mode, calls[number] + number)
            assert found == {i: right[i] for i in found}
            calls[number] += 1

    with ThreadPoolExecutor(others) as pool:
        running = [pool.submit(keep_calling, number) for number in range(others)]
        try:
            began = time.perf_counter()
            generated(llm, mode, 1)
            usual = time.perf_counter() - began
            for place in range(count):
                interrupted(lambda place=place: generated(llm, mode, place), usual)
                found = generated(llm, mode, place // 2)
                assert found == {i: right[i] for i in found}, f"after SIGINT {place}"
        finally:
            done.set()
        for future in running:
            future.result()
    assert min(calls) > 0
    assert not llm.engine_of(mode)._running


@pytest.mark.more
def test_ctrl_c_in_one_of_four_threads_leaves_the_others_alone(llm):
    interrupt_among_threads(llm, "ssd", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_many_ctrl_c_in_one_of_four_threads_leave_the_others_alone(llm, mode):
    interrupt_among_threads(llm, mode, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_four_threads_at_four_slots_are_twice_as_fast_as_one_after_another(llm, mode):
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    def call(_number):
        return llm.generate("hello", params, mode=mode)[0].token_ids

    def seconds(threads):
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            assert len({tuple(ids) for ids in pool.map(call, range(16))}) == 1
        return time.perf_counter() - began

    seconds(1)
    ratios = [seconds(1) / seconds(4) for _ in range(5)]
    print(f"{mode}: {sorted(ratios)}")
    assert sorted(ratios)[2] > 2


@pytest.mark.slow
def test_a_process_may_end_while_daemon_threads_generate(checkpoints):
    cache = jax.config.jax_compilation_cache_dir
    code = f"""
import sys, threading, time
from ssd_jax import LLM, SamplingParams
llm = LLM({str(checkpoints / "target")!r}, slots=4, compile_cache={cache!r})
params = SamplingParams(max_tokens=300, ignore_eos=True)
def call():
    while True:
        llm.generate("hello", params)
llm.generate("hello")
for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
sys.exit(3)
"""
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
        assert (ended.returncode, ended.stderr) == (3, "")
