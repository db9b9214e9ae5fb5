"""What a model needs of the machine's memory, and the line that refuses it."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil

import jax
import pytest

from ssd_jax import LLM, InputError
from ssd_jax.loading import memory
from ssd_jax.loading.memory import in_bytes, needs
from ssd_jax.loading.paging import paging_of
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.placement.parallel.layout import Layout
from ssd_jax.placement.placement import Placement
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS

ONE = Layout()
RECORDS, OF_DRAFT = "its records of past tokens", "the draft's records of past tokens"
ROOM = {"target": 5, "draft": 7}
LAST = 4 * (MAX_BAD_WORD_TOKENS - 1)  # bytes of a slot's last tokens
SMALL = {"dtype": "float32", "context": 64, "slots": 2, "compile_cache": "off"}


def size(structs) -> int:
    return sum(struct.size * struct.dtype.itemsize for struct in jax.tree.leaves(structs))


@pytest.fixture(scope="module")
def ssd(tiny_checkpoint):
    target = str(tiny_checkpoint)
    draft = {"draft": target, "k": "2", "budget": "4", "draft_placement": "inline"}
    return LLM(target, mode="ssd", load=False, **draft, **SMALL)


def needed(llm, engines, kind="inline", programs=(), layout=ONE):
    placement = Placement(kind=kind, layout=layout)
    return needs(dataclasses.replace(llm.resolved, placement=placement), engines, dict(programs))


def parts(llm, engines, kind="inline", **more):
    """Of this machine's memory."""
    return needed(llm, engines, kind, **more)[0].parts


@pytest.fixture
def accelerators(monkeypatch):
    """Devices that have so many bytes each."""

    def have(limit):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(memory, "device_limit", lambda _opened: limit)

    return have


def test_weights_and_every_engines_slots_are_counted(ssd):
    weights = size(ssd.target.model.parameter_structs())
    pages = size(ssd.target.model.page_struct(2, 128))
    one = parts(ssd, [("ssd", 2)])
    assert one["weights of the target"] == one["weights of the draft"] == weights
    assert one["its keys and values"] == one["the draft's keys and values"] == pages
    assert one["branches"] > size(ssd.draft.model.branch_struct(2, 2, 4))
    # Of two slots: a flag and a number a word, and the last tokens.
    records = 2 * (ssd.target.model.config.vocab_size * 5 + LAST)
    assert one[RECORDS] == one[OF_DRAFT] == records
    more = parts(ssd, [("ssd", 2), ("sd", 2), ("ar", 0)])
    assert more["its keys and values"] == 3 * pages
    assert more["the draft's keys and values"] == 2 * pages
    assert (more[RECORDS], more[OF_DRAFT]) == (3 * records, 2 * records)
    assert more["branches"] == one["branches"]


def test_a_draft_in_a_process_of_its_own_is_on_the_same_machine(ssd):
    weights = size(ssd.draft.model.parameter_structs())
    assert parts(ssd, [("ssd", 2)], "process") == parts(ssd, [("ssd", 2)])
    both = parts(ssd, [("ssd", 2), ("sd", 2)], "process")
    assert both["weights of the draft"] == 2 * weights  # mode sd has the draft here


def test_every_worker_has_the_weights_and_pages_of_its_slots(ssd):
    one = parts(ssd, [("ssd", 2)], "process")
    by_slots = parts(ssd, [("ssd", 2)], "process", layout=Layout(2, 1))
    by_branches = parts(ssd, [("ssd", 2)], "process", layout=Layout(1, 2))
    weights, pages = "weights of the draft", "the draft's keys and values"
    assert by_slots[weights] == by_branches[weights] == 2 * one[weights]
    for part in (pages, OF_DRAFT):
        assert by_slots[part] == one[part]
        assert by_branches[part] == 2 * one[part]


def test_slots_that_workers_have_alike_have_records_of_their_own(tiny_checkpoint):
    target, draft = str(tiny_checkpoint), {"draft": str(tiny_checkpoint), "k": "2", "budget": "4"}
    draft |= {"draft_placement": "process", "page_size": 128}
    llm = LLM(target, mode="ssd", load=False, **draft, **SMALL)
    one = parts(llm, [("ssd", 2)], "process")
    by_slots = parts(llm, [("ssd", 2)], "process", layout=Layout(2, 1))
    assert by_slots["the draft's keys and values"] == 2 * one["the draft's keys and values"]
    assert by_slots[OF_DRAFT] == one[OF_DRAFT]


def test_trees_of_a_draft_are_counted_with_each_engine_of_mode_sd(tiny_checkpoint, accelerators):
    settings = {"draft": str(tiny_checkpoint), "k": "4", "tree_nodes": 12, "verify": "coupled"}
    llm = LLM(str(tiny_checkpoint), mode="sd", load=False, **settings, **SMALL)
    one = parts(llm, [("sd", 4), ("ar", 0)])
    # Three nodes of each depth but the last; of a position a page has keys and values, too.
    keys = one["the draft's keys and values"] * 9 // 128
    candidates = (1 + 9) * 6 * 8  # of a slot: after each run six tokens, and their scores
    assert keys + 2 * candidates < one["trees"] < keys + 4 * candidates
    assert parts(llm, [("sd", 4), ("sd", 4)])["trees"] == 2 * one["trees"]
    assert "trees" not in parts(llm, [("ar", 0)])
    accelerators(1 << 40)
    _, device = needed(llm, [("sd", 4)])
    assert device.parts["trees"] == one["trees"]


def test_programs_of_a_role_are_counted_where_they_run(ssd, monkeypatch):
    engines = [("ssd", 2), ("ar", 0)]
    here = parts(ssd, engines, programs=ROOM)
    assert (here["its programs"], here["the draft's programs"]) == (5, 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "its programs" not in parts(ssd, engines, programs=ROOM)


def test_every_device_of_a_processor_runs_programs(tiny_checkpoint):
    llm = LLM(str(tiny_checkpoint), load=False, mesh="data=2,tensor=2", **SMALL)
    assert parts(llm, [("ar", 0)], programs=ROOM)["its programs"] == 4 * 5


def test_on_an_accelerator_only_the_draft_process_counts(ssd, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert sum(parts(ssd, [("ssd", 2), ("sd", 2)]).values()) == 0
    apart = parts(ssd, [("ssd", 2), ("sd", 2), ("ar", 0)], "process")
    monkeypatch.undo()
    here = parts(ssd, [("ssd", 2)])
    drafts = ("weights of the draft", "the draft's keys and values", OF_DRAFT, "branches")
    assert apart == {name: here[name] for name in drafts}


def test_a_page_table_that_a_tpu_has_no_room_for_is_refused(ssd):
    execution = Execution.for_platform("tpu", "bfloat16")
    model = FunctionalModel(ssd.target.model.config, execution)
    target = dataclasses.replace(ssd.target, model=model)

    def paging(slots):
        config = dataclasses.replace(ssd.config, slots=slots, page_size=16)
        return paging_of(
            dataclasses.replace(
                ssd.resolved, config=config, context=32768, target=target, draft=None
            )
        )

    assert paging(64) == (16, 64 * 2048)
    with pytest.raises(
        InputError,
        match=r"page_size = 16 is too small for slots = 65 of context = 32768: a page_table of "
        r"65 x 2048 takes 532480 bytes; the limit is 524288; raise `page_size`",
    ):
        paging(65)


def test_a_batch_beyond_the_memory_is_refused_before_weights_load(tiny_checkpoint, monkeypatch):
    llm = LLM(str(tiny_checkpoint), load=False, **SMALL)
    least = sum(parts(llm, [("ar", 0)]).values())
    weights = size(llm.target.model.parameter_structs())
    assert weights < least
    monkeypatch.setattr(memory, "memory_limit", lambda: (least - 1, "the control group of /x"))
    monkeypatch.setattr("ssd_jax.llm.llm.load", lambda *_args, **_kw: pytest.fail("loads"))
    with pytest.raises(
        InputError,
        match=r"slots = 2 of context = 64 need .* KiB of memory \(weights of the target .*keys and "
        r"values .*\), the control group of /x has .*; lower one of them",
    ):
        llm.load()


@pytest.mark.more
def test_an_engine_of_another_k_is_refused_where_it_does_not_fit_beside(
    tiny_checkpoint, monkeypatch
):
    llm = LLM(str(tiny_checkpoint), mode="sd", draft="ngram", k="1", ks=[2], **SMALL)
    programs = {"target": llm.loaded.programs.working_memory}
    both = sum(parts(llm, [("sd", 1), ("sd", 2)], programs=programs).values())
    monkeypatch.setattr(memory, "memory_limit", lambda: (both - 1, "this machine"))
    assert llm.engine_of("sd") is llm.engine_of("ar")  # which needs no pages of its own
    with pytest.raises(InputError, match=r"slots = 2 .* of memory"):
        llm.engine_of("sd", 2)
    monkeypatch.setattr(memory, "memory_limit", lambda: (both, "this machine"))
    assert llm.engine_of("sd", 2)


def test_each_device_holds_its_role(ssd, accelerators):
    accelerators(1 << 40)
    weights = size(ssd.target.model.parameter_structs())
    pages = size(ssd.target.model.page_struct(2, 128))
    _, one = needed(ssd, [("ssd", 2), ("ar", 0)], programs=ROOM)
    assert one.memory == "each device of the target"
    assert one.parts["weights of the target"] == one.parts["weights of the draft"] == weights
    assert one.parts["its keys and values"] == 2 * pages
    assert one.parts["the draft's keys and values"] == pages
    assert one.parts["its records of past tokens"] == 2 * one.parts[OF_DRAFT] > 0
    _, target, draft = needed(ssd, [("ssd", 2), ("ar", 0)], "submesh", programs=ROOM)
    assert draft.memory == "each device of the draft"
    assert {**target.parts, **draft.parts} == one.parts
    assert target.parts["its programs"] == 5
    assert draft.parts["the draft's programs"] == 7
    assert draft.parts[OF_DRAFT] == one.parts[OF_DRAFT]
    _, alone = needed(ssd, [("ssd", 2)], "process")
    assert "weights of the draft" not in alone.parts


def test_devices_that_do_not_tell_are_not_asked_again(ssd, accelerators):
    accelerators(None)
    assert len(needed(ssd, [("ssd", 2)])) == 1


def test_shares_of_a_mesh_are_counted_per_device(tiny_checkpoint, accelerators):
    mesh = {"mesh": "data=2,tensor=2"}
    spread = LLM(str(tiny_checkpoint), load=False, **SMALL, **mesh)
    alone = LLM(str(tiny_checkpoint), load=False, **SMALL)
    accelerators(1 << 40)
    (_, split), (_, single) = (needed(llm, [("ar", 0)]) for llm in (spread, alone))
    assert split.parts["its keys and values"] * 4 == single.parts["its keys and values"]
    # The last tokens of a slot are on both devices that share its words.
    assert (split.parts[RECORDS] - LAST) * 4 == single.parts[RECORDS] - 2 * LAST
    assert split.parts["weights of the target"] < single.parts["weights of the target"]


def test_a_device_that_is_too_small_is_refused_before_weights_load(
    tiny_checkpoint, accelerators, monkeypatch
):
    llm = LLM(str(tiny_checkpoint), load=False, **SMALL)
    accelerators(1 << 10)
    monkeypatch.setattr("ssd_jax.llm.llm.load", lambda *_args, **_kw: pytest.fail("loads"))
    with pytest.raises(
        InputError, match=r"keys and values .*\), each device of the target has 1\.0 KiB"
    ):
        llm.load()


@pytest.mark.more
def test_programs_that_need_too_much_are_refused_before_anything_is_decoded(
    tiny_checkpoint, accelerators
):
    llm = LLM(str(tiny_checkpoint), **SMALL)
    room = llm.loaded.programs.working_memory
    assert room > 0
    accelerators(1 << 40)
    _, need = needed(llm, [("ar", 0)])
    accelerators(sum(need.parts.values()) + room - 1)
    with pytest.raises(InputError, match=r"its programs .* [KM]iB"):
        llm.engine_of("ar")
    accelerators(sum(need.parts.values()) + room)
    assert llm.engine_of("ar")


@pytest.mark.more
def test_programs_of_a_draft_are_counted_in_the_mode_that_runs_them(tiny_checkpoint, monkeypatch):
    draft = {"mode": "sd", "draft": str(tiny_checkpoint), "k": "1"}
    llm = LLM(str(tiny_checkpoint), **draft, **SMALL)
    room = llm.loaded.program_bytes([("sd", 1), ("ar", 0)])
    assert room == {
        "target": llm.loaded.programs.working_memory,
        "draft": llm.loaded.inline.plain().working_memory,
    }
    assert llm.loaded.program_bytes([("ar", 0)]) == {"target": room["target"]}
    both = sum(parts(llm, [("sd", 1)], programs=room).values())
    monkeypatch.setattr(memory, "memory_limit", lambda: (both - 1, "this machine"))
    with pytest.raises(InputError, match=r"the draft's programs .* [KM]iB\), this machine has"):
        llm.engine_of("sd")
    monkeypatch.setattr(memory, "memory_limit", lambda: (both, "this machine"))
    assert llm.engine_of("sd")


def test_sizes_have_the_unit_that_shows_them():
    sizes = (5, 3 << 10, 3 << 19, 5 << 29)
    assert [in_bytes(size) for size in sizes] == ["5 bytes", "3.0 KiB", "1.5 MiB", "2.5 GiB"]


def test_a_draft_that_cuts_the_targets_context_is_named(tiny_checkpoint, tmp_path, caplog):
    short = tmp_path / "short"
    shutil.copytree(tiny_checkpoint, short)
    config = json.loads((short / "config.json").read_text())
    usual = LLM(str(tiny_checkpoint), load=False, compile_cache="off")
    config["max_position_embeddings"] = usual.context - 8
    (short / "config.json").write_text(json.dumps(config))
    settings = {"mode": "sd", "draft": str(short), "load": False, "compile_cache": "off"}
    line = f"context = {usual.context - 8}, and not {usual.context}, since the draft {short}"
    with caplog.at_level(logging.WARNING):
        cut = LLM(str(tiny_checkpoint), **settings)
    assert cut.context == usual.context - 8
    assert cut.notices[0].startswith(line)
    assert cut.notices[0] in caplog.messages
    assert usual.notices == ()
    assert LLM(str(tiny_checkpoint), context=100, **settings).notices == ()
