"""Programs compile side by side."""

import threading

import pytest

from ssd_jax.devices.programs.program_spec import compile_all


class Spec:
    def __init__(self, begun, *, fails=False):
        self.begun, self.fails = begun, fails

    def compile(self, _mesh, name):
        self.begun.append(name)
        if self.fails:
            raise KeyError(name)
        threading.Event().wait(0.2)
        return name


def test_progress_counts_programs():
    lines = []
    specs = {(n,): Spec([]) for n in range(3)}
    assert compile_all(specs, None, lambda *done: lines.append(done)) == {
        name: name for name in specs
    }
    assert lines == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_error_cancels_programs_not_begun():
    begun = []
    specs = {(n,): Spec(begun, fails=not n) for n in range(100)}
    with pytest.raises(KeyError):
        compile_all(specs, None)
    assert len(begun) < 50
