"""Which programs of a pair are compiled for which devices, without compiling any."""

import dataclasses

import jax
import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.device_groups import Grid
from ssd_jax.tools.aot import pair as pairs
from ssd_jax.tools.aot import parts
from ssd_jax.tools.aot.chips import Chip, Roofline
from ssd_jax.tools.aot.configurations import read_configuration
from ssd_jax.tools.aot.parts import ChipSlice, Compiled
from ssd_jax.tools.aot.programs import Sizes
from ssd_jax.tools.aot.traffic import ProgramWork
from tests.tools.aot import specs

TREES = ("forward_tree", "accept_tree", "begin_tree", "grow_tree")
SIZES = Sizes(slots=2, context=256, k=2, branches=4)
ABOUT = specs.config(vocab_size=1024)
PAIR = pairs.ModelPair(target=ABOUT, draft=ABOUT, target_dtype="bfloat16", draft_dtype="bfloat16")
COMPILED = Compiled(
    work=ProgramWork(0, 0, 0, ()),
    bounds=Roofline(1, 0, 0.0, 0),
    other_buffers=0,
    temporaries=0,
    code=1,
    seconds=0.0,
)


@pytest.fixture
def compiled(monkeypatch):
    """(role, devices, program) of all that would be compiled."""
    seen = []

    def compile_program(spec, model, chip, passes=1):
        seen.append((spec.function.__name__, model.mesh.size))
        return COMPILED, None

    monkeypatch.setattr(parts, "compile_program", compile_program)
    return seen


def slice_of(count, monkeypatch, memory=1 << 40):
    chip = Chip(slices={}, memory=memory, bandwidth=1.0, flops=1.0, link=1.0)
    monkeypatch.setattr("ssd_jax.tools.aot.chips.CHIPS", {"abacus": chip})
    return ChipSlice(name="abacus", devices=jax.devices()[:count])


def test_each_mode_has_its_models_where_they_run_and_nothing_compiles_twice(compiled, monkeypatch):
    lines = []
    modes = pairs.modes_of(
        PAIR, slice_of(4, monkeypatch), SIZES, progress=lambda *said: lines.append(said)
    )
    assert list(map(str, modes)) == ["ar 4", "ar 2", "sd 4", "sd 2", "ssd 2 + 2", "ssd 2 + 1"]
    on_all, on_two = modes[0].target, modes[1].target
    assert [mode.target for mode in modes[2:]] == [on_all, *[on_two] * 3]
    drafts = [mode.draft.devices for mode in modes[2:]]
    assert drafts == [(0, 1, 2, 3), (0, 1), (2, 3), (2,)]
    targets = [("forward", 2), ("accept", 2), ("prefill", 1)]
    for size, drafts, branching in ((4, 1, 0), (2, 2, 1)):  # SD and SSD have them on other devices
        found = [name for name, devices in compiled if devices == size]
        for name, times in targets:
            assert found.count(name) == times
        assert (found.count("start"), found.count("step")) == (drafts, drafts)
        assert [found.count(name) for name in ("expand", "grow", "promote")] == [branching] * 3
    assert lines[-1][:2] == (len(compiled), len(compiled))
    assert {mode.refused(parts.chips.CHIPS["abacus"]) for mode in modes} == {None}


def test_sd_has_chains_and_trees_where_sizes_have_them(compiled, monkeypatch):
    sizes = dataclasses.replace(SIZES, nodes=7)
    modes = pairs.modes_of(PAIR, slice_of(2, monkeypatch), sizes)
    names = ["ar 2", "ar 1"]
    for mode in ("sd 2", "sd 1", "ssd 1 + 1"):
        names += [mode, f"{mode}, trees of 7"]
    assert list(map(str, modes)) == names
    assert modes[2].draft is modes[3].draft
    programs = [name[0] for part in modes[3].parts for name in part.programs]
    assert [programs.count(name) for name in TREES] == [1] * len(TREES)
    branching = {name[0] for name in modes[-1].draft.programs}
    assert {"expand_tree", "grow_branches", "promote_tree"} <= branching
    assert {"begin_tree", "grow_tree", "adopt_tree"} <= branching  # after a miss
    assert len(compiled) == len(programs) * 2 + len(modes[-1].draft.programs)


@pytest.mark.usefixtures("compiled")
def test_of_devices_that_heads_do_not_divide_into_a_power_of_two_is_compared_too(monkeypatch):
    about = specs.config(vocab_size=1536)
    pair = dataclasses.replace(PAIR, target=about, draft=about)
    modes = pairs.modes_of(pair, slice_of(3, monkeypatch), SIZES)
    assert list(map(str, modes)) == ["ar 3", "ar 2", "sd 3", "sd 2", "ssd 2 + 1"]
    assert modes[1].target is modes[3].target is modes[4].target


def test_a_draft_is_not_compiled_beside_a_target_that_does_not_fit(compiled, monkeypatch):
    on_all, on_two, *_ = pairs.modes_of(PAIR, slice_of(4, monkeypatch), SIZES)
    held = [mode.target.weights + mode.target.pages for mode in (on_all, on_two)]
    compiled.clear()
    modes = pairs.modes_of(PAIR, slice_of(4, monkeypatch, sum(held) // 2), SIZES)
    assert {devices for _, devices in compiled} == {4}
    fits = {str(mode): mode.target.refused is None for mode in modes}
    assert [name for name in fits if fits[name]] == ["ar 4", "sd 4"]


def test_one_device_has_no_split_and_a_given_one_is_the_only_one(compiled, monkeypatch):
    assert len(pairs.modes_of(PAIR, slice_of(1, monkeypatch), SIZES)) == 2
    split = ((0, 1), (3,))
    *_, last = pairs.modes_of(PAIR, slice_of(4, monkeypatch), SIZES, split)
    assert (last.target.devices, last.draft.devices) == split


def test_the_targets_grid_is_given_and_a_draft_of_its_own_has_one_group(compiled, monkeypatch):
    modes = pairs.modes_of(PAIR, slice_of(4, monkeypatch), SIZES, grid=Grid(2, 1))
    assert list(map(str, modes)) == ["ar 2", "sd 2", "ssd 2 + 2", "ssd 2 + 1"]
    mode = pairs.modes_of(PAIR, slice_of(2, monkeypatch), SIZES)[0].target
    assert modes[0].target.weights > 1.9 * mode.weights  # each group has them
    assert modes[0].target.pages == mode.pages  # of half of the slots, and of all heads
    assert modes[1].draft.weights == modes[0].target.weights
    assert modes[2].draft.weights == mode.weights
    assert len(pairs.modes_of(PAIR, slice_of(4, monkeypatch), SIZES, grid=Grid(1, 4))) == 2


def test_sizes_alone_are_those_of_devices_that_are_compiled_for(compiled, monkeypatch):
    known = pairs.modes_of(PAIR, slice_of(4, monkeypatch), SIZES, grid=Grid(2, 1))
    compiled.clear()
    absent = ChipSlice(name="abacus", devices=parts.chips.absent_devices("abacus", 4))
    modes = pairs.modes_of(PAIR, absent, SIZES, grid=Grid(2, 1))
    assert compiled == []
    held = [
        [(p.weights, p.pages) for mode in group for p in mode.parts] for group in (known, modes)
    ]
    assert held[0] == held[1]


def test_devices_that_divide_nothing_are_refused_before_any_compile(compiled, monkeypatch):
    about = specs.config(vocab_size=1024, intermediate_size=512, num_kv_heads=4)
    odd = pairs.ModelPair(
        target=about, draft=about, target_dtype="bfloat16", draft_dtype="bfloat16"
    )
    with pytest.raises(InputError, match="3 devices divide nothing of a model with 4 key/value"):
        pairs.modes_of(odd, slice_of(3, monkeypatch), SIZES)
    assert compiled == []


def test_the_experts_that_a_verification_uses_are_said():
    sizes = dataclasses.replace(SIZES, slots=1, k=4)
    config, absent = read_configuration("qwen3-30b-a3b"), parts.chips.absent_devices("v5e", 8)
    slice_ = ChipSlice(name="v5e", devices=absent)
    lines = [
        parts.expert_lines(slice_.model(config, "bfloat16", range(8), **how), sizes)
        for how in ({}, {"expert_parallel": True})
    ]
    line = "of 128 experts of a layer 1 row uses 8, 5 rows use 35, if all are chosen alike"
    of_one = "1 row uses 8 (2.5 of one device's 16), 5 rows use 35 (7.0 of one device's 16)"
    shared = f"of 128 experts of a layer {of_one}, if all are chosen alike"
    assert lines == [[line], [shared]]
    assert parts.expert_lines(slice_.model(ABOUT, "bfloat16", range(8)), sizes) == []
