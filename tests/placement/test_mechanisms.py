"""Decoders with every mechanism say wherever they run what one device says token by token."""

from __future__ import annotations

import functools

import pytest

from tests.checkpoints import tiny_pair
from tests.llm.runs import ids, outputs, requests
from tests.models.every_mechanism import AT_ONCE, FAMILIES, SIDE_BY_SIDE
from tests.placement.meshes import SHAPE, opened

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("steady_streams")]

MADE = {
    "at once": ("granite", AT_ONCE),
    "side by side": ("granite", SIDE_BY_SIDE),
    "gpt-oss": ("gpt_oss", FAMILIES["gpt_oss"]),
}
PROCESS = {"draft_placement": "process"}
PLACES = {
    "process": PROCESS,
    "slots of two processes": PROCESS | {"draft_workers": 2, "draft_split": "slots"},
    "branches of two processes": PROCESS | {"draft_workers": 2, "draft_split": "branches"},
    "submesh": {"draft_placement": "submesh", "target_devices": "1", "draft_devices": "2,3"},
    "2 devices": {"mesh": "tensor=2"},
    "4 devices": {"mesh": "tensor=4"},
    "2 devices, each with experts": {"mesh": "tensor=2", "expert_parallel": True},
    "2 groups, each device with experts": {"mesh": "data=2,tensor=2", "expert_parallel": True},
}
TREES = {"tree_nodes": 8}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("mechanisms")

    @functools.cache
    def written(name):
        family, changes = MADE[name]
        return tiny_pair.write(root / name, family, **SHAPE | changes)

    return written


@pytest.fixture(scope="module")
def expected(pair):
    """What one device says in mode ar."""

    @functools.cache
    def said(name):
        settings = {"mode": "ar", "draft": None, "draft_placement": None}
        with opened(pair(name), None, there={}, **settings, k=None, budget=None) as llm:
            found = ids(outputs(llm, requests(llm, "coupled"), "ar"))
        assert len({tuple(text) for text in found}) > 1
        return found

    return said


@pytest.mark.parametrize(
    ("made", "place", "trees"),
    [
        ("at once", "process", {}),
        ("side by side", "process", TREES),
        ("gpt-oss", "process", {}),
        ("at once", "slots of two processes", {}),
        ("at once", "branches of two processes", TREES),
        ("at once", "submesh", {}),
        ("at once", "2 devices", TREES),
        ("side by side", "4 devices", {}),
        ("gpt-oss", "2 devices, each with experts", TREES),
        ("at once", "2 groups, each device with experts", {}),
    ],
)
def test_every_mode_says_what_one_device_says_token_by_token(pair, expected, made, place, trees):
    settings = {"mesh": None} | PLACES[place] | trees
    with opened(pair(made), there={}, **settings) as llm:
        for mode in llm.modes:
            found = outputs(llm, requests(llm, "coupled"), mode)
            assert ids(found) == expected(made), mode
    assert max(output.metrics["hit_rate"] or 0 for output in found) > 0
    if trees:
        assert sum(output.metrics["tree_rounds"] or 0 for output in found) > 8
