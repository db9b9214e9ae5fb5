"""Every known bug class and every fault has tests that exist, or a reason why it cannot occur."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["pitfalls", "faults"]
MAPS = {page: tomllib.loads((ROOT / "tests" / f"{page}.toml").read_text()) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_mapped_and_every_entry_is_a_row(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    rows = re.findall(r"^\| ([a-z-]+) \| (?!class|fault )", text, re.M)
    assert len(rows) > 20
    assert sorted(MAPS[page]) == sorted(rows)


@pytest.mark.parametrize(("page", "row"), [(page, row) for page in PAGES for row in MAPS[page]])
def test_tests_of_pitfalls_exist_or_a_reason_is_given(page, row):
    entry = MAPS[page][row]
    assert bool(entry.get("tests")) != bool(entry.get("reason"))
    later = []
    for test_id in entry.get("tests", []):
        file, name = test_id.split("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{test_id} does not exist"
        marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
        marks += [
            ast.unparse(statement)
            for statement in tree.body
            if "pytestmark" in ast.unparse(statement)
        ]
        later.append(any("mark.more" in mark or "mark.slow" in mark for mark in marks))
    assert page != "pitfalls" or not later or not all(later), "none of them runs by default"
