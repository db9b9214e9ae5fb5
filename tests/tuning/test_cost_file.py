"""What one start measured serves the next one, or is measured again."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from ssd_jax.roles.drafting import GAP_CLASSES
from ssd_jax.system.cache_dir import cache_dir, compile_cache, costs_cache
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.throughput import Costs, Guess, RankTables

COUNTS = (((0.0, 1.5, 2.0, 3.0, 4.0, 5.0),) * GAP_CLASSES,) * 2
KNOWN = KnownCosts(
    Costs(
        verify={0: 0.1, 4: 0.15},
        ahead=0.08,
        draft=0.0,
        rounds={1: 0.12, 4: 0.2},
        trees={15: 0.3},
        backup=0.01,
        step={4: 0.02, 16: 0.03},
        contention=0.2,
        few={1: Costs(verify={0: 0.05, 4: 0.06}, step={4: 0.01, 16: 0.02})},
    ),
    Guess(acceptance=0.7, single_miss=0.3, judged=90, ranks=RankTables(COUNTS, COUNTS)),
    slowness=1.1,
    doubted=True,
)
IDENTITY = {"device": ["cpu", 2], "models": ["a", None], "widths": (0, 4)}
ASKED = {"widths": (0, 4), "budgets": (4, 16)}


def test_costs_that_were_written_are_read_back(tmp_path):
    file = CostFile(tmp_path / "costs", IDENTITY)
    assert file.read(**ASKED) is None
    file.write(KNOWN)
    assert CostFile(tmp_path / "costs", IDENTITY).read(**ASKED) == KNOWN
    again = dataclasses.replace(KNOWN, guess=Guess(acceptance=0.5, single_miss=1.0))
    file.write(again)
    assert file.read(**ASKED) == again
    assert [path.suffix for path in (tmp_path / "costs").iterdir()] == [".json"]


def test_costs_of_a_path_that_is_not_utf8_are_kept(tmp_path):
    identity = IDENTITY | {"target": os.fsdecode(b"caf\xe9")}
    CostFile(tmp_path, identity).write(KNOWN)
    assert CostFile(tmp_path, identity).read(**ASKED) == KNOWN


def test_costs_of_other_settings_are_in_another_file(tmp_path):
    CostFile(tmp_path, IDENTITY).write(KNOWN)
    for changes in ({"device": ["cpu", 4]}, {"models": ["b", None]}, {"widths": (0, 2)}):
        assert CostFile(tmp_path, IDENTITY | changes).read(**ASKED) is None


def test_a_cost_file_of_other_settings_under_the_same_name_is_not_read(tmp_path):
    file = CostFile(tmp_path, IDENTITY)
    file.write(KNOWN)
    content = json.loads(file.path.read_text())
    file.path.write_text(json.dumps(content | {"key": json.dumps({"device": ["gpu", 1]})}))
    assert file.read(**ASKED) is None


def test_costs_that_are_needed_and_not_there_are_measured_again(tmp_path):
    file = CostFile(tmp_path, IDENTITY)
    file.write(KNOWN)
    assert file.read(widths=(0, 4, 8), budgets=(4, 16)) is None
    assert file.read(widths=(0, 4), budgets=(4,)) is None


def broken(part, value):
    def change(content):
        known = content["known"]
        found = next(
            (section for section in (known["costs"], known["guess"]) if part in section), known
        )
        found[part] = value
        return json.dumps(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "",
        lambda content: "no JSON",
        lambda content: "[" * 100_000,
        lambda content: "[]",
        lambda content: json.dumps(content)[:-9],
        lambda content: json.dumps(content | {"format": 0}),
        lambda content: json.dumps(content | {"known": None}),
        lambda content: json.dumps(content | {"known": content["known"] | {"costs": None}}),
        broken("verify", {"0": 0.1, "4": 0.0}),
        broken("verify", {"0": 0.1, "four": 0.1}),
        broken("verify", [0.1, 0.2]),
        broken("step", {"4": "fast", "16": 1.0}),
        broken("step", {"4": True, "16": 1.0}),
        broken("backup", -1.0),
        broken("draft", float("nan")),
        broken("acceptance", float("inf")),
        broken("single_miss", 1.5),
        broken("r", -1.0),
        broken("judged", -1),
        broken("judged", 10**400),
        broken("draft", 10**400),
        broken("contention", -0.1),
        broken("rounds", {"1": 0.0}),
        broken("slowness", 0.0),
        broken("slowness", "slow"),
        broken("doubted", 1),
    ],
)
def test_a_damaged_cost_file_is_measured_and_written_anew(tmp_path, change):
    file = CostFile(tmp_path, IDENTITY)
    file.write(KNOWN)
    file.path.write_text(change(json.loads(file.path.read_text())))
    assert file.read(**ASKED) is None
    file.write(KNOWN)
    assert file.read(**ASKED) == KNOWN


def test_a_cost_file_that_is_no_text_is_not_read(tmp_path):
    file = CostFile(tmp_path, IDENTITY)
    file.path.write_bytes(b"\xff\xfe{}")
    assert file.read(**ASKED) is None


def test_a_failed_write_leaves_the_old_cost_file_and_nothing_else(tmp_path, monkeypatch):
    file = CostFile(tmp_path, IDENTITY)
    file.write(KNOWN)

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        file.write(dataclasses.replace(KNOWN, guess=Guess(acceptance=0.1)))
    assert file.read(**ASKED) == KNOWN
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cost_directory_that_cannot_be_written_is_named_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    file = CostFile(tmp_path / "file" / "costs", IDENTITY)
    file.write(KNOWN)
    file.write(KNOWN)
    [message] = caplog.messages
    assert "give another `compile_cache`, or another cache by XDG_CACHE_HOME" in message
    assert file.read(**ASKED) is None


def test_without_a_directory_costs_are_not_kept():
    file = CostFile(None, IDENTITY)
    file.write(KNOWN)
    assert file.read(**ASKED) is None


def test_costs_are_kept_beside_compiled_programs(tmp_path):
    assert costs_cache("auto") == cache_dir() / "costs"
    assert costs_cache("auto").parent == compile_cache("auto").parent
    assert costs_cache(str(tmp_path)) == tmp_path / "costs"


def test_every_field_of_costs_is_written_and_read():
    """A field that is added must be written and read."""
    assert {field.name for field in dataclasses.fields(Costs)} == {
        "verify", "ahead", "draft", "rounds", "trees", "backup", "step", "contention", "few",
    }  # fmt: skip
