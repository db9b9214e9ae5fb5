"""What a model needs of the machine's memory, and the line that refuses it."""

from __future__ import annotations

import jax
import pytest

from ssd_jax import LLM, InputError, memory
from ssd_jax.memory import host_parts
from ssd_jax.placement.placement import Placement

SMALL = {"dtype": "float32", "context": 64, "slots": 2, "compile_cache": "off"}


def size(structs) -> int:
    return sum(struct.size * struct.dtype.itemsize for struct in jax.tree.leaves(structs))


@pytest.fixture(scope="module")
def ssd(tiny_checkpoint):
    target = str(tiny_checkpoint)
    draft = {"draft": target, "k": "2", "budget": "4", "draft_placement": "inline"}
    return LLM(target, mode="ssd", load=False, **draft, **SMALL)


def parts(llm, engines, kind="inline"):
    return host_parts(
        llm.config,
        llm.target,
        llm.draft,
        llm.context,
        placement=Placement(kind=kind),
        engines=engines,
    )


def test_weights_and_every_engines_slots_are_counted(ssd):
    weights = size(ssd.target.model.parameter_structs())
    pages = size(ssd.target.model.page_structs(2, 128))
    one = parts(ssd, [("ssd", 2)])
    assert one["weights of the target"] == one["weights of the draft"] == weights
    assert one["its keys and values"] == one["the draft's keys and values"] == pages
    assert one["branches"] > size(ssd.draft.model.branch_structs(2, 2, 4))
    more = parts(ssd, [("ssd", 2), ("sd", 2), ("ar", 0)])
    assert more["its keys and values"] == 3 * pages
    assert more["the draft's keys and values"] == 2 * pages
    assert more["branches"] == one["branches"]


def test_a_draft_in_a_process_of_its_own_is_on_the_same_machine(ssd):
    weights = size(ssd.draft.model.parameter_structs())
    assert parts(ssd, [("ssd", 2)], "process") == parts(ssd, [("ssd", 2)])
    both = parts(ssd, [("ssd", 2), ("sd", 2)], "process")
    assert both["weights of the draft"] == 2 * weights  # mode sd has the draft here


def test_on_an_accelerator_only_the_draft_process_counts(ssd, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert sum(parts(ssd, [("ssd", 2), ("sd", 2)]).values()) == 0
    apart = parts(ssd, [("ssd", 2), ("sd", 2), ("ar", 0)], "process")
    monkeypatch.undo()
    here = parts(ssd, [("ssd", 2)])
    drafts = ("weights of the draft", "the draft's keys and values", "branches")
    assert apart == {name: here[name] for name in drafts}


def test_what_does_not_fit_is_refused_before_weights_load(tiny_checkpoint, monkeypatch):
    llm = LLM(str(tiny_checkpoint), load=False, **SMALL)
    needed = sum(parts(llm, [("ar", 0)]).values())
    weights = size(llm.target.model.parameter_structs())
    assert weights < needed
    monkeypatch.setattr(memory, "memory_limit", lambda: (needed - 1, "the control group of /x"))
    monkeypatch.setattr("ssd_jax.llm.load", lambda *_args, **_kw: pytest.fail("loads"))
    with pytest.raises(
        InputError,
        match=r"slots = 2 of context = 64 need .* GiB of memory \(weights of the target .*keys and "
        r"values .*\), the control group of /x has .*; lower one of them",
    ):
        llm.load()


def test_an_engine_of_another_mode_is_refused_where_it_does_not_fit_beside(
    tiny_checkpoint, monkeypatch
):
    llm = LLM(str(tiny_checkpoint), mode="sd", draft="ngram", k="1", **SMALL)
    both = sum(parts(llm, [("sd", 1), ("ar", 0)]).values())
    monkeypatch.setattr(memory, "memory_limit", lambda: (both - 1, "this machine"))
    assert llm.engine_of("sd")
    with pytest.raises(InputError, match=r"slots = 2 .* GiB of memory"):
        llm.engine_of("ar")
    monkeypatch.setattr(memory, "memory_limit", lambda: (both, "this machine"))
    assert llm.engine_of("ar")
