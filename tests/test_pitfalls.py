"""Every known bug class is guarded by tests that exist, or cannot occur for a stated reason."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAP = tomllib.loads((ROOT / "tests" / "pitfalls.toml").read_text())
ROWS = re.findall(r"^\| ([a-z-]+) \| (?!class)", (ROOT / "docs" / "pitfalls.md").read_text(), re.M)


def test_every_row_is_mapped_and_every_entry_is_a_row():
    assert len(ROWS) > 20
    assert sorted(MAP) == sorted(ROWS)


@pytest.mark.parametrize("row", MAP)
def test_the_tests_exist_or_a_reason_is_given(row):
    entry = MAP[row]
    assert bool(entry.get("tests")) != bool(entry.get("reason"))
    for test_id in entry.get("tests", []):
        file, name = test_id.split("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{test_id} does not exist"
