"""Engines of one `LLM` count the requests of a seed and index together; on scripted roles."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_jax.config.config import Config
from ssd_jax.engine.requests.occurrences import derived
from ssd_jax.llm import llm as llm_module
from ssd_jax.llm.llm import LLM
from ssd_jax.loading import drafts, loaded
from ssd_jax.loading.loaded import Roles
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget
from ssd_jax.tuning import opening
from tests.engine.letters import LONG, request, spell
from tests.fakes.branching import FakeBranchingDraft
from tests.fakes.tuners import Restless
from tests.loading.variation import resolved_of

CHOSEN = Restless((1, 2), (8,))


@dataclasses.dataclass(frozen=True)
class Scripted:
    """In place of `Loaded`: roles of modes ar, and sd whose K changes; `targets` are theirs."""

    targets: list[FakeTarget]
    tuner: Any = None
    rank_rates: Any = None

    @property
    def fallbacks(self):
        return SimpleNamespace(lines=(), metrics={})

    def roles(self, mode, k):
        self.targets.append(FakeTarget(spell(LONG)))
        drafter = TunedDrafter(FakeDrafter(spell(LONG)), CHOSEN) if mode == "sd" else None
        return Roles(self.targets[-1], drafter)

    def prepare(self, *_):
        pass

    def program_bytes(self, _engines):
        return {}

    def new_stock(self):
        return None

    def close(self):
        pass


@pytest.fixture
def events(monkeypatch):
    """What a chooser is asked to do."""
    found: list[str] = []
    made = SimpleNamespace(
        tuner=lambda *_: CHOSEN,
        timer=lambda *_: None,
        planner=lambda *_: None,
        rank_rates=RankRates,
        freeze_observations=lambda: found.append("freeze"),
        close=lambda: found.append("close"),
    )
    monkeypatch.setattr(opening, "open_chooser", lambda *_: made)
    return found


def opened(checkpoint, monkeypatch, **settings):
    """A model of mode sd whose K is chosen, and the targets of its engines."""
    targets: list[FakeTarget] = []
    monkeypatch.setattr(llm_module, "load", lambda *_, **__: Scripted(targets))
    llm = LLM(
        checkpoint, mode="sd", draft="ngram", k="auto", load=False, compile_cache="off", **settings
    )
    return llm, targets


def ask(llm, mode, **more):
    list(llm.run([request(seed=5, temperature=1.0, **more)], mode))


def test_seeds_are_counted_over_requests_with_and_without_a_draft(
    tiny_checkpoint, monkeypatch, events
):
    llm, targets = opened(tiny_checkpoint, monkeypatch)
    for mode in ("ar", "sd", "sd", "ar"):
        ask(llm, mode)
    (target,) = targets
    seeds = [opening.params.seed for opening in target.opened]
    assert seeds == [5, derived(5, 0, 0, 1), derived(5, 0, 0, 2), 5]


@pytest.mark.parametrize(
    ("verify", "frozen"), [("ratio", ["freeze"]), ("block", ["freeze"]), ("coupled", [])]
)
def test_observations_beside_sampled_requests_are_not_kept_for_the_next_start(
    tiny_checkpoint, monkeypatch, events, verify, frozen
):
    """From the first sampled request on, whichever engine has it."""
    llm, _ = opened(tiny_checkpoint, monkeypatch, verify=verify)
    list(llm.run([request()], "sd"))
    assert events == []
    ask(llm, "ar")
    assert events == frozen
    for mode in ("sd", "ar"):
        ask(llm, mode)
    assert events == frozen


@pytest.mark.parametrize(
    ("paging", "exact", "timed"),
    [
        (None, "distribution", False),
        ("pages that slots share", "bitwise", False),
        ("pages that slots share", "distribution", True),
    ],
)
def test_lengths_depend_on_others_where_an_inline_draft_may_be_put_off(
    monkeypatch, paging, exact, timed
):
    monkeypatch.setattr(drafts, "BranchDraft", FakeBranchingDraft)
    draft = FakeBranchingDraft(spell(LONG), k=3, branches=8, budget=8)
    monkeypatch.setattr(drafts.EngineDrafts, "branching", lambda self, patience: draft)
    execution = SimpleNamespace(one_array=False)
    config = Config(target="a", draft="b", mode="ssd", k="3", budget="8")
    target = SimpleNamespace(tokenizer=SimpleNamespace(size=128))
    made = loaded.Loaded(
        resolved=resolved_of(config, target=target),
        programs=SimpleNamespace(paging=paging, model=SimpleNamespace(execution=execution)),
        parameters=[],
        inline=None,
        worker=None,
        fallbacks=SimpleNamespace(exact=exact),
    )
    assert made.drafts.controller(3, patience=None).timed == timed
