"""The server over several devices, several processes, and several draft workers elsewhere."""

import contextlib
import signal
import subprocess
import sys

import jax
import pytest

from ssd_jax import SamplingParams
from tests.placement.hosts.processes import Processes, environment, free_port
from tests.placement.remote import workers
from tests.server.http_calls import call, post
from tests.waiting import eventually

SETTINGS = ["--context=320", "--slots=2", "--dtype=float32"]
BODY = {"model": "m", "prompt": "to be or not", "max_tokens": 40, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target and a draft that often agree."""
    return workers.checkpoints(tmp_path_factory.mktemp("placed"))


@pytest.fixture(scope="module")
def alone(root):
    """What the target says on one device, without a draft."""
    with workers.LLM(
        str(root / "target"), context=320, slots=2, dtype="float32", verify="coupled"
    ) as llm:
        ids = llm.tokenizer.encode(BODY["prompt"])
        params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=3)
        return llm.generate([ids], params)[0].text


def compile_cache():
    """The programs of all tests."""
    return f"--compile_cache={jax.config.jax_compilation_cache_dir}"


def command(root, port, *flags):
    return [
        *("ssd_jax", "serve", f"--target={root / 'target'}", f"--port={port}"),
        *("--served_model_name=m", *SETTINGS, compile_cache(), *flags),
    ]


def is_ready(port):
    with contextlib.suppress(OSError):
        return call(port, "GET", "/health/ready")[0] == 200
    return False


@contextlib.contextmanager
def served(root, *flags):
    """A server of one process with two devices of the processor; it must end well."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", *command(root, port, *flags)],
        env=environment(JAX_PLATFORMS="cpu"),
    )
    try:
        eventually(lambda: is_ready(port) or process.poll() is not None)
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()


def answer(port):
    """The text of a completion, and how it was speculated."""
    status, found = post(port, "/v1/completions", BODY)
    assert status == 200, found
    return found["choices"][0]["text"], found["metrics"]


@pytest.mark.more
def test_a_target_sharded_over_devices_says_the_same(root, alone):
    with served(root, "--mesh=tensor=2") as port:
        text, metrics = answer(port)
    assert text == alone
    assert metrics["mode"] == "ar"


@pytest.mark.slow
def test_a_target_over_processes_says_the_same_and_drains(root, alone):
    port = free_port()
    leader = command(root, port, "--mesh=tensor=4")
    with Processes(*leader) as processes:
        eventually(lambda: is_ready(port) or processes.processes[0].poll() is not None)
        assert answer(port)[0] == alone
        processes.processes[0].send_signal(signal.SIGTERM)
        assert [status for status, *_ in processes.ended()] == [0, 0]


@pytest.mark.more
def test_several_draft_workers_elsewhere_share_the_work(root, alone):
    store = compile_cache()
    with workers.started(root, store) as first, workers.started(root, store) as second:
        places = f"remote:{first.address},{second.address}"
        flags = (f"--draft={root / 'draft'}", f"--draft_placement={places}", "--k=3", "--budget=8")
        with served(root, "--mode=ssd", *flags) as port:
            text, metrics = answer(port)
            assert (text, metrics["mode"], metrics["speculating"]) == (alone, "ssd", True)
            first.process.kill()
            first.process.wait()
            text, metrics = answer(port)
            assert (text, metrics["mode"]) == (alone, "ssd")
            assert call(port, "GET", "/health/ready")[0] == 200
