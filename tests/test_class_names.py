"""A name of a class means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import ssd_jax

SOURCES = sorted(Path(ssd_jax.__file__).parent.rglob("*.py"))


def class_names() -> Counter[str]:
    """How often each public class is defined."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def test_each_class_name_is_defined_once():
    found = class_names()
    assert len(found) > 100
    assert {name for name, times in found.items() if times > 1 and name[0] != "_"} == set()
