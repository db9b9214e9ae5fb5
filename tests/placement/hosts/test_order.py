"""What devices of several processes on processors send each other does not depend on the order in
which XLA begins it."""

from __future__ import annotations

import re

import jax
import pytest

from ssd_jax.devices import passes
from ssd_jax.devices.target_programs import Programs, Verification
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.devices.forwards import forwards_only
from tests.models.golden import FLOAT32

_SENDS = re.compile(r" (?:all-\w+|reduce-scatter|collective-\w+)\(")


@pytest.mark.more
@pytest.mark.parametrize("shared", [True, False])
def test_sampling_sends_nothing_where_several_processes_share_the_devices(monkeypatch, shared):
    monkeypatch.setattr(passes, "spans_processes", lambda _mesh: shared)
    config = ModelConfig.from_hf(tiny.config("qwen3", intermediate_size=48, vocab_size=320))
    model = FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[:4]))
    with forwards_only(("accept",)):
        programs = Programs(
            model, slots=2, context=128, tokens=300, verification=Verification(logprobs=2)
        )
    sends = [bool(_SENDS.search(programs[name].as_text() or "")) for name in programs.names]
    assert sends == [not shared] * 2
