"""What a worker is asked for reaches it, and what it cannot have is refused before weights load."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.errors import InputError
from ssd_jax.kernels.tree_attention.api import why_not
from ssd_jax.llm.llm import LLM
from ssd_jax.placement.placement import Placement
from ssd_jax.placement.process import loading, memory
from ssd_jax.placement.process.loading import load_sessions, open_draft
from ssd_jax.placement.visible import Devices
from ssd_jax.testing import tiny

SETTINGS = {
    "mode": "ssd",
    "k": 3,
    "budget": "8",
    "context": 320,
    "slots": 4,
    "dtype": "float32",
    "compile_cache": "off",
    "draft_placement": "process",
    "kv_memory": "1MiB",
}


class AskedError(Exception):
    """Carries settings of a worker that is not started."""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the worker of a model with these settings would be asked for."""
    tiny.write_checkpoint(tmp_path / "target", "qwen3")

    def worker(wish, *_):
        raise AskedError(wish)

    def asked(**settings):
        monkeypatch.setattr("ssd_jax.loading.load._make_workers", worker)
        target = str(tmp_path / "target")
        with pytest.raises(AskedError) as raised:
            LLM(target, draft=target, **SETTINGS | settings)
        return raised.value.args[0]

    return asked


@pytest.fixture
def no_programs(monkeypatch):
    def compiles(*_, **_more):
        raise AssertionError("compiles")

    monkeypatch.setattr(OpenedModel, "load", lambda self: [])
    monkeypatch.setattr(loading, "DraftPrograms", compiles)


def test_attention_asked_for_by_name_is_the_workers_too(asked):
    wish = asked(attention="xla", page_size=16)
    assert open_draft(wish.spec, wish.resources).model.execution.attention == "xla"


@pytest.mark.skipif(why_not("cpu", "cpu") is not None, reason="there is no kernel here")
def test_a_worker_that_is_not_told_the_attention_refuses_small_pages(asked, no_programs):
    """The planted fault."""
    wish = asked(attention="xla", page_size=16)
    spec = msgspec.structs.replace(wish.spec, attention="auto")
    with pytest.raises(InputError, match="page_size = 16 is no multiple of 64, which attention"):
        load_sessions(spec, wish.resources)


def test_a_platform_other_than_the_targets_has_its_own_attention():
    there = Placement(kind="process", workers=(Devices("gpu", (1,)),))
    assert there.worker_attention("cpu") == "auto"
    assert there.worker_attention("xla") == "xla"
    here = dataclasses.replace(there, workers=(Devices("cpu", (0,)),))
    assert here.worker_attention("cpu") == "cpu"
    assert dataclasses.replace(there, kind="remote").worker_attention("cpu") == "cpu"


MAX_FRAME = 2**20


@pytest.mark.parametrize(
    ("device", "whose"), [(MAX_FRAME, "each of its devices"), (None, "this host")]
)
def test_slots_beyond_a_workers_memory_are_refused(asked, no_programs, monkeypatch, device, whose):
    wish = asked(slots=64, kv_memory=None)
    monkeypatch.setattr(memory, "device_limit", lambda _opened: device)
    monkeypatch.setattr(memory, "memory_limit", lambda: (MAX_FRAME, "this host"))
    words = (
        r"64 slots of context = 320 with budget = 8 and k = 3 need \d+ MiB of the draft worker's "
        r"memory \(keys and values \d+ MiB, .* branches \d+ MiB\), and there are 0 MiB for this "
        rf"engine \({whose}: 1 MiB, weights 0 MiB\); lower one of them$"
    )
    with pytest.raises(InputError, match=words):
        load_sessions(wish.spec, wish.resources)


def test_programs_beyond_a_workers_memory_are_refused(asked, no_programs, monkeypatch):
    wish, room = asked(), 64 * MAX_FRAME
    monkeypatch.setattr(loading, "DraftPrograms", lambda *_, **_more: None)
    menu = [SimpleNamespace(working_memory=room), SimpleNamespace(working_memory=0)]
    monkeypatch.setattr(loading.ExpansionPrograms, "menu", lambda *_, **_more: menu)
    monkeypatch.setattr(memory, "memory_limit", lambda: (room, "this host"))
    with pytest.raises(
        InputError, match=r"branches \d+ MiB, programs 64 MiB\), and there are 63 M"
    ):
        load_sessions(wish.spec, wish.resources)


def test_a_draft_that_fits_is_loaded(asked, no_programs, monkeypatch):
    """And a worker that does not look would load in any case."""
    wish = asked()
    with pytest.raises(AssertionError, match="compiles"):
        load_sessions(wish.spec, wish.resources)
    monkeypatch.setattr(memory, "memory_limit", lambda: (MAX_FRAME // 4, "this host"))
    monkeypatch.setattr(loading, "check_memory", lambda *_, **_more: None)
    with pytest.raises(AssertionError, match="compiles"):
        load_sessions(wish.spec, wish.resources)
