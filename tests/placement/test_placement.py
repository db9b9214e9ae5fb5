"""Where the draft runs: what users may write, what `auto` takes, what is refused before loading."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import pytest

from ssd_jax import LLM
from ssd_jax.cli import loading
from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_BUDGETS, BUDGET
from ssd_jax.errors import InputError
from ssd_jax.placement.device_groups import DeviceGroups, Grid
from ssd_jax.placement.placement import place

SSD = {"mode": "ssd", "draft": "a path"}


def split(count, target=None, draft=None):
    return DeviceGroups.parse(target, draft).split(count)


@pytest.mark.parametrize(
    ("count", "target", "draft"),
    [(2, 1, 1), (3, 2, 1), (4, 2, 2), (5, 4, 1), (7, 4, 2), (8, 4, 4), (9, 8, 1)],
)
def test_by_default_both_roles_get_a_power_of_two_and_the_target_the_larger_one(
    count, target, draft
):
    one, other = split(count)
    assert (len(one), len(other)) == (target, draft)
    assert one + other == tuple(range(target + draft))


def test_each_worker_gets_a_power_of_two():
    groups = DeviceGroups.parse(None, None)
    assert groups.split(7, workers=3) == ((0, 1, 2, 3), (4, 5, 6))
    assert groups.split(16, workers=3) == ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13))
    assert groups.split(5, workers=2)[1] == (4,)  # which is refused when it is dealt


def test_workers_of_a_submesh_get_all_devices_that_they_can_share():
    found = place("submesh", DeviceGroups.parse(None, None), workers=3)
    assert found.target.size == 4
    assert found.draft.devices.shape == (3, 1)


def test_a_role_without_devices_of_its_own_gets_those_that_are_left():
    assert split(4, "0-2") == ((0, 1, 2), (3,))
    assert split(4, draft="0,2") == ((1, 3), (0, 2))
    assert split(8, "4-5", "0") == ((4, 5), (0,))


@pytest.mark.parametrize(
    ("count", "target", "draft", "message"),
    [
        (1, None, None, "of their own need two, one for each role, and there is 1; use"),
        (1, None, None, "draft_placement = 'process' with .* 'cpu', or .*device_count=2"),
        (8, "0-3", "3-7", "target_devices = '0-3' and draft_devices = '3-7' share 3; give each"),
        (4, "0-1", "7", "draft_devices = 7: there is no device 7; there are 0 to 3"),
        (4, "0-5", None, "target_devices = 0,1,2,3,4,5: there is no device 4,5"),
        (
            4,
            "0-3",
            None,
            "target_devices = 0,1,2,3 are all devices .* none for the draft; give few",
        ),
        (
            4,
            None,
            "0-3",
            "draft_devices = 0,1,2,3 are all devices .* none for the target; give few",
        ),
        (4, "", None, "target_devices = '' is not understood; give device numbers and ranges"),
        (4, None, "3-1", "draft_devices = '3-1' is not understood"),
    ],
)
def test_groups_that_cannot_be_are_refused_with_values_and_remedy(count, target, draft, message):
    with pytest.raises(InputError, match=message):
        split(count, target, draft)


def test_devices_of_a_draft_are_for_one_that_is_elsewhere():
    with pytest.raises(InputError, match="draft_devices = '1' is for a draft elsewhere"):
        Config(**SSD, draft_placement="inline", draft_devices="1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_workers": 0}, "draft_workers = 0 is out of range; give a value from 1 to 64"),
        (
            {"draft_workers": 2, "draft_placement": "inline"},
            "draft_workers = 2 is for a draft elsewhere, and this is draft_placement = inline",
        ),
        (
            {"draft_workers": 3, "draft_placement": "remote:127.0.0.1:1,127.0.0.1:2"},
            "draft_workers = 3, and draft_placement = 'remote.* names 2; leave draft_workers out",
        ),
        ({"draft_split": "slots"}, "draft_split = 'slots' is for several workers; give draft_work"),
        (
            {"draft_workers": 2, "draft_placement": "submesh", "draft_split": "branches"},
            "draft_split = 'branches' is for a draft in processes, and this is .* = submesh",
        ),
        (
            {"draft_workers": 2, "draft_placement": "submesh", "slots": 3},
            "slots = 3 cannot be shared evenly by draft_workers = 2 in a submesh; give a mul",
        ),
        (
            {"draft_workers": 2, "draft_placement": "submesh", "slots": 2, "kv_memory": "1GiB"},
            "give mesh = 'data=2', or leave kv_memory and page_size out",
        ),
        (
            {"draft_workers": 5, "draft_placement": "submesh", "slots": 5},
            r"draft_workers = 5 cannot share the draft's 4 devices \(4,5,6,7\) evenly",
        ),
        ({"mode": "sd", "draft_workers": 2}, "draft_workers = 2 means nothing with mode = 'sd'"),
    ],
)
def test_workers_that_cannot_share_the_work_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Config(**SSD | settings).place_draft()


def grid(text):
    return Grid.parse(text)


@pytest.mark.parametrize(
    ("text", "data", "tensor"),
    [("tensor=4", 1, 4), ("data=2", 2, 1), ("data=2,tensor=4", 2, 4), ("tensor=3, data=1", 1, 3)],
)
def test_a_grid_is_written_by_its_axes(text, data, tensor):
    assert grid(text) == (data, tensor)
    assert grid(str(grid(text))) == grid(text)


@pytest.mark.parametrize("text", ["", "4", "model=2", "tensor=0", "tensor=2,tensor=2", "data=-1"])
def test_a_malformed_grid_is_refused_with_an_example(text):
    with pytest.raises(InputError, match=r"mesh = .* is not understood; .* such as tensor=4"):
        Config(mesh=text)


def test_slots_that_groups_cannot_share_are_refused():
    with pytest.raises(InputError, match="slots = 3 cannot be shared evenly by the 2 groups"):
        Config(mesh="data=2", slots=3)


def test_the_target_gets_as_many_devices_as_its_grid_has():
    groups = DeviceGroups.parse
    assert groups(None, None).split(8, grid("tensor=2")) == ((0, 1), (2, 3, 4, 5))
    assert groups(None, "0").split(4, grid("data=2")) == ((1, 2), (0,))
    assert groups("4-7", None).of_target(8, grid("data=2,tensor=2")) == (4, 5, 6, 7)
    with pytest.raises(InputError, match="has 4 devices, and the target can have 2"):
        groups(None, None).of_target(2, grid("tensor=4"))
    with pytest.raises(InputError, match="has 2 devices, and target_devices are 3; change one"):
        groups("0-2", None).of_target(8, grid("tensor=2"))
    with pytest.raises(InputError, match="target_devices = 0,1 are all devices there are, which"):
        groups(None, None).split(2, grid("tensor=2"))


@pytest.mark.parametrize("mode", [{}, {"mode": "sd", "draft": "a path"}])
def test_a_target_has_a_grid_in_every_mode_and_a_draft_beside_it_the_same(mode):
    placement = Config(**mode, mesh="data=2,tensor=2", slots=2).place_draft()
    assert placement.kind == "inline"
    assert placement.target.shape == {"data": 2, "tensor": 2}
    assert placement.draft == placement.target
    assert str(placement) == "draft_placement = inline: target on cpu:0, cpu:1, cpu:2, cpu:3"
    row = Config(**mode, target_devices="2-3").place_draft()
    assert [device.id for device in row.target.devices.flat] == [2, 3]


def test_a_draft_in_a_process_leaves_its_target_all_devices():
    placement = Config(**SSD, draft_placement="process", mesh="tensor=4").place_draft()
    assert (placement.target.shape["tensor"], placement.draft) == (4, None)


@pytest.mark.parametrize("mode", [{}, {"mode": "sd", "draft": "ngram"}])
def test_devices_of_a_draft_mean_nothing_without_ssd(mode):
    with pytest.raises(InputError, match="draft_devices = '1' means nothing with mode"):
        Config(**mode, draft_devices="1")


def test_numbers_alone_are_of_gpus():
    with pytest.raises(InputError, match=r"JAX has none here; give cpu:7 for parts of the proc"):
        Config(**SSD, draft_placement="process", draft_devices="7").place_draft()


def test_bad_devices_are_refused_before_a_model_is_looked_for():
    with pytest.raises(InputError, match="there is no device 99"):
        LLM("no such model", **SSD, draft_placement="submesh", draft_devices="99")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as far as a placement looks at it."""

    id: int
    platform: str


@pytest.mark.parametrize(
    ("platform", "count", "kind"),
    [
        ("cpu", 8, "process"),
        ("cpu", 1, "process"),
        ("gpu", 1, "process"),
        ("gpu", 2, "submesh"),
        ("tpu", 8, "submesh"),
    ],
)
def test_auto_goes_by_the_platform_and_its_devices(monkeypatch, platform, count, kind):
    monkeypatch.setattr(jax, "devices", lambda: [Chip(n, platform) for n in range(count)])
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    placement = Config(**SSD, draft_placement="auto").place_draft()
    assert (
        Config(**SSD).place_draft() == Config(**SSD | {"mode": "auto"}).place_draft() == placement
    )
    assert Config(mode="auto", draft="ngram").place_draft().kind == "inline"
    assert placement.kind == kind
    assert str(placement).startswith(f"draft_placement = {kind} (auto: ")
    assert (placement.target is not None) == (kind == "submesh")
    assert placement.cacheable == (platform != "tpu")


def test_cores_for_a_draft_that_auto_gives_devices_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Chip(0, "gpu"), Chip(1, "gpu")])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = Config(**SSD, draft_placement="auto", draft_cores="1")
    with pytest.raises(
        InputError, match=r"draft_cores = '1' is for .* submesh \(auto: there are 2"
    ):
        config.place_draft()


def test_the_choice_of_a_user_is_taken_as_it_is():
    for kind in ("inline", "process", "submesh"):
        placement = Config(**SSD, draft_placement=kind).place_draft()
        assert (placement.kind, placement.why) == (kind, None)
    assert Config().place_draft().kind == "inline"


@pytest.mark.parametrize(("kind", "lines"), [("auto", 1), ("inline", 0)])
def test_the_command_line_says_in_one_line_what_auto_took(capsys, kind, lines):
    placement = Config(**SSD, draft_placement=kind).place_draft()
    llm = mock.Mock(placement=placement, choice=None)
    loading.load(llm)
    llm.load.assert_called_once()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == shown.err.count("draft_placement = process (auto") == lines


@pytest.mark.parametrize(
    ("kind", "settings", "budgets"),
    [
        ("process", {}, AUTO_BUDGETS),
        ("remote", {}, AUTO_BUDGETS),
        ("process", {"budget": "8"}, (8,)),
        ("process", {"fan_out": "4,3,3,2,4"}, (BUDGET,)),
        ("process", {"mode": "sd"}, ()),
        ("submesh", {}, (BUDGET,)),
        ("inline", {}, (BUDGET,)),
    ],
)
def test_the_number_of_branches_is_chosen_where_every_branch_costs(kind, settings, budgets):
    config = Config(**{"mode": "ssd", "target": "t", "draft": "d"} | settings)
    assert config.budgets_at(kind) == budgets
