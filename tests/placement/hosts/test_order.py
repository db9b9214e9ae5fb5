"""What devices of several processes on processors send each other does not depend on the order in
which XLA begins it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

import jax
import pytest

from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs import paged as paged_programs
from ssd_jax.devices.programs import passes
from ssd_jax.devices.target import logprob_programs, masked_programs
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.programs import Programs
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.roles.drafting import Drafting
from ssd_jax.sampling.params import Report
from ssd_jax.testing import tiny
from ssd_jax.tools.aot import hlo
from tests.devices.forwards import forwards_only
from tests.models.golden import FLOAT32

_NAME = re.compile(r"%([\w.\-]+)")


@pytest.fixture(params=[True, False], ids=["shared", "own"])
def shared(request, monkeypatch) -> bool:
    """Whether the devices are taken for those of several processes."""
    for module in (passes, paged_programs):
        monkeypatch.setattr(module, "spans_processes", lambda _mesh: request.param)
    return request.param


def qwen(vocab: int = 320) -> FunctionalModel:
    config = ModelConfig.from_hf(tiny.config("qwen3", intermediate_size=48, vocab_size=vocab))
    return FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[:4]))


def within(module: hlo.Module, names: Iterable[str]) -> Iterable[hlo.Instruction]:
    """Instructions of computations, and of all that these call."""
    left, seen = [*names], set()
    while left:
        name = left.pop()
        if name in module.computations and name not in seen:
            seen.add(name)
            for computation in module.computations[name]:
                yield computation
                left += _NAME.findall(computation.rest)


def sends_where_it_branches(program) -> bool:
    module = hlo.read(program.as_text())
    sent = {collective.name for collective in module.collectives()}
    branches = [
        name
        for instruction in module.instructions("conditional", "while")
        for name in _NAME.findall(instruction.rest)
    ]
    return any(instruction.name in sent for instruction in within(module, branches))


@pytest.mark.more
def test_sampling_sends_nothing_where_several_processes_share_the_devices(shared):
    verification, masked = Verification(logprobs_of="processed"), ("masked_accept", "masked_law")
    with forwards_only(
        ("prefill", "forward", "accept", "law", "logprobs", "prompt_logprobs", *masked)
    ):
        programs = Programs(qwen(), slots=2, context=128, tokens=300, verification=verification)
        for report in get_args(Report):
            logprob_programs.load(programs, report)
        masked_programs.load(programs)
    found = {name[0]: sends_where_it_branches(programs[name]) for name in programs.names}
    sending = {name for name, sends in found.items() if sends}
    assert sending == (set() if shared else {"accept", "law", *masked})
    assert len(found) == 8
    accept = next(programs[name] for name in programs.names if name[0] == "accept")
    assert bool(hlo.read(accept.as_text()).collectives()) is not shared


@pytest.mark.more
def test_a_draft_sends_nothing_within_a_branch_or_loop_of_sampling(shared):
    with forwards_only(("start", "step")):
        drafting = Drafting(k=2, support=8, rule="ratio")
        programs = DraftPrograms(qwen(), slots=2, context=128, tokens=300, drafting=drafting)
    found = {name[0]: sends_where_it_branches(programs[name]) for name in programs.names}
    assert found == {"start": not shared, "step": not shared}
