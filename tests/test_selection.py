"""Suites that are run in parts have each test in one of them."""

import argparse

import pytest

from tests.selection import Part


@pytest.mark.parametrize("tests", [0, 1, 7, 8, 343])
def test_parts_have_each_test_once_and_in_order(tests):
    items = list(range(tests))
    parts = [items[Part(number, 8).of(items)] for number in range(1, 9)]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_each_test_is_in_one_part_by_its_name_and_cases_of_a_matrix_in_all():
    names = [f"tests/test_a.py::test_b[{case}-True]" for case in range(40)]
    parts = [[name for name in names if Part(number, 3).has(name)] for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert min(map(len, parts)) >= 6


def test_a_part_is_parsed():
    assert Part.parse("3/8") == Part(3, 8)


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "-1/8", "a/b", "1/0", ""])
def test_a_malformed_part_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write 3/8 for the third of eight"):
        Part.parse(text)
